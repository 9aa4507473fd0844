// Rows of x, rounded to codes of 8 bits, by weights of 8 or 2 bits: integers on tensor cores.
//
// A warp takes 16 rows of the weight (columns of the output), 128 bytes of each at a time, and some
// rows of x. Which elements a lane's registers hold is free, as sums of integers do not depend on
// their order: a lane reads 16 bytes at a time, of the weight as of x, and the words of both that
// lie at equal places are multiplied. The warps of a tile share the bytes of its rows and add what
// they have.
//
// A ternary weight w has the code w + 1, so the codes' product with a row of x is too great by the
// sum of x, which is taken off at the end. 32 bytes are a block: byte p has the codes of p, p + 32,
// p + 64 and p + 96, so that a word, shifted by 2 i and masked, is four neighbours' codes.
//
// Sums are exact, and what follows is rounded as on the CPU: the same bits for any tiling.
//
// It is CUDA C++ for products of integers on tensor cores and for words of codes, which CubeCL's
// types do not say.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "linear/codes/arguments.h"
#include "linear/epilogue.cuh"

namespace unsloth {

using Arguments = LinearCodesArguments;

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
// Rows of the weight of a tile.
constexpr uint32_t kColumns = 16;
// Bytes of a row of the weight that a warp takes at a time.
constexpr uint32_t kStepBytes = 128;

// `kEights`: rows of x of a tile, in eights.
template <bool kTernary, uint32_t kEights>
class Codes {
 public:
  static constexpr uint32_t kRows = 8 * kEights;
  static constexpr uint32_t kOutputs = kColumns * kRows;
  static constexpr uint32_t kSharedBytes = kWarps * kOutputs * sizeof(int32_t);
  // Elements of a step.
  static constexpr uint32_t kStep = kTernary ? 4 * kStepBytes : kStepBytes;

  __device__ __forceinline__ Codes(const Arguments &p, int32_t *sums)
      : p_(p),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        tile_of_block_(warp_ >> p.split_log2),
        part_(warp_ & ((1u << p.split_log2) - 1)),
        sums_(sums) {}

  __device__ __forceinline__ void run() {
    const uint32_t tiles = (p_.out_features + kColumns - 1) / kColumns;
    const uint32_t per_block = kWarps >> p_.split_log2;
    const uint32_t groups = (tiles + per_block - 1) / per_block * p_.row_tiles;
    uint32_t group = blockIdx.x, step = part_;
    Place place = place_of(group);
    Lines lines;
    load(lines, place, step);
    // No more was read than a constant weight.
    await_previous_kernel();
    while (group < groups) {
      const Place here = place;
      const uint32_t current = step;
      // All warps of the block take as many steps.
      step += 1u << p_.split_log2;
      const bool ends = step - part_ >= p_.steps;
      if (ends) {
        step = part_;
        group += gridDim.x;
        place = place_of(group);
      }
      Lines next;
      if (group < groups) load(next, place, step);
      if (current < p_.steps) multiply(lines, here, current);
      if (ends) add_and_store(here, per_block);
      lines = next;
    }
  }

 private:
  // Of rows g and g + 8: bytes from 16 t on, and from 64 + 16 t on.
  struct Lines {
    uint4 of[2][2];
  };

  // What a block has at a time: its tiles' first column and row.
  struct Place {
    uint32_t column, row;
  };

  __device__ __forceinline__ Place place_of(uint32_t group) const {
    const uint32_t columns = group / p_.row_tiles;
    return {columns * (kWarps >> p_.split_log2) * kColumns,
            (group - columns * p_.row_tiles) * kRows};
  }

  // What there is of a lane's bytes in a step; zeros behind a row's end, whatever x has there.
  __device__ __forceinline__ void load(Lines &lines, Place place, uint32_t step) const {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const uint32_t column =
          min(place.column + tile_of_block_ * kColumns + g + 8 * h, p_.out_features - 1);
      const uint8_t *row = p_.weight + column * p_.weight_stride;
#pragma unroll
      for (uint32_t j = 0; j < 2; j++) {
        const uint32_t at = step * kStepBytes + 64 * j + 16 * t;
        if (step < p_.steps && p_.aligned && at + 16 <= p_.row_bytes) {
          lines.of[h][j] = __ldcs(reinterpret_cast<const uint4 *>(row + at));
        } else {
          lines.of[h][j] = step < p_.steps ? gathered(row, at) : uint4{0, 0, 0, 0};
        }
      }
    }
  }

  __device__ __noinline__ uint4 gathered(const uint8_t *row, uint32_t first) const {
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < 16 && first + i < p_.row_bytes; i++) {
      words[i / 4] |= static_cast<uint32_t>(row[first + i]) << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ void multiply(const Lines &lines, Place place, uint32_t step) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *rows[kEights];
#pragma unroll
    for (uint32_t e = 0; e < kEights; e++) {
      const uint32_t row = min(place.row + g + 8 * e, p_.rows - 1);
      rows[e] = p_.x + row * p_.x_stride + step * kStep;
    }
    // A word of ternary codes is multiplied by four words of x, one for each place of two bits.
    // With many rows the four are not unrolled: all their loads at once would not fit registers.
#pragma unroll(kEights == 1 ? 4 : 1)
    for (uint32_t i = 0; i < (kTernary ? 4 : 1); i++) {
      uint32_t a[4][4];
#pragma unroll
      for (uint32_t w = 0; w < 4; w++) {
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
          const uint32_t codes = word(lines.of[r % 2][r / 2], w);
          a[w][r] = kTernary ? codes >> 2 * i & 0x03030303 : codes;
        }
      }
#pragma unroll
      for (uint32_t e = 0; e < kEights; e++) {
        uint4 x[2];
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
          const uint32_t at =
              kTernary ? (2 * j + t / 2) * 128 + 32 * i + 16 * (t % 2) : 64 * j + 16 * t;
          x[j] = *reinterpret_cast<const uint4 *>(rows[e] + at);
        }
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) {
          const uint32_t b[2] = {word(x[0], w), word(x[1], w)};
          mma(a[w], b, acc_[e]);
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t word(const uint4 &of, uint32_t i) {
    return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
  }

  // Adds what the warps of each tile have, and stores it.
  __device__ __forceinline__ void add_and_store(Place place, uint32_t tiles) {
#pragma unroll
    for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = 8 * e + lane_ % 4 * 2 + i % 2, column = lane_ / 4 + i / 2 * 8;
        sums_[warp_ * kOutputs + row * kColumns + column] = acc_[e][i];
        acc_[e][i] = 0;
      }
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < tiles * kOutputs; at += kThreads) {
      const uint32_t of_tile = at / kOutputs, output = at % kOutputs;
      const uint32_t row = place.row + output / kColumns;
      const uint32_t column = place.column + of_tile * kColumns + output % kColumns;
      if (row >= p_.rows || column >= p_.out_features) continue;
      int32_t sum = kTernary ? -p_.x_sum[row] : 0;
      for (uint32_t w = 0; w < 1u << p_.split_log2; w++) {
        sum += sums_[((of_tile << p_.split_log2) + w) * kOutputs + output];
      }
      store(row, column, sum);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store(uint32_t row, uint32_t column, int32_t sum) const {
    const float of_weight =
        p_.weight_scale == nullptr ? 1.0f : p_.weight_scale[column / p_.rows_of_scale];
    // Each product is rounded: what is added next is not part of it.
    const float scale = __fmul_rn(of_weight, p_.x_scale[row]);
    finish(p_, static_cast<Float>(p_.dtype), row, column,
           __fmul_rn(scale, static_cast<float>(sum)));
  }

  const Arguments &p_;
  const uint32_t warp_, lane_;
  // Which of the block's tiles is the warp's, and which of the warps of that tile it is.
  const uint32_t tile_of_block_, part_;
  int32_t *const sums_;
  int32_t acc_[kEights][4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_CODES(name, ternary, eights)                              \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 2)             \
      linear_codes_##name(const __grid_constant__ LinearCodesArguments params) { \
    unsloth::let_next_kernel_start();                                            \
    if (params.constant == 0) unsloth::await_previous_kernel();                  \
    extern __shared__ uint4 dynamic[];                                           \
    int32_t *sums = reinterpret_cast<int32_t *>(dynamic);                        \
    unsloth::Codes<ternary, eights>(params, sums).run();                         \
  }                                                                              \
  extern "C" __device__ const LinearCodesLaunch linear_codes_##name##_launch = { \
      ternary,                                                                   \
      unsloth::Codes<ternary, eights>::kRows,                                    \
      unsloth::kColumns,                                                         \
      unsloth::kWarps,                                                           \
      unsloth::Codes<ternary, eights>::kStep,                                    \
      unsloth::kThreads,                                                         \
      unsloth::Codes<ternary, eights>::kSharedBytes,                             \
  };
