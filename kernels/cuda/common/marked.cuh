// Words in the memory of another device, each beside a mark that tells whether it has come.
#pragma once

#include <cstdint>

namespace unsloth {

// Two words at a multiple of 16 bytes. Each is written as one with its mark, and so read.
__device__ __forceinline__ void write_marked(void *to, uint2 words, uint32_t mark) {
  const uint64_t high = static_cast<uint64_t>(mark) << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(high | words.x),
               "l"(high | words.y)
               : "memory");
}

// Whether both have this mark.
__device__ __forceinline__ bool read_marked(const void *from, uint32_t mark, uint2 &words) {
  uint64_t first, second;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
  words = {static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
  return first >> 32 == mark && second >> 32 == mark;
}

// A number of the host's that it may change meanwhile.
__device__ __forceinline__ uint32_t read_of_host(const uint32_t *from) {
  uint32_t number;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
  return number;
}

}  // namespace unsloth
