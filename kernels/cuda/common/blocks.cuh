// GGUF's weights in blocks: what lies where in a block, four neighbours at a time.
//
// Every format comes down to the same three: a code without a sign for each weight, and for each
// group of neighbours a scale and an offset, with weight = scale * code + offset. Four neighbours
// that begin at a multiple of four have their codes in the same four bytes, or in one.
//
// Whoever asks says how four bytes of the block are read: `load(at)` gives those from byte `at`.
// Places are of a part that is known to the compiler and a lane's, `lane` quads further, less than
// four.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "contract.h"

namespace unsloth {

__device__ __forceinline__ float half_of(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

struct Factors {
  float scale, offset;
};

// Neighbours of a block, its bytes, neighbours that share a scale; what all codes have too much,
// where that is the offset of all groups; where the codes' low bits begin.
template <int kLength_, int kBytes_, int kGroup_, int kZero_, int kCodes_>
struct Shape {
  static constexpr int kLength = kLength_;
  static constexpr int kBytes = kBytes_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kZero = kZero_;
  static constexpr int kCodes = kCodes_;
  // What blocks, and words in them, are multiples of in a row.
  static constexpr int kAlignment = kBytes % 4 == 0 ? 4 : 2;
};

template <Blocks>
struct Format;
template <>
struct Format<Blocks::kQ8_0> : Shape<32, 34, 32, 128, 2> {};
template <>
struct Format<Blocks::kQ4_0> : Shape<32, 18, 32, 8, 2> {};
template <>
struct Format<Blocks::kQ4_1> : Shape<32, 20, 32, 0, 4> {};
template <>
struct Format<Blocks::kQ5_0> : Shape<32, 22, 32, 16, 6> {};
template <>
struct Format<Blocks::kQ5_1> : Shape<32, 24, 32, 0, 8> {};
template <>
struct Format<Blocks::kQ4K> : Shape<256, 144, 32, 0, 16> {};
template <>
struct Format<Blocks::kQ5K> : Shape<256, 176, 32, 0, 48> {};
template <>
struct Format<Blocks::kQ6K> : Shape<256, 210, 16, 32, 0> {};
// One scale for all, which is that of each group.
template <>
struct Format<Blocks::kTq1_0> : Shape<256, 54, 64, 1, 0> {};
template <>
struct Format<Blocks::kTq2_0> : Shape<256, 66, 64, 1, 0> {};
template <>
struct Format<Blocks::kQ2_0> : Shape<64, 18, 64, 1, 2> {};

// Where the one f16 is by which codes are multiplied.
template <Blocks kBlocks>
constexpr int kScale = kBlocks == Blocks::kTq1_0   ? 52
                       : kBlocks == Blocks::kTq2_0 ? 64
                                                   : 0;

// Digit `n` of base 3 of each byte of a word, which is 256/243 times a number of five digits,
// rounded up: times 3^n, what is above the digit is lost, and what is below it is the fraction.
__device__ __forceinline__ uint32_t digits_of_three(uint32_t word, uint32_t n) {
  constexpr uint32_t kEven = 0x00ff00ff;
  // 1, 3, 9, 27, 81.
  const uint32_t power = n == 4 ? 81 : 0x1b090301u >> 8 * n & 255;
  const uint32_t even = (word & kEven) * power & kEven, odd = (word >> 8 & kEven) * power & kEven;
  return (even * 3 >> 8 & kEven) | (odd * 3 & 0xff00ff00);
}

// The codes of four neighbours, a byte each, of quad `quad + lane` of the block; `load` has the
// lane's distance in it, 4 `lane` bytes, `of_all` has not. `quad` is a multiple of four.
template <Blocks kBlocks, class Load, class OfAll>
__device__ __forceinline__ uint32_t quad_of_codes(const Load &load, const OfAll &of_all,
                                                  uint32_t quad, uint32_t lane) {
  using F = Format<kBlocks>;
  constexpr uint32_t kLow = 0x0f0f0f0f;
  if constexpr (kBlocks == Blocks::kQ8_0) {
    return load(F::kCodes + 4 * quad) ^ 0x80808080;
  } else if constexpr (kBlocks == Blocks::kQ4K || kBlocks == Blocks::kQ5K) {
    // 32 bytes have the low bits of a group and, above them, those of the next.
    const uint32_t group = quad / 8;
    const uint32_t both = load(F::kCodes + group / 2 * 32 + quad % 8 * 4);
    const uint32_t low = both >> group % 2 * 4 & kLow;
    if constexpr (kBlocks == Blocks::kQ4K) return low;
    // Bit `group` of byte i is the fifth of the group's code i.
    const uint32_t fifth = load(16 + quad % 8 * 4) >> group;
    return low | (fifth & 0x01010101) << 4;
  } else if constexpr (kBlocks == Blocks::kQ6K) {
    // Of each half: 64 bytes of low bits, those of 64 codes below those of the next 64; 32 bytes of
    // high bits, of four codes that lie 32 apart.
    const uint32_t half = quad / 32, in_half = quad % 32;
    const uint32_t low = load(64 * half + in_half % 16 * 4) >> in_half / 16 * 4;
    const uint32_t high = load(128 + 32 * half + in_half % 8 * 4) >> in_half / 8 * 2;
    return (low & kLow) | (high & 0x03030303) << 4;
  } else if constexpr (kBlocks == Blocks::kTq2_0) {
    // Of each half: 32 bytes, of four codes that lie 32 apart.
    const uint32_t half = quad / 32, in_half = quad % 32;
    return load(32 * half + in_half % 8 * 4) >> in_half / 8 * 2 & 0x03030303;
  } else if constexpr (kBlocks == Blocks::kTq1_0) {
    // 32 bytes of five codes each that lie 32 apart, 16 of such that lie 16 apart, and four of four
    // codes that lie four apart.
    if (quad < 40) return digits_of_three(load(quad % 8 * 4), quad / 8);
    if (quad < 60) return digits_of_three(load(32), (quad - 40) / 4);
    return digits_of_three(of_all(48), lane);
  } else if constexpr (kBlocks == Blocks::kQ2_0) {
    // A byte.
    const uint32_t byte = of_all(F::kCodes + quad) >> 8 * lane & 255;
    const uint32_t nibbles = (byte | byte << 12) & 0x000f000f;
    return (nibbles | nibbles << 6) & 0x03030303;
  } else {
    // 16 bytes: the low bits of codes 0 to 15, above them those of 16 to 31.
    const uint32_t low = load(F::kCodes + quad % 4 * 4) >> quad / 4 * 4 & kLow;
    return low;
  }
}

// The fifth bits of Q5_0 and Q5_1 lie in a word: `word` has them, of quad `quad` as above.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t word, uint32_t quad) {
  // A bit to each byte: no two of the shifted copies meet.
  return ((word >> quad * 4 & 15) * 0x02040810) & 0x10101010;
}

template <Blocks kBlocks>
constexpr bool kHasFifthBits = kBlocks == Blocks::kQ5_0 || kBlocks == Blocks::kQ5_1;

// Where their word is.
template <Blocks kBlocks>
constexpr int kFifthBits = Format<kBlocks>::kCodes - 4;

// The eight scales and the eight offsets of Q4_K and Q5_K, a byte each. The first four of each are
// the low six bits of bytes 0 to 3 and 4 to 7; the last four have their low halves in bytes 8 to
// 11, and what is left above the first.
struct ScalesOfScales {
  float scale, offset;
  uint32_t scales[2], offsets[2];

  template <class Load>
  __device__ __forceinline__ explicit ScalesOfScales(const Load &load) {
    const uint32_t factors = load(0), first = load(4), second = load(8), third = load(12);
    scale = half_of(factors);
    offset = -half_of(factors >> 16);
    scales[0] = first & 0x3f3f3f3f;
    offsets[0] = second & 0x3f3f3f3f;
    scales[1] = (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030);
    offsets[1] = (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030);
  }

  __device__ __forceinline__ Factors of(uint32_t group) const {
    const uint32_t shift = group % 4 * 8;
    const uint32_t of_scale = (group < 4 ? scales[0] : scales[1]) >> shift & 255;
    const uint32_t of_offset = (group < 4 ? offsets[0] : offsets[1]) >> shift & 255;
    return {scale * static_cast<float>(of_scale), offset * static_cast<float>(of_offset)};
  }
};

// The same of one group, which the compiler need not know; `byte` reads a byte of the block, `half`
// an f16's bits.
template <class Half, class Byte>
__device__ __forceinline__ Factors scaled_scales(const Half &half, const Byte &byte,
                                                 uint32_t group) {
  uint32_t scale = byte(4 + group % 4), offset = byte(8 + group % 4);
  if (group < 4) {
    scale &= 63, offset &= 63;
  } else {
    const uint32_t low = byte(8 + group);
    scale = (low & 15) | (scale >> 2 & 0x30);
    offset = low >> 4 | (offset >> 2 & 0x30);
  }
  return {half_of(half(0)) * static_cast<float>(scale),
          -half_of(half(2)) * static_cast<float>(offset)};
}

template <Blocks kBlocks>
constexpr bool kHasScalesOfScales = kBlocks == Blocks::kQ4K || kBlocks == Blocks::kQ5K;

// Of a group of the other formats. Offsets that are the same multiple of each scale are left out:
// the codes have them (`kZero`). `half` and `byte` read an f16's bits and a byte of the block.
template <Blocks kBlocks, class Half, class Byte>
__device__ __forceinline__ Factors factors_of(const Half &half, const Byte &byte, uint32_t group) {
  if constexpr (kBlocks == Blocks::kQ6K) {
    return {half_of(half(208)) * static_cast<float>(static_cast<int8_t>(byte(192 + group))), 0};
  } else if constexpr (kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1) {
    return {half_of(half(0)), half_of(half(2))};
  } else {
    return {half_of(half(kScale<kBlocks>)), 0};
  }
}

}  // namespace unsloth
