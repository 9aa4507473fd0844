// A weight in blocks: codes by x as they are, both exact in the dtype of x, on tensor cores. Sums
// of 32 neighbours, or of 16 that share a scale, are scaled by f32.
#pragma once

#include "linear/blocks/numbers.cuh"
#include "linear/blocks/products.cuh"
#include "linear/few/arguments.h"
#include "linear/few/lines.cuh"

namespace unsloth {

template <Blocks kBlocks, class T>
class InBlocks {
  using F = Format<kBlocks>;
  using P = Products<kBlocks>;
  static constexpr uint32_t kMostUnits = 8;
  // A code is added to 128, by its bits, and 128 times the sum of x is taken off its products: so
  // sums begin with that. f32 loses 2^-23 of 128 x, where x has 2^-9. In f16 codes would be added
  // to 1024, and x has 2^-12; in bf16 those of eight bits are too long. Where 16 neighbours share a
  // scale, there are no sums of these.
  static constexpr bool kRaised =
      std::is_same_v<T, __nv_bfloat16> && kBlocks != Blocks::kQ8_0 && P::kParts == 1;

 public:
  static constexpr int32_t kDtype = static_cast<int32_t>(kBlocks);
  // Neighbours that a warp multiplies at a time, at most, and their bytes.
  static constexpr uint32_t kStep = 32 * kMostUnits, kStepBytes = kStep / F::kLength * F::kBytes;
  static constexpr bool kHasSums = kRaised || P::kHasOffsets, kParts = true, kTiles = true;
  static constexpr float kSumFactor = kRaised ? -128 - F::kZero : 1;

  static __device__ __forceinline__ uint32_t step_lines(const LinearFewArguments &p) {
    return p.units_of_step * 4;
  }
  static __device__ __forceinline__ uint32_t step_bytes(const LinearFewArguments &p) {
    return p.units_of_step / P::k32s * F::kBytes;
  }
  static __device__ __forceinline__ uint32_t bytes_of_lines(uint32_t lines) {
    return lines / (F::kLength / 8) * F::kBytes;
  }

  // Of 32 neighbours, line t of four has the fours t and 4 + t.
  static __device__ __forceinline__ void store(uint4 *of_part, uint32_t row, uint32_t line,
                                               const uint4 &words) {
    // Of neighbouring lines other halves at a time, which lie in other banks.
    const uint2 halves[2] = {{words.x, words.y}, {words.z, words.w}};
    const bool turn = line / 8 % 2 != 0;
    *half_of(of_part, row, line, turn) = turn ? halves[1] : halves[0];
    *half_of(of_part, row, line, !turn) = turn ? halves[0] : halves[1];
  }
  static __device__ __forceinline__ uint4 load(uint4 *of_part, uint32_t row, uint32_t line) {
    const uint2 low = *half_of(of_part, row, line, 0), high = *half_of(of_part, row, line, 1);
    return {low.x, low.y, high.x, high.y};
  }

  // The step of a tile that begins with line `first` of `end`; `rows`: of the step, `x`: the lane's
  // row.
  static __device__ __forceinline__ void multiply(const LinearFewArguments &p, const uint8_t *rows,
                                                  uint32_t first, uint32_t end, uint32_t row,
                                                  const uint4 *x, const float4 *sums,
                                                  float (&acc)[4]) {
    const uint32_t count = first < end ? min((end - first) / 4, p.units_of_step) : 0;
    // Lines of even units, and of odd ones, as if they began with the step.
    const uint32_t t = threadIdx.x % 4;
    const uint4 *of_lane[2] = {x + line_of(row, first + t), x + line_of(row, first + 4 + t) - 4};
    if (p.whole_tiles == 0 && count == kMostUnits) {
      multiply_units<true>(p.pitch, rows, count, of_lane, sums + first + t, acc);
    } else {
      multiply_units<false>(p.pitch, rows, count, of_lane, sums + first + t, acc);
    }
  }

 private:
  static __device__ __forceinline__ uint2 *half_of(uint4 *of_part, uint32_t row, uint32_t line,
                                                   uint32_t half) {
    // That of an even row; `line_of` of an odd one is four lines away.
    const uint32_t four = line % 4 * 2 + half;
    const uint32_t even = (line / 4 * 4 + four % 4) * 2 + four / 4;
    return reinterpret_cast<uint2 *>(of_part) + (even ^ (row & 1) << 3);
  }

  // `kWhole`: all units of a step are there, which begins with a line of 16 bytes.
  template <bool kWhole>
  static __device__ __forceinline__ void multiply_units(uint32_t pitch, const uint8_t *step,
                                                        uint32_t count, const uint4 *const (&x)[2],
                                                        const float4 *sums, float (&acc)[4]) {
    constexpr bool kAligned = kWhole && kStepBytes % 4 == 0;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t *const rows[2] = {step + g * pitch, step + (g + 8) * pitch};
#pragma unroll
    for (uint32_t i = 0; i < kMostUnits; i++) {
      if (!kWhole && i >= count) break;
      uint32_t codes[4], left[2][4];
      P::template codes_of<kAligned>(rows, i, t, codes);
#pragma unroll
      for (uint32_t j = 0; j < 4; j++) {
        // Those of bytes with a sign have it.
        if constexpr (P::D::kSigned) codes[j] ^= 0x80808080;
        uint32_t pairs[2];
        numbers_of<kBlocks, T, kRaised>(codes[j], pairs);
        left[j / 2][j % 2] = pairs[0], left[j / 2][2 + j % 2] = pairs[1];
      }
      const uint4 right = x[i % 2][4 * i];
      float sum[4] = {};
      if constexpr (kHasSums) {
        const float4 four = sums[4 * i];
        sum[0] = four.x, sum[1] = four.y, sum[2] = four.z, sum[3] = four.w;
      }
      float products[P::kParts][4] = {};
#pragma unroll
      for (uint32_t j = 0; j < 4; j++) {
        if constexpr (kRaised) products[0][j] = sum[j];
      }
      mma<T>(left[0], {right.x, right.y}, products[0]);
      mma<T>(left[1], {right.z, right.w}, products[P::kParts - 1]);
      using FactorsOf = typename P::template FactorsOf<false>;
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const FactorsOf factors = P::template block_of<false>(rows[h], i);
#pragma unroll
        for (uint32_t part = 0; part < P::kParts; part++) {
          const Factors by = factors.of(i % P::k32s * 32 / F::kGroup + part);
#pragma unroll
          for (uint32_t j = 2 * h; j < 2 * h + 2; j++) {
            acc[j] = fmaf(by.scale, products[part][j], acc[j]);
            if constexpr (P::kHasOffsets) {
              acc[j] = fmaf(by.offset * (1 / kSumFactor), sum[j], acc[j]);
            }
          }
        }
      }
    }
  }
};

}  // namespace unsloth
