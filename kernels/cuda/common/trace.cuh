// A development aid: with UNSLOTH_TRACE defined, thread 0 of every warpgroup of block 0 notes when
// it passes marked points. The harness reads the notes from `unsloth_trace`.
#pragma once

#include <cstdint>

namespace unsloth {

#ifdef UNSLOTH_TRACE

constexpr int kTraceEvents = 2048;
extern "C" __device__ uint2 unsloth_trace[4][kTraceEvents];  // event, clock; by warpgroup

struct Trace {
  int count = 0;

  __device__ __forceinline__ void operator()(uint32_t event) {
    if (threadIdx.x % 128 != 0 || blockIdx.x != 0 || count >= kTraceEvents) return;
    uint32_t now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    unsloth_trace[threadIdx.x / 128][count++] = {event, now};
  }
};

#else

struct Trace {
  __device__ __forceinline__ void operator()(uint32_t) {}
};

#endif

}  // namespace unsloth
