// Codes of blocks as floats of 16 bits, for tensor cores.
#pragma once

#include "common/blocks.cuh"
#include "common/math.cuh"

namespace unsloth {

// Four codes, a byte each, as numbers without the format's zero: none is rounded. A byte in the low
// bits of 128 in bf16, or of 1024 in f16, is added to that. `kRaised`: the sum
// is the number, and nothing is taken off it.
template <Blocks kBlocks, class T, bool kRaised = false>
__device__ __forceinline__ void numbers_of(uint32_t codes, uint32_t (&pairs)[2]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kUpper = kHalf ? 0x64646464 : 0x43434343;
  constexpr uint32_t kWhich[2] = {0x4140, 0x4342};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (kRaised) {
      pairs[i] = __byte_perm(codes, kUpper, kWhich[i]);
    } else if constexpr (kBlocks == Blocks::kQ8_0 && !kHalf) {
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

// What a thread holds of a row's 32 neighbours `i`, as its part of the left-hand sides of two
// products of 16 neighbours each: row `h` of its two there. `Bytes` reads the row where it is
// staged; `t` is the lane in its quad.
template <Blocks kBlocks, class T, class Bytes>
__device__ __forceinline__ void left_hand_sides(const uint8_t *row, uint32_t i, uint32_t t,
                                                uint32_t h, uint32_t (&to)[2][4]) {
  using F = Format<kBlocks>;
  constexpr uint32_t k32s = F::kLength / 32;
  const uint32_t j = i % k32s;
  const Bytes block = {row, i / k32s * F::kBytes};
  const Bytes of_lane = {row + 4 * t, i / k32s * F::kBytes};
  uint32_t fifth = 0;
  if constexpr (kHasFifthBits<kBlocks>) fifth = block(kFifthBits<kBlocks>);
#pragma unroll
  for (uint32_t half = 0; half < 2; half++) {
    const uint32_t quad = 8 * j + 4 * half;
    uint32_t four = quad_of_codes<kBlocks>(of_lane, block, quad, t);
    if constexpr (kHasFifthBits<kBlocks>) four |= fifth_bits(fifth, quad + t);
    uint32_t pairs[2];
    numbers_of<kBlocks, T>(four, pairs);
    to[half][h] = pairs[0], to[half][2 + h] = pairs[1];
  }
}

}  // namespace unsloth
