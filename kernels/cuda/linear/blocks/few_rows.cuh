// A few rows of x by weights in blocks, bound by reading these.
//
// A warp takes 16 rows of the weight (columns of the output) and some blocks of each at a time. It
// copies their bytes as they lie in memory, 16 at a time whatever a block's size, into shared
// memory of its own, the next ones while it multiplies; reads words of codes from there; and lets
// tensor cores multiply them by x as it is. The warps of a tile share the elements of its rows and
// add their sums in one order.
//
// It is CUDA C++ for these bytes, which are copied as vectors and read as halves or words, and for
// codes that are made numbers by logic on words: what CubeCL's types do not say.
//
// Why x is not rounded to 8 bits, as in ggml: an H200 reads 18 bytes a clock and multiprocessor, 32
// weights of 4.5 bits. They cost about two and a half instructions for each lane, 80 of the 128
// that a multiprocessor issues, with one row of x as with eight.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "decoded.cuh"
#include "linear/blocks/arguments.h"
#include "linear/epilogue.cuh"

namespace unsloth {

using Arguments = LinearBlocksArguments;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
// Of a tile: rows of the weight, rows of x.
constexpr int kColumns = 16;
constexpr int kRows = 8;
constexpr int kOutputs = kColumns * kRows;

// What a warp has of 16 rows at a time.
template <Blocks kBlocks>
struct Stage {
  using F = Format<kBlocks>;
  static constexpr int kWeights = kBlocks == Blocks::kQ8_0 ? 128 : 256;
  static constexpr int kCount = kWeights / F::kLength;
  static constexpr int kBytes = kCount * F::kBytes;
  // Lines of 16 bytes that these touch, wherever they begin.
  static constexpr int kLines = (kBytes + 14 + 15) / 16;
  // Two lanes copy a row's.
  static constexpr int kLoads = (kLines + 1) / 2;
  // Odd, so that the same word of eight rows lies in different banks.
  static constexpr int kPitch = 2 * kLoads + 1;
};

template <Blocks kBlocks>
constexpr int kSharedBytes = kWarps * (kColumns * Stage<kBlocks>::kPitch * 16 +
                                       2 * kOutputs * static_cast<int>(sizeof(float)));

// Of one row in shared memory.
template <int kAlignment>
struct Staged {
  const uint8_t *bytes;

  __device__ __forceinline__ uint32_t half(int at) const {
    return *reinterpret_cast<const uint16_t *>(bytes + at);
  }

  __device__ __forceinline__ uint32_t operator()(int at) const {
    if constexpr (kAlignment == 4) {
      return *reinterpret_cast<const uint32_t *>(bytes + at);
    } else {
      return half(at) | half(at + 2) << 16;
    }
  }
};

template <class T, Blocks kBlocks>
class FewRows {
 public:
  __device__ __forceinline__ FewRows(const Arguments &p, uint4 *shared)
      : p_(p),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        tile_of_block_(warp_ >> p.split_log2),
        part_(warp_ & ((1u << p.split_log2) - 1)),
        row_bytes_(p.blocks * F::kBytes),
        buffer_(shared + warp_ * kColumns * S::kPitch),
        sums_(reinterpret_cast<float *>(shared + kWarps * kColumns * S::kPitch)) {}

  __device__ __forceinline__ void run() {
    const uint32_t tiles = (p_.out_features + kColumns - 1) / kColumns;
    const uint32_t per_block = kWarps >> p_.split_log2;
    const uint32_t groups = (tiles + per_block - 1) / per_block * p_.row_tiles;
    uint32_t group = blockIdx.x, step = part_, turn = 0;
    Place place = place_of(group);
    uint4 lines[S::kLoads];
    load(lines, place, step);
    while (group < groups) {
      const Place here = place;
      const uint32_t current = step;
      keep(lines, here, current);
      __syncwarp();
      // All warps of the block take as many steps.
      step += 1u << p_.split_log2;
      const bool ends = step - part_ >= p_.steps;
      if (ends) {
        step = part_;
        group += gridDim.x;
        place = place_of(group);
      }
      if (group < groups) load(lines, place, step);
      if (current < p_.steps) multiply(here, current);
      __syncwarp();
      if (ends) {
        add_and_store(here, per_block, turn);
        turn ^= 1;
      }
    }
  }

 private:
  using F = Format<kBlocks>;
  using S = Stage<kBlocks>;

  // What a block has at a time: its tiles' first column and row.
  struct Place {
    uint32_t column, row;
  };

  __device__ __forceinline__ Place place_of(uint32_t group) const {
    const uint32_t columns = group / p_.row_tiles;
    return {columns * (kWarps >> p_.split_log2) * kColumns,
            (group - columns * p_.row_tiles) * kRows};
  }

  // A row of the weight's, of the warp's tile.
  __device__ __forceinline__ const uint8_t *row_of(Place place, uint32_t row) const {
    const uint32_t column =
        min(place.column + tile_of_block_ * kColumns + row, p_.out_features - 1);
    return p_.weight + column * p_.weight_stride;
  }

  // Copies what a warp has of a step: lines of which all bytes are the weight's in one access each.
  __device__ __forceinline__ void load(uint4 (&lines)[S::kLoads], Place place, uint32_t step) {
    if (!p_.aligned || step >= p_.steps) return;
    const uint8_t *row = row_of(place, lane_ / 2);
    const uint32_t ahead = reinterpret_cast<uintptr_t>(row) % 16;
    const uint32_t first = ahead + step * S::kBytes;
    const uint32_t last = min(first + S::kBytes, ahead + row_bytes_);
    const uint8_t *aligned = row - ahead;
    // Lines of 16 bytes, counted from there, that belong to the step, and to the weight.
    const uint32_t begin = first / 16, end = (last + 15) / 16;
    const bool after = p_.gapless && row > p_.weight;
    const bool before = p_.gapless && row + row_bytes_ < p_.weight + p_.weight_bytes;
    const uint32_t least = after ? 0 : (ahead + 15) / 16;
    const uint32_t most = (ahead + row_bytes_ + (before ? 15 : 0)) / 16;
    const uint32_t line = begin + lane_ % 2;
#pragma unroll
    for (int i = 0; i < S::kLoads; i++) {
      const uint32_t at = line + 2 * i;
      if (at >= least && at < min(end, most)) {
        lines[i] =
            __ldcs(reinterpret_cast<const uint4 *>(aligned + static_cast<uint64_t>(at) * 16));
      }
    }
    if (begin >= least && end <= most) return;
    // The first and the last line of the weight, or of a row if there are gaps: what is there of
    // them.
#pragma unroll
    for (int i = 0; i < S::kLoads; i++) {
      const uint32_t at = line + 2 * i;
      if (at >= end || (at >= least && at < most)) continue;
      uint4 words = {0, 0, 0, 0};
#pragma unroll 1
      for (uint32_t byte = at * 16; byte < at * 16 + 16; byte += 2) {
        uint32_t half = 0;
        if (byte >= ahead && byte < ahead + row_bytes_) {
          half = *reinterpret_cast<const uint16_t *>(aligned + byte);
        }
        words.x = __funnelshift_r(words.x, words.y, 16);
        words.y = __funnelshift_r(words.y, words.z, 16);
        words.z = __funnelshift_r(words.z, words.w, 16);
        words.w = words.w >> 16 | half << 16;
      }
      lines[i] = words;
    }
  }

  // Puts it into shared memory.
  __device__ __forceinline__ void keep(const uint4 (&lines)[S::kLoads], Place place,
                                       uint32_t step) {
    if (p_.aligned) {
#pragma unroll
      for (int i = 0; i < S::kLoads; i++) {
        buffer_[lane_ / 2 * S::kPitch + lane_ % 2 + 2 * i] = lines[i];
      }
    } else if (step < p_.steps) {
      // A byte at a time, from wherever it is.
      const uint32_t first = step * S::kBytes;
      const uint32_t bytes = min(static_cast<uint32_t>(S::kBytes), row_bytes_ - first);
      for (uint32_t row = 0; row < kColumns; row++) {
        const uint8_t *from = row_of(place, row) + first;
        uint8_t *to = reinterpret_cast<uint8_t *>(buffer_ + row * S::kPitch);
        for (uint32_t i = lane_; i < bytes; i += 32) to[i] = from[i];
      }
    }
  }

  __device__ __forceinline__ void multiply(Place place, uint32_t step) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *rows[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t row = g + 8 * h;
      const auto at = reinterpret_cast<uintptr_t>(row_of(place, row)) + step * S::kBytes;
      rows[h] =
          reinterpret_cast<const uint8_t *>(buffer_ + row * S::kPitch) + (p_.aligned ? at % 16 : 0);
    }
    const uint32_t first = step * S::kCount;
    const uint32_t count = min(static_cast<uint32_t>(S::kCount), p_.blocks - first);
    const uint8_t *x =
        static_cast<const uint8_t *>(p_.x) + min(place.row + g, p_.rows - 1) * p_.x_stride;
    const T *inputs =
        reinterpret_cast<const T *>(x) + static_cast<uint64_t>(first) * F::kLength + 4 * t;
    if constexpr (S::kCount == 1) {
      multiply_block(rows, inputs, t);
    } else {
#pragma unroll 2
      for (uint32_t i = 0; i < count; i++) {
        const uint8_t *blocks[2] = {rows[0] + i * F::kBytes, rows[1] + i * F::kBytes};
        multiply_block(blocks, inputs + i * F::kLength, t);
      }
    }
  }

  __device__ __forceinline__ void multiply_block(const uint8_t *const (&blocks)[2], const T *x,
                                                 uint32_t t) {
    using Row = Staged<F::kAlignment>;
    const Row rows[2] = {{blocks[0]}, {blocks[1]}};
    const Row of_lane[2] = {{blocks[0] + 4 * t}, {blocks[1] + 4 * t}};
    // Sixteens of weights that are written out: of more of them registers would not be enough.
    constexpr uint32_t kAtOnce = F::kLength == 32 ? 2 : 4;
    constexpr uint32_t kSixteens = F::kGroup / 16;
    const auto factors = factors_of_rows(rows);
    uint32_t fifth[2] = {};
    if constexpr (kHasFifthBits<kBlocks>) {
      fifth[0] = rows[0](kFifthBits<kBlocks>);
      fifth[1] = rows[1](kFifthBits<kBlocks>);
    }
#pragma unroll 1
    for (uint32_t first = 0; first < F::kLength / 16; first += kAtOnce) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i += kSixteens) {
        Products<T, kBlocks> products;
#pragma unroll
        for (uint32_t j = 0; j < kSixteens; j++) {
          const uint32_t quad = 4 * (first + i + j);
          uint32_t codes[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            codes[h] = quad_of_codes<kBlocks>(of_lane[h], rows[h], quad, t);
            if constexpr (kHasFifthBits<kBlocks>) codes[h] |= fifth_bits(fifth[h], quad + t);
          }
          products.add(codes[0], codes[1], Inputs<T>(x + 4 * quad, p_.x_aligned));
        }
        const uint32_t group = (first + i) / kSixteens;
        products.scale({factors(0, group), factors(1, group)}, acc_);
      }
    }
  }

  // What gives the factors of a group of either row.
  template <class Row>
  static __device__ __forceinline__ auto factors_of_rows(const Row (&rows)[2]) {
    if constexpr (kHasScalesOfScales<kBlocks>) {
      const ScalesOfScales first(rows[0]), second(rows[1]);
      return [first, second](int row, uint32_t group) {
        return row == 0 ? first.of(group) : second.of(group);
      };
    } else {
      const Row first = rows[0], second = rows[1];
      return [first, second](int row, uint32_t group) {
        const Row of = row == 0 ? first : second;
        const auto half = [&](int at) { return of.half(at); };
        const auto byte = [&](int at) { return of.bytes[at]; };
        return factors_of<kBlocks>(half, byte, group);
      };
    }
  }

  // Adds what the warps of each tile have, and stores it.
  __device__ __forceinline__ void add_and_store(Place place, uint32_t tiles, uint32_t turn) {
    float *sums = sums_ + turn * kWarps * kOutputs;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t row = lane_ % 4 * 2 + i % 2, column = lane_ / 4 + i / 2 * 8;
      sums[warp_ * kOutputs + row * kColumns + column] = acc_[i];
      acc_[i] = 0;
    }
    // The other set of sums is written before all have read this one.
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < tiles * kOutputs; at += kThreads) {
      const uint32_t of_tile = at / kOutputs, output = at % kOutputs;
      const uint32_t row = place.row + output / kColumns;
      const uint32_t column = place.column + of_tile * kColumns + output % kColumns;
      if (row >= p_.rows || column >= p_.out_features) continue;
      float sum = 0;
      for (uint32_t w = 0; w < 1u << p_.split_log2; w++) {
        sum += sums[((of_tile << p_.split_log2) + w) * kOutputs + output];
      }
      finish(p_, p_.wide ? Float::kF32 : kDtype<T>, row, column, sum);
    }
  }

  const Arguments &p_;
  const uint32_t warp_, lane_;
  // Which of the block's tiles is the warp's, and which of the warps of that tile it is.
  const uint32_t tile_of_block_, part_;
  const uint32_t row_bytes_;
  uint4 *const buffer_;
  float *const sums_;
  float acc_[4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_BLOCKS(name, type, blocks)                                  \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 2)               \
      linear_blocks_##name(const __grid_constant__ LinearBlocksArguments params) { \
    unsloth::let_next_kernel_start();                                              \
    unsloth::await_previous_kernel();                                              \
    extern __shared__ uint4 dynamic[];                                             \
    unsloth::FewRows<type, unsloth::Blocks::blocks>(params, dynamic).run();        \
  }                                                                                \
  extern "C" __device__ const LinearBlocksLaunch linear_blocks_##name##_launch = { \
      static_cast<int32_t>(unsloth::Blocks::blocks),                               \
      static_cast<int32_t>(unsloth::kDtype<type>),                                 \
      unsloth::kRows,                                                              \
      unsloth::kColumns,                                                           \
      unsloth::kWarps,                                                             \
      unsloth::Stage<unsloth::Blocks::blocks>::kWeights,                           \
      unsloth::kThreads,                                                           \
      unsloth::kSharedBytes<unsloth::Blocks::blocks>,                              \
  };
