// Blocks of a cluster, which reach each other's shared memory.
#pragma once

#include <cstdint>

#include "jitter.cuh"
#include "memory.cuh"

namespace unsloth {

// Says that a thread has come so far, and waits until all threads of all blocks of the cluster have
// said so.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Where what lies at an address of this block's shared memory lies in that of block `rank`.
__device__ __forceinline__ uint32_t peer_address(const void *mine, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(mine)), "r"(rank));
  return address;
}

// Four floats that lie there.
__device__ __forceinline__ float4 load_from_peer(uint32_t address) {
  float4 four;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
  return four;
}

// A number that lies there.
__device__ __forceinline__ int load_number_from_peer(uint32_t address) {
  int number;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(number) : "r"(address) : "memory");
  return number;
}

// Stores to another block's shared memory, where it can be read behind the next `cluster_sync`.
__device__ __forceinline__ void store_to_peer(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Four floats, to a multiple of 16 bytes.
__device__ __forceinline__ void store_to_peer(uint32_t address, const float4 &four) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(four.x),
               "f"(four.y), "f"(four.z), "f"(four.w)
               : "memory");
}

// Stores to another block's shared memory. Its barrier there counts the 16 bytes once they can be
// read.
__device__ __forceinline__ void store_async(const float4 &value, uint32_t to, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

// Copies shared memory to another block's, whose barrier counts the bytes; all of it in multiples
// of
// 16. By one thread.
__device__ __forceinline__ void bulk_copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes,
                                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Arrives at another block's barrier there, once what this thread read and wrote before is done.
__device__ __forceinline__ void arrive_at_peer(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Arrives likewise once the copy engine and products, which this thread has waited for, have read
// shared memory. Nothing that the thread wrote is promised: a release would wait here until all its
// additions to global memory are done.
__device__ __forceinline__ void arrive_at_peer_after_reads(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

}  // namespace unsloth
