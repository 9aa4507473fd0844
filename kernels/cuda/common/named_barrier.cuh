// Named barriers: sixteen per block, counted in threads. `sync` waits for the count to be reached,
// `arrive` only adds to it, so a pair of them hands a turn from one warpgroup to another.
// Barrier 0 belongs to __syncthreads.
#pragma once

#include "jitter.cuh"

namespace unsloth {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace unsloth
