// TMA: the engine that copies boxes of a tensor between global and shared memory.
//
// One thread issues a copy, of a load one lane of a whole warp; the tensor map, made on the host,
// holds the address, extents, strides, box and swizzle. Parts of a box outside the tensor read as
// zero and are not written, but count in full towards the barrier's bytes. Coordinates run from the
// innermost dimension out.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace unsloth {

// Cache policies in the encoding that createpolicy returns.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // read once
constexpr uint64_t kEvictLast = 0x14F0000000000000;   // read again by other blocks

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap *map,
                                            Mbarrier *full, uint64_t policy, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n"
      "}" ::"r"(destination),
      "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t destination, const CUtensorMap *map,
                                            Mbarrier *full, uint64_t policy, int c0, int c1, int c2,
                                            int c3, int c4) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;\n"
      "}" ::"r"(destination),
      "l"(map), "r"(shared_address(full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Copies bytes as they lie; all of it in multiples of 16. Issued as a load is.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void *source, uint32_t bytes,
                                          Mbarrier *full) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n"
      "}" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(shared_address(full))
      : "memory");
}

// The same by one thread alone. Marked as read once, rows that are streamed arrive later: there is
// no policy.
__device__ __forceinline__ void bulk_load_by_thread(uint32_t destination, const void *source,
                                                    uint32_t bytes, Mbarrier *full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(shared_address(full))
      : "memory");
}

__device__ __forceinline__ void tma_store_5d(const CUtensorMap *map, uint32_t source, int c0,
                                             int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Adds numbers as they lie to global memory, in no order that can be told; bytes as for a copy.
__device__ __forceinline__ void bulk_add(float *destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// Copies bytes as they lie to global memory, as many as for a load.
__device__ __forceinline__ void bulk_store(float *destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// Closes the group of stores this thread has issued since the last one.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's newest groups have read their shared memory, which may then be
// written again.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's stores and additions are in global memory, for itself to see.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Between this thread's ordinary accesses to global memory and those of the copy engine.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace unsloth
