// A development aid: with UNSLOTH_JITTER defined, warps sleep for a random time, often none,
// wherever they synchronise. What was right by luck of timing then comes out wrong.
#pragma once

#include <cstdint>

namespace unsloth {

__device__ __forceinline__ void jitter() {
#ifdef UNSLOTH_JITTER
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  uint32_t hash = (now ^ (blockIdx.x * 64 + threadIdx.x / 32) * 0x9E3779B9u) * 0x85EBCA6Bu;
  hash ^= hash >> 13;
  if (hash % 8 == 0) __nanosleep(hash >> 8 & 2047);
#endif
}

// All lanes of a warp multiply together. One that slept by itself, where a lane alone arrives at a
// barrier, is to wait for the others: its product would be an illegal instruction. Without delays
// that arrival is one instruction, and no lane is ever apart.
__device__ __forceinline__ void rejoin() {
#ifdef UNSLOTH_JITTER
  __syncwarp();
#endif
}

}  // namespace unsloth
