// Copies from global to shared memory that the thread does not wait for, of every architecture
// since sm_80.
#pragma once

#include "memory.cuh"

namespace unsloth {

// Starts to copy 16 bytes, both aligned to as many; they pass by the first cache.
__device__ __forceinline__ void start_copy(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}

// The same, or zeros in its place, for which nothing is read.
__device__ __forceinline__ void start_copy_or_zeros(void *to, const void *from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}

// Has a line of 128 bytes fetched to the second cache.
__device__ __forceinline__ void fetch_line(const void *from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Makes one group of the copies that the thread started since the last; there may be none.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for the thread's copies, but for the last `kLater` groups. Other threads see them behind a
// barrier.
template <int kLater>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace unsloth
