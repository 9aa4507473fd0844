// Codes of blocks as floats of 16 bits, for tensor cores.
#pragma once

#include "common/blocks.cuh"
#include "common/math.cuh"

namespace unsloth {

// Four codes, a byte each, as numbers without the format's zero: none is rounded. A byte in the low
// bits of 128 in bf16, or of 1024 in f16, is added to that.
template <Blocks kBlocks, class T>
__device__ __forceinline__ void numbers_of(uint32_t codes, uint32_t (&pairs)[2]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kUpper = kHalf ? 0x64646464 : 0x43434343;
  constexpr uint32_t kWhich[2] = {0x4140, 0x4342};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (kBlocks == Blocks::kQ8_0 && !kHalf) {
      // Of the eight bits of a code with a sign, seven fit; the eighth makes 128 to 256.
      const uint32_t low = __byte_perm(codes & 0x7f7f7f7f, kUpper, kWhich[i]);
      const uint32_t high = __byte_perm(~codes & 0x80808080, kUpper, kWhich[i]);
      pairs[i] = subtract<T>(low, high);
    } else {
      constexpr uint32_t kZero = (kHalf ? 0x6400 : 0x4300) + Format<kBlocks>::kZero;
      pairs[i] = subtract<T>(__byte_perm(codes, kUpper, kWhich[i]), kZero * 0x10001);
    }
  }
}

}  // namespace unsloth
