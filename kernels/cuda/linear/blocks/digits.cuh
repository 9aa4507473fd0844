// Rows of x as integers, in shared memory.
//
// Each 32 neighbours of a row share a scale, which is the greatest of them over 32639, and are the
// nearest integers to x/scale: two digits of base 256, from -128 to 127 each. So they are nearer to
// x than bf16 would be, and tensor cores multiply them by codes exactly: the sum over 32 neighbours
// of codes of 8 bits has at most 27.
//
// A digit of a row is a column of the right-hand side of products. Its bytes lie as lanes take
// them: lane t of four has neighbours 4 t to 4 t + 3 and 16 + 4 t to 16 + 4 t + 3.
#pragma once

#include "common/blocks.cuh"
#include "common/vector.cuh"
#include "linear/blocks/arguments.h"
#include "linear/norm.cuh"

namespace unsloth {

constexpr float kGreatestNumber = 127 * 256 + 127;

// How 32 neighbours become integers, by the greatest of them: its bits without the sign, of which
// those of infinity and NaN are the greatest.
class Rounding {
 public:
  __device__ __forceinline__ explicit Rounding(uint32_t greatest) {
    const bool finite = greatest < 0x7f800000;
    const float most = __uint_as_float(greatest);
    // Numbers so small that the inverse of their scale would be infinite become zeros. Both sides
    // are quartered, since __fdividef gives zero for divisors near infinity.
    const float quarter = 0.25f * most;
    inverse_ = finite && most > 1e-33f ? __fdividef(0.25f * kGreatestNumber, quarter) : 0;
    scale_ = finite ? most * (1 / kGreatestNumber) : __uint_as_float(0x7fc00000);
  }

  __device__ __forceinline__ float scale() const { return scale_; }

  // The digits of four neighbours, a byte each. Returns the sum of their integers.
  __device__ __forceinline__ int32_t round(const float (&x)[4], uint32_t &upper,
                                           uint32_t &lower) const {
    // The nearest integer is the low half of a sum with 1.5 2^23.
    uint32_t number[4];
#pragma unroll
    for (int i = 0; i < 4; i++) number[i] = __float_as_uint(fmaf(x[i], inverse_, 0x1.8p23f));
    const uint32_t sum = number[0] + number[1] + (number[2] + number[3]) - 4 * 0x4b400000u;
    lower = bytes_of<0>(number);
    // The lower digit has a sign: from its 128 on, the upper is one more.
#pragma unroll
    for (int i = 0; i < 4; i++) number[i] += 128;
    upper = bytes_of<1>(number);
    return static_cast<int32_t>(sum);
  }

 private:
  // Byte `kByte` of each.
  template <int kByte>
  static __device__ __forceinline__ uint32_t bytes_of(const uint32_t (&of)[4]) {
    constexpr uint32_t kTwo = kByte | (4 + kByte) << 4;
    return __byte_perm(__byte_perm(of[0], of[1], kTwo), __byte_perm(of[2], of[3], kTwo), 0x5410);
  }

  float inverse_, scale_;
};

// Of 32 neighbours of a row: their scale, and what the offset of a weight is multiplied by, the sum
// of x; or, where the offset is the format's zero, that is taken off at once.
struct alignas(8) WholeScale {
  float scale, sum;
};

// The same where each 16 have sums of their own.
struct alignas(16) HalvesScale {
  float scale, sums[2], padding;
};

template <Blocks kBlocks>
struct Digits {
  using F = Format<kBlocks>;
  static constexpr bool kHalves = F::kGroup == 16;
  // Codes that are bytes with a sign already.
  static constexpr bool kSigned = kBlocks == Blocks::kQ8_0;
  static constexpr float kSumFactor = kSigned ? 0 : F::kZero == 0 ? 1 : -F::kZero;
  using Scale = std::conditional_t<kHalves, HalvesScale, WholeScale>;

  // [32 neighbours][row, digit][lane], [32 neighbours][row].
  uint2 *numbers;
  Scale *scales;
  uint32_t rows_log2;
  // Of rows that are normalised on their way: what they are multiplied by beside the gains, of one
  // row or of several.
  float row_scale;
  const float *row_scales;

  __device__ __forceinline__ const uint2 *numbers_of(uint32_t block, uint32_t column,
                                                     uint32_t lane) const {
    return numbers + ((block << (1 + rows_log2)) + column) * 4 + lane;
  }

  // Four neighbours of a row, and the four that lie 16 behind them: as they are stored.
  struct Eight {
    uint4 of[2];
  };
  // What a thread loads before it rounds any.
  static constexpr int kAtOnce = 4;
  struct Batch {
    Eight of[kAtOnce];
  };

  // The gains of eight neighbours, as they are stored.
  struct Gains {
    uint4 of[2];
  };

  // Loads the gains of what a thread rounds from its number `start` on.
  __device__ __forceinline__ Gains load_gains(const LinearBlocksArguments &p,
                                              uint32_t start) const {
    const uint32_t at = min(start + threadIdx.x / 4, count(p) - 1);
    Gains gains;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t four = (at >> rows_log2) * 8 + 4 * half + threadIdx.x % 4;
      if (p.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
        gains.of[half] = static_cast<const uint4 *>(p.norm)[four];
      } else {
        const uint2 pairs = static_cast<const uint2 *>(p.norm)[four];
        gains.of[half] = {pairs.x, pairs.y, 0, 0};
      }
    }
    return gains;
  }

  // Loads what a thread has of rows from `first` on, beginning with its number `start`.
  __device__ __forceinline__ Batch load(const LinearBlocksArguments &p, uint32_t first,
                                        uint32_t start) const {
    const uint32_t of_all = count(p), t = threadIdx.x % 4;
    Batch batch;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const uint32_t begin = start + i * (blockDim.x / 4);
      if (begin >= of_all) break;
      const uint32_t at = min(begin + threadIdx.x / 4, of_all - 1);
      const uint32_t block = at >> rows_log2;
      const uint32_t row = min(first + at - (block << rows_log2), p.rows - 1);
      const uint8_t *x = static_cast<const uint8_t *>(p.x) + row * p.x_stride;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        batch.of[i].of[half] = load(p, x, block * 32 + 16 * half + 4 * t);
      }
    }
    return batch;
  }

  // Rounds rows of x from `first` on, of which a thread has loaded its first batch and its first
  // gains. By all threads; a barrier is to follow.
  __device__ __forceinline__ void round(const LinearBlocksArguments &p, uint32_t first, Batch batch,
                                        const Gains &gains) const {
    const uint32_t of_all = count(p);
    const uint32_t step = blockDim.x / 4;
    for (uint32_t start = 0;;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; i += 2) {
        if (start + step < of_all) {
          // Two at a time, which do not wait for each other.
          round(p, batch.of[i], start, gains);
          round(p, batch.of[i + 1], start + step, gains);
        } else if (start < of_all) {
          round(p, batch.of[i], start, gains);
        }
        start += 2 * step;
      }
      if (start >= of_all) return;
      batch = load(p, first, start);
    }
  }

 private:
  __device__ __forceinline__ uint32_t count(const LinearBlocksArguments &p) const {
    return p.blocks * (F::kLength / 32) << rows_log2;
  }

  // All lanes of a warp exchange: those without a block repeat the last.
  __device__ __forceinline__ void round(const LinearBlocksArguments &p, const Eight &of,
                                        uint32_t start, const Gains &gains) const {
    const uint32_t at = min(start + threadIdx.x / 4, count(p) - 1);
    float eight[2][4];
    unpack(p.x_dtype, of.of[0], eight[0]);
    unpack(p.x_dtype, of.of[1], eight[1]);
    if (p.norm_dtype != 0) normalise(p, at, start == 0 ? gains : load_gains(p, start), eight);
    round(eight, at, threadIdx.x % 4);
  }

  // Rounded to the dtype of x, as they would be stored.
  __device__ __forceinline__ void normalise(const LinearBlocksArguments &p, uint32_t at,
                                            const Gains &gains_of, float (&eight)[2][4]) const {
    const float scale =
        rows_log2 == 0 ? row_scale : row_scales[at - (at >> rows_log2 << rows_log2)];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float (&of)[4] = eight[half];
      float gains[4];
      unpack(p.norm_dtype, gains_of.of[half], gains);
#pragma unroll
      for (int i = 0; i < 4; i++) of[i] = normalised(p, of[i], gains[i], scale);
      const bool is_half = p.x_dtype == static_cast<uint32_t>(Float::kF16);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t pair =
            is_half ? pack<__half>(of[i], of[i + 1]) : pack<__nv_bfloat16>(of[i], of[i + 1]);
        const float2 rounded =
            is_half ? unsloth::unpack<__half>(pair) : unsloth::unpack<__nv_bfloat16>(pair);
        of[i] = rounded.x, of[i + 1] = rounded.y;
      }
    }
  }

  // Four numbers: words of f32, or pairs of halves.
  static __device__ __forceinline__ uint4 load(const LinearBlocksArguments &p, const uint8_t *x,
                                               uint32_t at) {
    if (p.x_dtype == static_cast<uint32_t>(Float::kF32)) {
      const uint32_t *from = reinterpret_cast<const uint32_t *>(x) + at;
      if (p.x_aligned) return *reinterpret_cast<const uint4 *>(from);
      return {from[0], from[1], from[2], from[3]};
    }
    const uint16_t *from = reinterpret_cast<const uint16_t *>(x) + at;
    uint2 pairs;
    if (p.x_aligned) {
      pairs = *reinterpret_cast<const uint2 *>(from);
    } else {
      pairs = {from[0] | static_cast<uint32_t>(from[1]) << 16,
               from[2] | static_cast<uint32_t>(from[3]) << 16};
    }
    return {pairs.x, pairs.y, 0, 0};
  }

  static __device__ __forceinline__ void unpack(uint32_t dtype, const uint4 &four, float (&to)[4]) {
    if (dtype == static_cast<uint32_t>(Float::kF32)) {
      to[0] = __uint_as_float(four.x), to[1] = __uint_as_float(four.y);
      to[2] = __uint_as_float(four.z), to[3] = __uint_as_float(four.w);
      return;
    }
    const uint32_t pairs[2] = {four.x, four.y};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t pair = pairs[i / 2];
      if (dtype == static_cast<uint32_t>(Float::kF16)) {
        to[i] = half_of(pair), to[i + 1] = half_of(pair >> 16);
      } else {
        to[i] = __uint_as_float(pair << 16), to[i + 1] = __uint_as_float(pair & 0xffff0000);
      }
    }
  }

  // By the four lanes of 32 neighbours and a row.
  __device__ __forceinline__ void round(const float (&x)[2][4], uint32_t at, uint32_t t) const {
    constexpr uint32_t kAll = 0xffffffff;
    // As bits, among which those of infinity and NaN are the greatest.
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      greatest = max(greatest, __float_as_uint(x[i / 4][i % 4]) & 0x7fffffff);
    }
    greatest = max(greatest, __shfl_xor_sync(kAll, greatest, 1));
    greatest = max(greatest, __shfl_xor_sync(kAll, greatest, 2));
    const Rounding rounding(greatest);
    const float scale = rounding.scale();
    uint32_t digits[2][2];
    int32_t sums[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sums[half] = rounding.round(x[half], digits[0][half], digits[1][half]);
    }
    if constexpr (!kHalves) sums[0] += sums[1];
#pragma unroll
    for (int i = 0; i < (kSumFactor == 0 ? 0 : kHalves ? 2 : 1); i++) {
      sums[i] += __shfl_xor_sync(kAll, sums[i], 1);
      sums[i] += __shfl_xor_sync(kAll, sums[i], 2);
    }
    uint2 *to = numbers + at * 8 + t;
    to[0] = {digits[0][0], digits[0][1]};
    to[4] = {digits[1][0], digits[1][1]};
    if (t != 0) return;
    const float unit = kSumFactor * scale;
    Scale &of = scales[at];
    if constexpr (kHalves) {
      of = {scale, {unit * sums[0], unit * sums[1]}, 0};
    } else {
      of = {scale, unit * sums[0]};
    }
  }
};

}  // namespace unsloth
