// Words of global memory by which a block tells another what it has done: they hold a launch's tag
// then, which no other launch has, and any other number before.
#pragma once

#include <cstdint>

namespace unsloth {

// The thread has passed a barrier with the threads whose stores the other block is to see.
__device__ __forceinline__ void store_tag(uint64_t *to, uint64_t tag) {
  __threadfence();
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(tag) : "memory");
}

// Waits for a tag, and with it for what its block had stored before.
__device__ __forceinline__ void await_tag(const uint64_t *from, uint64_t tag) {
  uint64_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
  } while (seen != tag);
}

}  // namespace unsloth
