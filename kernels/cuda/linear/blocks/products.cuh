// Codes of 16 rows of a weight in blocks by digits of x, on tensor cores, and what scales make of
// the products.
#pragma once

#include "common/mma.cuh"
#include "linear/blocks/digits.cuh"
#include "linear/blocks/units.cuh"

namespace unsloth {

template <Blocks kBlocks>
struct Products {
  using F = Format<kBlocks>;
  using D = Digits<kBlocks>;
  static constexpr uint32_t k32s = F::kLength / 32;
  // Sums of a product that have scales of their own.
  static constexpr uint32_t kParts = D::kHalves ? 2 : 1;
  static constexpr bool kHasOffsets =
      kHasScalesOfScales<kBlocks> || kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1;

  // The factors of a row's block. `kAlone`: of the one group that is asked for.
  template <bool kAlone>
  struct FactorsOf {
    Staged<F::kAlignment, false> block;

    __device__ __forceinline__ FactorsOf(Staged<F::kAlignment, false> block) : block(block) {}

    __device__ __forceinline__ Factors of(uint32_t group) const {
      const auto half = [&](int at) { return block.half(at); };
      const auto byte = [&](int at) { return block.byte(at); };
      if constexpr (!kHasScalesOfScales<kBlocks>) {
        return factors_of<kBlocks>(half, byte, group);
      } else if constexpr (kAlone) {
        return scaled_scales(half, byte, group);
      } else {
        // Of all groups, whose scales are taken apart but once.
        return ScalesOfScales(block).of(group);
      }
    }
  };

  // The block that has a unit's 32 neighbours i.
  template <bool kRowAligned>
  static __device__ __forceinline__ auto block_of(const uint8_t *row, uint32_t i) {
    return Staged<F::kAlignment, kRowAligned>{row, i / k32s * F::kBytes};
  }

  // A lane's codes of a unit's 32 neighbours i of rows g and g + 8, as the left-hand side of
  // products; `t`: the lane in its quad.
  template <bool kRowAligned>
  static __device__ __forceinline__ void codes_of(const uint8_t *const (&rows)[2], uint32_t i,
                                                  uint32_t t, uint32_t (&codes)[4]) {
    const uint32_t j = i % k32s;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const auto block = block_of<kRowAligned>(rows[h], i);
      const auto of_lane = block_of<kRowAligned>(rows[h] + 4 * t, i);
      uint32_t fifth = 0;
      if constexpr (kHasFifthBits<kBlocks>) fifth = block(kFifthBits<kBlocks>);
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const uint32_t quad = 8 * j + 4 * half;
        uint32_t &to = codes[2 * half + h];
        to = quad_of_codes<kBlocks>(of_lane, block, quad, t);
        if constexpr (kHasFifthBits<kBlocks>) to |= fifth_bits(fifth, quad + t);
        if constexpr (D::kSigned) to ^= 0x80808080;
      }
    }
  }

  // Adds to `sums` the products with numbers of x: of all 32 neighbours, or of their halves.
  static __device__ __forceinline__ void multiply(const uint32_t (&codes)[4], uint2 numbers,
                                                  int32_t (&sums)[kParts][4]) {
    if constexpr (D::kHalves) {
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const uint32_t a[2] = {codes[2 * half], codes[2 * half + 1]};
        mma_unsigned(a, half == 0 ? numbers.x : numbers.y, sums[half]);
      }
    } else {
      const uint32_t b[2] = {numbers.x, numbers.y};
      if constexpr (D::kSigned) {
        mma(codes, b, sums[0]);
      } else {
        mma_unsigned(codes, b, sums[0]);
      }
    }
  }

  // Scales the products of 32 neighbours j of a block, those with upper digits and those with
  // lower, of rows g and g + 8, and adds them.
  template <class FactorsOf>
  static __device__ __forceinline__ void add(const int32_t (&products)[kParts][4],
                                             const typename D::Scale &of,
                                             const FactorsOf (&factors)[2], uint32_t j,
                                             float (&sums)[2]) {
#pragma unroll
    for (uint32_t part = 0; part < kParts; part++) {
      float of_x;
      if constexpr (D::kHalves) {
        of_x = of.sums[part];
      } else {
        of_x = of.sum;
      }
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const int32_t *digits = products[part] + 2 * h;
        const float product = static_cast<float>(digits[0] * 256 + digits[1]);
        const Factors by = factors[h].of(j * 32 / F::kGroup + part);
        if constexpr (kHasOffsets) {
          sums[h] = fmaf(by.scale, of.scale * product, sums[h]);
          sums[h] = fmaf(by.offset, of_x, sums[h]);
        } else if constexpr (D::kSigned) {
          sums[h] = fmaf(by.scale, of.scale * product, sums[h]);
        } else {
          sums[h] = fmaf(by.scale, fmaf(of.scale, product, of_x), sums[h]);
        }
      }
    }
  }
};

}  // namespace unsloth
