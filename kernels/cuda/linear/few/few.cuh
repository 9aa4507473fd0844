// A few rows of x of 16 bits by weights like them on Hopper, bound by reading these.
//
// One block for each multiprocessor, which takes all of its shared memory: so a block that is
// started early (programmatic dependent launch) comes to a multiprocessor of its own, and fills its
// ring with a constant weight while the kernels before still run. A block has neighbouring columns
// of the output, in tiles; 16 rows of the weight and 128 of their elements are a unit, and each
// warp takes as many units, one after another, through a ring of its own. Of a gated product eight
// rows of a tile are the gate's and eight are of what it gates.
//
// x may pass RMSNorm on its way: every block normalises all of it.
//
// It is CUDA C++ for the copies to shared memory, of which CubeCL has none.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "linear/few/arguments.h"
#include "linear/gated.cuh"
#include "linear/norm.cuh"

namespace unsloth {

// Of a block, at most: threads, bytes of shared memory.
constexpr int kThreads = 512;
constexpr int kSharedBytes = 227 * 1024;
constexpr uint32_t kMostRows = 8;
// Rows of the weight of a tile, and lines of 16 bytes of them that a unit has.
constexpr uint32_t kTile = 16, kLines = 16;
constexpr uint32_t kUnitBytes = kTile * kLines * 16;
// For a warp's shares of its first tile and of its last, by rows of x.
constexpr uint32_t kSumsBytes = 2 * kTile * sizeof(float);

template <class T>
class Few {
 public:
  __device__ __forceinline__ Few(const LinearFewArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(kAllLanes, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        warps_log2_(31 - __clz(blockDim.x / 32)),
        columns_of_tile_(p.gated != 0 ? kTile / 2 : kTile),
        first_(blockIdx.x * p.columns_of_block),
        end_(min(first_ + p.columns_of_block, p.out_features)),
        tiles_((end_ - first_ + columns_of_tile_ - 1) / columns_of_tile_),
        units_(tiles_ * p.steps),
        ring_(shared + warp_ * p.slots * kUnitBytes) {
    uint8_t *rest = shared + (p.slots << warps_log2_) * kUnitBytes;
    x_ = reinterpret_cast<uint4 *>(rest);
    sums_ = reinterpret_cast<float *>(rest + p.rows * p.steps * kLines * 16);
  }

  __device__ __forceinline__ void run() {
    const uint32_t begin = first_unit(warp_), end = first_unit(warp_ + 1);
    const Place start = {begin / p_.steps, begin % p_.steps};
    Place next = start;
    uint32_t asked = begin, to = 0;
    const auto ask = [&] {
      if (asked < end) fill(ring_ + to * kUnitBytes, next);
      commit_copies();
      asked++;
      next.advance(p_.steps);
      to = to + 1 == p_.slots ? 0 : to + 1;
    };
    for (uint32_t i = 0; i + 1 < p_.slots; i++) ask();
    if (p_.norm_dtype != 0) fetch_gains(p_, p_.lines * 8);
    if (p_.constant != 0) await_previous_kernel();
    float gains[8];
    if (p_.norm_dtype != 0 && threadIdx.x < p_.lines) load_gains(threadIdx.x, gains);
    load_x();
    if (p_.norm_dtype != 0) normalise(gains);
    __syncthreads();

    Place here = start;
    uint32_t slot = 0, began = begin;
    for (uint32_t unit = begin; unit < end; unit++) {
      await_unit();
      // All lanes' copies are there, and all have done with the slot that is filled next.
      __syncwarp();
      ask();
      multiply(ring_ + slot * kUnitBytes, here.step);
      slot = slot + 1 == p_.slots ? 0 : slot + 1;
      const uint32_t tile = here.tile;
      const bool ends = here.step + 1 == p_.steps;
      here.advance(p_.steps);
      if (ends || unit + 1 == end) {
        leave(tile, ends && unit + 1 - began == p_.steps, began == begin ? 0 : 1);
        began = unit + 1;
      }
    }
    await_copies<0>();
    __syncthreads();
    add_shares();
  }

 private:
  // A unit of the block's.
  struct Place {
    uint32_t tile, step;

    __device__ __forceinline__ void advance(uint32_t steps) {
      if (++step == steps) step = 0, tile++;
    }
  };

  // Where line `line` of a row of x or of a unit lies in shared memory: the same lines of
  // neighbouring rows in other banks.
  static __device__ __forceinline__ uint32_t line_of(uint32_t row, uint32_t line) {
    return line ^ (row & 1) << 2;
  }

  // Of a warp.
  __device__ __forceinline__ uint32_t first_unit(uint32_t warp) const {
    return units_ * warp >> warps_log2_;
  }

  // Waits for the copies of the next unit: those of slots behind it may go on.
  __device__ __forceinline__ void await_unit() const {
    if (p_.slots == 4) {
      await_copies<2>();
    } else if (p_.slots == 3) {
      await_copies<1>();
    } else {
      await_copies<0>();
    }
  }

  // Starts to copy a unit, 256 bytes of a row by each half of a warp.
  __device__ __forceinline__ void fill(uint8_t *slot, Place place) const {
    const uint32_t columns = first_ + place.tile * columns_of_tile_;
    const uint32_t there = min(end_ - columns, columns_of_tile_);
    const uint32_t line = lane_ % kLines, of_weight = place.step * kLines + line;
    const uint32_t first = lane_ / kLines;
    // Of gated products the second half of the rows is another matrix.
    const int64_t turn = p_.gated != 0 ? p_.up_offset - 8 * p_.weight_stride : 0;
    const uint8_t *from =
        p_.weight + (columns + first) * p_.weight_stride + static_cast<uint64_t>(of_weight) * 16;
    const bool whole = there == columns_of_tile_ && p_.lines - place.step * kLines >= kLines;
#pragma unroll
    for (uint32_t i = 0; i < kTile / 2; i++) {
      const uint32_t row = 2 * i + first;
      const uint32_t column = row & (columns_of_tile_ - 1);
      if (whole || (column < there && of_weight < p_.lines)) {
        start_copy(slot + (row * kLines + line_of(row, line)) * 16,
                   from + 2 * i * p_.weight_stride + (i >= kTile / 4 ? turn : 0));
      }
    }
  }

  // x to shared memory, zeros behind it, and the parts of its sums of squares to where shares will
  // be.
  __device__ __forceinline__ void load_x() const {
    constexpr uint32_t kAtOnce = 4;
    const uint32_t padded = p_.steps * kLines, parts = (p_.lines + 31) / 32;
    for (uint32_t first = 0; first < p_.rows; first += kAtOnce) {
      // All lanes of a warp take part in sums.
      for (uint32_t base = warp_ * 32; base < padded; base += blockDim.x) {
        const uint32_t line = base + lane_;
        uint4 of[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          of[i] = {0, 0, 0, 0};
          if (line < p_.lines && first + i < p_.rows) {
            const uint8_t *x = static_cast<const uint8_t *>(p_.x) + (first + i) * p_.x_stride;
            of[i] = reinterpret_cast<const uint4 *>(x)[line];
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          const uint32_t row = first + i;
          if (row >= p_.rows) break;
          if (line < padded) x_[row * padded + line_of(row, line)] = of[i];
          if (p_.norm_dtype != 0) {
            const float sum = squares_of_part<T>(of[i]);
            if (lane_ == 0 && base < p_.lines) sums_[row * parts + base / 32] = sum;
          }
        }
      }
    }
  }

  // Normalises x in place: a thread the lines that it has stored.
  // `gains` are those of the first.
  __device__ __forceinline__ void normalise(float (&gains)[8]) const {
    const uint32_t padded = p_.steps * kLines, parts = (p_.lines + 31) / 32;
    __syncthreads();
    for (uint32_t row = 0; row < p_.rows; row++) {
      const float scale = scale_of_row(p_, sums_ + row * parts, parts);
      for (uint32_t line = threadIdx.x; line < p_.lines; line += blockDim.x) {
        if (line != threadIdx.x) load_gains(line, gains);
        uint4 &words = x_[row * padded + line_of(row, line)];
        float of[8];
        Vector<T>::unpack(words, of);
#pragma unroll
        for (int i = 0; i < 8; i++) of[i] = normalised(p_, of[i], gains[i], scale);
        words = Vector<T>::packed(of);
      }
      // Another row's gains are those of the first line again.
      if (p_.lines > blockDim.x && threadIdx.x < p_.lines) load_gains(threadIdx.x, gains);
    }
  }

  __device__ __forceinline__ void load_gains(uint32_t line, float (&gains)[8]) const {
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      const float4 *from = static_cast<const float4 *>(p_.norm) + 2 * line;
      const float4 low = from[0], high = from[1];
      gains[0] = low.x, gains[1] = low.y, gains[2] = low.z, gains[3] = low.w;
      gains[4] = high.x, gains[5] = high.y, gains[6] = high.z, gains[7] = high.w;
    } else {
      Vector<T>::unpack(static_cast<const uint4 *>(p_.norm)[line], gains);
    }
  }

  // Elements of x and of the weight are multiplied in an order that both have in common: lane t of
  // four has whole lines.
  __device__ __forceinline__ void multiply(const uint8_t *slot, uint32_t step) {
    if (p_.lines - step * kLines >= kLines) {
      multiply<true>(slot, step);
    } else {
      multiply<false>(slot, step);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void multiply(const uint8_t *slot, uint32_t step) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    // Columns without a row repeat the last one's.
    const uint32_t row = min(g, p_.rows - 1);
    const uint4 *of_weight = reinterpret_cast<const uint4 *>(slot) + g * kLines;
    const uint4 *of_x = x_ + (row * p_.steps + step) * kLines;
#pragma unroll
    for (uint32_t i = 0; i < kLines / 4; i++) {
      const uint32_t line = 4 * i + t;
      uint4 low = of_weight[line_of(g, line)], high = of_weight[8 * kLines + line_of(g, line)];
      if (!kWhole && step * kLines + line >= p_.lines) low = high = {0, 0, 0, 0};
      const uint4 x = of_x[line_of(row, line)];
      mma<T>({low.x, high.x, low.y, high.y}, {x.x, x.y}, acc_);
      mma<T>({low.z, high.z, low.w, high.w}, {x.z, x.w}, acc_);
    }
  }

  // Stores a warp's sums of a tile, or puts its share where others add them.
  __device__ __forceinline__ void leave(uint32_t tile, bool whole, uint32_t share) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = 2 * t + i;
      if (row < p_.rows) {
        if (whole) {
          store(tile, row, g, acc_[i], acc_[2 + i]);
        } else {
          float *to = sums_ + ((2 * warp_ + share) * p_.rows + row) * kTile + g;
          to[0] = acc_[i], to[8] = acc_[2 + i];
        }
      }
      acc_[i] = acc_[2 + i] = 0;
    }
  }

  // Adds the shares of tiles that several warps have, in the order of these.
  __device__ __forceinline__ void add_shares() const {
    const uint32_t warps = 1u << warps_log2_;
    for (uint32_t i = threadIdx.x; i < tiles_ * p_.rows * 8; i += blockDim.x) {
      const uint32_t g = i % 8, row = i / 8 % p_.rows, tile = i / 8 / p_.rows;
      const uint32_t begin = tile * p_.steps, end = begin + p_.steps;
      float low = 0, high = 0;
      bool whole = false;
      for (uint32_t warp = 0; warp < warps; warp++) {
        const uint32_t from = first_unit(warp), to = first_unit(warp + 1);
        if (from == to || from >= end || to <= begin) continue;
        whole |= from <= begin && to >= end;
        const float *share = sums_ + ((2 * warp + (from < begin)) * p_.rows + row) * kTile + g;
        low += share[0], high += share[8];
      }
      if (!whole) store(tile, row, g, low, high);
    }
  }

  // The sums of rows g and g + 8 of a tile.
  __device__ __forceinline__ void store(uint32_t tile, uint32_t row, uint32_t g, float low,
                                        float high) const {
    const Float dtype = static_cast<Float>(p_.dtype);
    const uint32_t column = first_ + tile * columns_of_tile_ + g;
    if (p_.gated != 0) {
      if (column < end_) finish_gated(p_, dtype, row, column, low, high);
      return;
    }
    if (column < end_) finish(p_, dtype, row, column, low);
    if (column + 8 < end_) finish(p_, dtype, row, column + 8, high);
  }

  const LinearFewArguments &p_;
  const uint32_t warp_, lane_, warps_log2_, columns_of_tile_;
  // Columns of the block, and its tiles and units.
  const uint32_t first_, end_, tiles_, units_;
  uint8_t *const ring_;
  // [row][line]
  uint4 *x_;
  // [warp][its first tile, its last][row of x][column]
  float *sums_;
  float acc_[4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_FEW(name, type)                                       \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)         \
      linear_few_##name(const __grid_constant__ LinearFewArguments params) { \
    unsloth::let_next_kernel_start();                                        \
    if (params.constant == 0) unsloth::await_previous_kernel();              \
    extern __shared__ uint4 dynamic[];                                       \
    unsloth::Few<type>(params, reinterpret_cast<uint8_t *>(dynamic)).run();  \
  }                                                                          \
  extern "C" __device__ const LinearFewLaunch linear_few_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                           \
      unsloth::kMostRows,                                                    \
      unsloth::kTile,                                                        \
      unsloth::kLines * 8,                                                   \
      unsloth::kUnitBytes,                                                   \
      unsloth::kSumsBytes,                                                   \
      unsloth::kThreads,                                                     \
      unsloth::kSharedBytes,                                                 \
  };
