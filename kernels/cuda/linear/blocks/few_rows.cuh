// A few rows of x by weights in blocks, bound by reading these.
//
// A block of threads has neighbouring rows of the weight (columns of the output), in tiles of 16,
// and some blocks of a tile at a time: its units. Each warp takes as many units, one after another.
// It copies their bytes as they lie in memory, 16 at a time whatever a block's size, into a ring of
// its own in shared memory, some units ahead of what it multiplies, and lets tensor cores multiply
// the codes by the digits of x. What the warps of a tile have is added in their order.
//
// It is CUDA C++ for these bytes, which are copied as vectors and read as halves or words, and for
// products of integers on tensor cores: what CubeCL's types do not say.
#pragma once

#include "common/dependent_launch.cuh"
#include "linear/blocks/arguments.h"
#include "linear/gated.cuh"
#include "products.cuh"

namespace unsloth {

using Arguments = LinearBlocksArguments;

// Of a block, at most: threads, bytes of shared memory.
constexpr int kThreads = 512;
constexpr int kSharedBytes = 227 * 1024;
// `kRows`: of x, at most: one, four or eight. The columns that one leaves free of a product are for
// others of its neighbours: four products, of 32 each, go to columns of their own, and lane t of
// four has the sums of the t-th. So they are scaled at once, and lanes add what they have at the
// end.
template <Blocks kBlocks, int kRows>
class FewRows {
 public:
  static constexpr int kFours = (kRows + 3) / 4;
  static constexpr bool kAlone = kRows == 1;
  static constexpr int kOutputs = kColumns * kRows;
  // For a warp's shares of its first tile and of its last.
  static constexpr int kSumsBytes = 2 * kOutputs * static_cast<int>(sizeof(float));

  __device__ __forceinline__ FewRows(const Arguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        warps_log2_(31 - __clz(blockDim.x / 32)),
        first_(blockIdx.x * p.columns_of_block),
        end_(min(first_ + p.columns_of_block, p.out_features)),
        rows_of_block_(1u << p.rows_of_block_log2),
        first_row_(blockIdx.y * rows_of_block_),
        weight_(p, lane_),
        tiles_((end_ - first_ + weight_.columns() - 1) / weight_.columns()),
        units_(tiles_ * p.steps),
        ring_(shared + warp_ * p.slots * U::kSlotBytes) {
    uint8_t *rest = shared + (p.slots << warps_log2_) * U::kSlotBytes;
    const uint32_t count = p.blocks * (F::kLength / 32) << p.rows_of_block_log2;
    digits_.numbers = reinterpret_cast<uint2 *>(rest);
    rest += count * 64;
    digits_.scales = reinterpret_cast<Scale *>(rest);
    rest += count * sizeof(Scale);
    digits_.rows_log2 = p.rows_of_block_log2;
    is_lined_ = p.aligned == kLines && weight_.is_short();
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      masks_[i] = lane_ / 8 == i;
      // The compiler, which would select if it knew them, is not to.
      asm("" : "+r"(masks_[i]));
    }
    sums_ = reinterpret_cast<float *>(rest);
  }

  __device__ __forceinline__ void run() {
    const uint32_t begin = first_unit(warp_), end = first_unit(warp_ + 1);
    const Place start = place_of(begin);
    Place next = start;
    uint32_t asked = begin, to = 0;
    const auto ask = [&] {
      if (asked < end) fill(ring_ + to * U::kSlotBytes, next);
      commit_copies();
      asked++;
      next.advance(p_.steps);
      to = to + 1 == p_.slots ? 0 : to + 1;
    };
    const auto begin_to_ask = [&] {
      for (uint32_t i = 0; i + 1 < p_.slots; i++) ask();
    };
    if (p_.norm_dtype != 0) fetch_gains(p_, p_.blocks * F::kLength);
    if (p_.constant != 0) {
      begin_to_ask();
      await_previous_kernel();
    }
    const auto batch = digits_.load(p_, first_row_, 0);
    typename D::Gains gains;
    if (p_.norm_dtype != 0) gains = digits_.load_gains(p_, 0);
    if (p_.constant == 0) begin_to_ask();
    if (p_.norm_dtype != 0) scale_rows();
    digits_.round(p_, first_row_, batch, gains);
    __syncthreads();

    Place here = start;
    uint32_t slot = 0, began = begin;
    for (uint32_t unit = begin; unit < end; unit++) {
      await_unit();
      // All lanes' copies are there, and all have done with the slot that is filled next.
      __syncwarp();
      ask();
      multiply(ring_ + slot * U::kSlotBytes, here);
      slot = slot + 1 == p_.slots ? 0 : slot + 1;
      const uint32_t tile = here.tile;
      const bool ends = here.step + 1 == p_.steps;
      here.advance(p_.steps);
      if (ends || unit + 1 == end) {
        const bool whole = ends && unit + 1 - began == p_.steps;
        leave(tile, whole, began == begin ? 0 : 1);
        began = unit + 1;
      }
    }
    await_copies<0>();
    __syncthreads();
    add_shares();
  }

 private:
  using F = Format<kBlocks>;
  using U = Unit<kBlocks>;
  using D = Digits<kBlocks>;
  using Scale = typename D::Scale;
  using P = Products<kBlocks>;
  static constexpr uint32_t k32s = P::k32s;
  using FactorsOf = typename P::template FactorsOf<kAlone>;

  // What rows of x are multiplied by that pass a norm. Their sums of squares lie where shares will.
  __device__ __forceinline__ void scale_rows() {
    const uint32_t lines = p_.blocks * (F::kLength / 8), parts = (lines + 31) / 32;
    const uint32_t warps = 1u << warps_log2_;
    const bool is_half = p_.x_dtype == static_cast<uint32_t>(Float::kF16);
    for (uint32_t row = 0; row < rows_of_block_; row++) {
      const uint8_t *x =
          static_cast<const uint8_t *>(p_.x) + min(first_row_ + row, p_.rows - 1) * p_.x_stride;
      for (uint32_t part = warp_; part < parts; part += warps) {
        const uint32_t line = part * 32 + lane_;
        uint4 words = {0, 0, 0, 0};
        if (line < lines) words = reinterpret_cast<const uint4 *>(x)[line];
        const float sum =
            is_half ? squares_of_part<__half>(words) : squares_of_part<__nv_bfloat16>(words);
        if (lane_ == 0) sums_[row * parts + part] = sum;
      }
    }
    __syncthreads();
    if (rows_of_block_ == 1) {
      digits_.row_scale = scale_of_row(p_, sums_, parts);
      return;
    }
    float *scales = sums_ + rows_of_block_ * parts;
    for (uint32_t row = warp_; row < rows_of_block_; row += warps) {
      const float scale = scale_of_row(p_, sums_ + row * parts, parts);
      if (lane_ == 0) scales[row] = scale;
    }
    __syncthreads();
    digits_.row_scales = scales;
  }

  // A unit of the block's.
  struct Place {
    uint32_t tile, step;

    __device__ __forceinline__ void advance(uint32_t steps) {
      if (++step == steps) step = 0, tile++;
    }
  };

  __device__ __forceinline__ Place place_of(uint32_t unit) const {
    return {unit / p_.steps, unit % p_.steps};
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

  // Starts to copy a unit: behind one of its tile, or the first.
  __device__ __forceinline__ void fill(uint8_t *slot, Place place) {
    const uint32_t columns = first_ + place.tile * weight_.columns();
    if constexpr (kAlone && U::kIsLines) {
      if (place.tile != tile_) {
        tile_ = place.tile;
        is_whole_ = is_lined_ && end_ - columns >= weight_.columns();
        if (is_whole_) weight_.find_lines(columns, lines_);
      }
      if (is_whole_ && !is_cut(place.step)) {
        weight_.copy(slot, lines_, place.step);
        return;
      }
    }
    weight_.copy(slot, columns, min(end_ - columns, weight_.columns()), place.step);
  }

  // Whether a step has fewer blocks than others.
  __device__ __forceinline__ bool is_cut(uint32_t step) const {
    return p_.blocks < (step + 1) * U::kCount;
  }

  __device__ __forceinline__ void multiply(const uint8_t *slot, Place place) {
    if constexpr (kAlone && U::kIsLines) {
      const uint32_t columns = first_ + place.tile * weight_.columns();
      if (is_lined_ && end_ - columns >= weight_.columns() && !is_cut(place.step)) {
        constexpr uint32_t kPitch = U::kLinePitch * 16;
        const uint8_t *low = slot + lane_ / 4 * kPitch;
        multiply_whole<true>({low, low + 8 * kPitch}, place.step * U::kCount * k32s);
        return;
      }
    }
    const uint32_t g = lane_ / 4, columns = first_ + place.tile * kColumns;
    const uint8_t *rows[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      rows[h] = weight_.row_of(slot, columns, g + 8 * h, place.step);
    }
    const uint32_t first = place.step * U::kCount;
    const uint32_t count = weight_.count(place.step);
    const uint32_t of_x = first * k32s;
    if (count != U::kCount) {
      constexpr uint32_t kAtOnce = kAlone ? 4 : k32s;
#pragma unroll 1
      for (uint32_t i = 0; i < count * k32s; i += kAtOnce) {
        if constexpr (kAlone) {
          multiply_four<false, false>(rows, i, count * k32s, of_x);
        } else {
#pragma unroll
          for (uint32_t j = 0; j < k32s; j++) multiply_32<false>(rows, i + j, of_x);
        }
      }
    } else if (weight_.are_lines()) {
      multiply_whole<true>(rows, of_x);
    } else {
      multiply_whole<false>(rows, of_x);
    }
  }

  // All blocks of a unit.
  template <bool kRowAligned>
  __device__ __forceinline__ void multiply_whole(const uint8_t *const (&rows)[2], uint32_t of_x) {
#pragma unroll(kAlone ? 2 : 8)
    for (uint32_t i = 0; i < U::kWeights / 32; i += kAlone ? 4 : 1) {
      if constexpr (kAlone) {
        multiply_four<true, kRowAligned>(rows, i, 0, of_x);
      } else {
        multiply_32<kRowAligned>(rows, i, of_x);
      }
    }
  }

  // The unit's 32 neighbours i; `of_x`: where x has the unit's.
  template <bool kRowAligned>
  __device__ __forceinline__ void multiply_32(const uint8_t *const (&rows)[2], uint32_t i,
                                              uint32_t of_x) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    // A column's digits, a row's scales: with fewer rows than lanes are there for, some are the
    // same.
    const uint32_t column = g & (2 * rows_of_block_ - 1), row = t & (rows_of_block_ - 1);
    uint32_t codes[4];
    P::template codes_of<kRowAligned>(rows, i, t, codes);
    const FactorsOf factors[2] = {P::template block_of<false>(rows[0], i),
                                  P::template block_of<false>(rows[1], i)};
#pragma unroll
    for (uint32_t f = 0; f < kFours; f++) {
      int32_t sums[P::kParts][4] = {};
      P::multiply(codes, *digits_.numbers_of(of_x + i, column + 8 * f, t), sums);
      const Scale scale = digits_.scales[((of_x + i) << p_.rows_of_block_log2) + row + 4 * f];
      P::add(sums, scale, factors, i % k32s, acc_[f]);
    }
  }

  // Four of them from `first` on, with the one row of x; of `count`, where not `kWhole`.
  template <bool kWhole, bool kRowAligned>
  __device__ __forceinline__ void multiply_four(const uint8_t *const (&rows)[2], uint32_t first,
                                                uint32_t count, uint32_t of_x) {
    const uint32_t g = lane_ / 4, t = lane_ % 4, of_lane = first + g / 2;
    uint2 numbers = {0, 0};
    if (kWhole || of_lane < count) numbers = *digits_.numbers_of(of_x + of_lane, g % 2, t);
    int32_t sums[P::kParts][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      if (!kWhole && first + i >= count) break;
      uint32_t codes[4];
      P::template codes_of<kRowAligned>(rows, first + i, t, codes);
      // By a product, as selecting is for the units that take codes apart.
      P::multiply(codes, {numbers.x * masks_[i], numbers.y * masks_[i]}, sums);
    }
    if (!kWhole && first + t >= count) return;
    const FactorsOf factors[2] = {P::template block_of<false>(rows[0], first + t),
                                  P::template block_of<false>(rows[1], first + t)};
    P::add(sums, digits_.scales[of_x + first + t], factors, (first + t) % k32s, acc_[0]);
  }

  // Stores a warp's sums of a tile, or puts its share where others add them.
  __device__ __forceinline__ void leave(uint32_t tile, bool whole, uint32_t share) {
    if constexpr (kAlone) {
      for (float &sum : acc_[0]) {
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
      }
    }
#pragma unroll
    for (uint32_t f = 0; f < kFours; f++) {
      const uint32_t row = 4 * f + lane_ % 4, column = lane_ / 4;
      if (row < kRows) {
        if (!whole) {
          float *to = sums_ + (2 * warp_ + share) * kOutputs + row * kColumns + column;
          to[0] = acc_[f][0], to[8] = acc_[f][1];
        } else if (p_.gated != 0) {
          store_gated(tile, row, column, acc_[f][0], acc_[f][1]);
        } else {
          store(tile, row, column, acc_[f][0]);
          store(tile, row, column + 8, acc_[f][1]);
        }
      }
      acc_[f][0] = acc_[f][1] = 0;
    }
  }

  // The warp that has a unit.
  __device__ __forceinline__ uint32_t warp_of(uint32_t unit) const {
    const float number = __fdividef(static_cast<float>(unit << warps_log2_), units_);
    // One too few or too many, by rounding and because their numbers differ.
    uint32_t warp = static_cast<uint32_t>(number);
    while (warp != 0 && first_unit(warp) > unit) warp--;
    while (first_unit(warp + 1) <= unit) warp++;
    return warp;
  }

  // Adds the shares of the tiles that several warps have: a warp those of a tile and a row of x.
  __device__ __forceinline__ void add_shares() const {
    for (uint32_t at = warp_; at < tiles_ << p_.rows_of_block_log2; at += 1u << warps_log2_) {
      const uint32_t tile = at >> p_.rows_of_block_log2, row = at & (rows_of_block_ - 1);
      const uint32_t first = tile * p_.steps;
      const uint32_t begin = warp_of(first), last = warp_of(first + p_.steps - 1);
      if (begin == last) continue;
      const float *shares = sums_ + row * kColumns + lane_ % kColumns;
      // Every other warp's for either half of the lanes.
      float sum = 0;
      for (uint32_t warp = begin + lane_ / kColumns; warp <= last; warp += 32 / kColumns) {
        const uint32_t of_warp = first_unit(warp);
        // Where there are fewer units than warps, some have none.
        if (of_warp == first_unit(warp + 1)) continue;
        sum += shares[(2 * warp + (of_warp < first)) * kOutputs];
      }
      sum += __shfl_xor_sync(0xffffffff, sum, kColumns);
      if (p_.gated != 0) {
        const float up = __shfl_xor_sync(0xffffffff, sum, 8);
        if (lane_ < 8) store_gated(tile, row, lane_, sum, up);
      } else if (lane_ < kColumns) {
        store(tile, row, lane_, sum);
      }
    }
  }

  __device__ __forceinline__ void store_gated(uint32_t tile, uint32_t row, uint32_t column,
                                              float gate, float up) const {
    const uint32_t of_out = first_ + tile * weight_.columns() + column;
    if (row >= rows_of_block_ || first_row_ + row >= p_.rows || of_out >= end_) return;
    finish_gated(p_, static_cast<Float>(p_.dtype), first_row_ + row, of_out, gate, up);
  }

  __device__ __forceinline__ void store(uint32_t tile, uint32_t row, uint32_t column,
                                        float sum) const {
    const uint32_t of_out = first_ + tile * kColumns + column;
    if (row >= rows_of_block_ || first_row_ + row >= p_.rows || of_out >= end_) return;
    finish(p_, static_cast<Float>(p_.dtype), first_row_ + row, of_out, sum);
  }

  const Arguments &p_;
  const uint32_t warp_, lane_, warps_log2_;
  // Rows of the weight and of x that the block has.
  const uint32_t first_, end_, rows_of_block_, first_row_;
  const Units<kBlocks> weight_;
  const uint32_t tiles_, units_;
  uint8_t *const ring_;
  D digits_;
  // [warp][its first tile, its last][row of x][column].
  float *sums_;
  float acc_[kFours][2] = {};
  // Of one row of x: whether whole units are copied by offsets; the tile that is copied, whether it
  // is whole, and where its lines begin.
  bool is_lined_ = false;
  uint32_t tile_ = ~0u;
  bool is_whole_ = false;
  uint32_t lines_[U::kCopies];
  // Of one row: 1 for the product of four whose columns a lane has, else 0.
  uint32_t masks_[4];
};

}  // namespace unsloth
