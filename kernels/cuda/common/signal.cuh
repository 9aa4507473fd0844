// Numbers in global memory by which a block tells others what it has done.
#pragma once

#include "tma.cuh"

namespace unsloth {

// Waits until another block has published a value, and with it what it had added before.
__device__ __forceinline__ void await_value(const int *from, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
  } while (seen != value);
  fence_async_proxy_global();
}

// Adds to a number, and has what others had done before they added to it.
__device__ __forceinline__ int claim(int *to, int value) {
  int found;
  asm volatile("atom.acquire.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(found)
               : "l"(to), "r"(value)
               : "memory");
  fence_async_proxy_global();
  return found;
}

// Waits until others have added as much to a number, and with it for what they had done before.
__device__ __forceinline__ void await_at_least(const int *from, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
  } while (seen < value);
  fence_async_proxy_global();
}

// The caller, or a thread that it has met, has waited for what the copy engine was to write.
__device__ __forceinline__ void publish_value(int *to, int value) {
  fence_async_proxy_global();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// The same, for await_at_least.
__device__ __forceinline__ void publish_more(int *to, int value) {
  fence_async_proxy_global();
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

}  // namespace unsloth
