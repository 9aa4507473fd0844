// Few rows of x by weights of 8 or 2 bits whose scales lie apart, in one launch: bound by reading
// the weights, and by what comes before and behind that.
//
// Every block rounds the rows of x to codes of 8 bits for itself, into shared memory, as kernels
// that round do (quantize.cuh): it takes less time than another launch. Each has some tiles of 16
// rows of the weight, one behind the other, in units of 64 bytes of each row. Its warps take units
// by turns: the first ones are on their way to a ring that each warp has in shared memory before x
// is there, while the kernel before still runs if the weight is constant. Products are those of
// `mma`, 16 rows of the weight by 32 codes by 8 rows of x. What a warp has of a tile is added up in
// shared memory.
//
// A lane reads 16 bytes at a time, of the weight as of x. Which elements these are is free, as long
// as both have the same ones at equal places: sums of integers do not depend on an order. They are
// exact, and what follows is rounded as on the CPU: the same bits as from any other kernel.
//
// It is CUDA C++ for the reasons of codes.cuh, which has the order of ternary codes, too.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/nearest_code.cuh"
#include "common/vector.cuh"
#include "linear/epilogue.cuh"
#include "linear/few_codes/arguments.h"

namespace unsloth {

using Arguments = LinearFewCodesArguments;

constexpr uint32_t kWarps = 16;
constexpr uint32_t kThreads = kWarps * 32;
// Rows of x at most; of the weight, of a tile.
constexpr uint32_t kMostRows = 8, kColumns = 16;
// Rows of x up to which it is faster that ternary codes stay in their places.
constexpr uint32_t kMostInPlace = 4;
// Bytes of a row of the weight that a warp takes at a time; units that it has on their way, as many
// as leave room for a block of the next kernel beside this one.
constexpr uint32_t kUnitBytes = 64, kAhead = 6;
constexpr uint32_t kAll = ~0u;
// Of shared memory, what a block may ask for where the device has as much.
constexpr int32_t kMostBytes = 227 * 1024;
// A row's codes are there: a quarter of them by ternary codes of the last place have a sum of 32
// bits.
static_assert(int64_t{kMostBytes / 4} * 127 * (3 << 6) <= INT32_MAX);

// Of a lane: of rows g and g + 8 of a tile, bytes of a unit from 16 t on.
struct Lines {
  uint4 of[2];
};

// In shared memory, before codes of x and sums.
struct Shared {
  uint4 ring[kWarps][kAhead][2][32];
  uint32_t of_warp[kWarps];
  float x_scale[kMostRows];
  int32_t x_sum[kMostRows];
};

template <bool kTernary, class T>
class FewCodes {
 public:
  // Eight neighbours of a row of x that a thread holds, so many times.
  static constexpr uint32_t kEights = 8 / sizeof(T);
  // Codes of a byte.
  static constexpr uint32_t kPlaces = kTernary ? 4 : 1;
  // Elements of a unit.
  static constexpr uint32_t kUnit = kTernary ? 4 * kUnitBytes : kUnitBytes;

  __device__ __forceinline__ FewCodes(const Arguments &p, uint4 *dynamic)
      : p_(p),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        units_((p.row_bytes + kUnitBytes - 1) / kUnitBytes),
        first_(tile_of(blockIdx.x)),
        tiles_(tile_of(blockIdx.x + 1) - first_),
        shared_(*reinterpret_cast<Shared *>(dynamic)),
        codes_(reinterpret_cast<uint8_t *>(&shared_ + 1)),
        sums_(reinterpret_cast<int32_t *>(codes_ + p.rows * p.pitch)) {}

  // `kLines`: rows of the weight and of x are whole lines of 16 bytes. `kInPlace`: ternary codes
  // are multiplied where they are in their bytes.
  template <bool kLines, bool kInPlace>
  __device__ __forceinline__ void run() {
    // Every warp asks for its units in order, and goes around its ring.
    Place asked = place_of_warp();
#pragma unroll 1
    for (uint32_t i = 0; i < kAhead; i++) ask_next<kLines>(i, asked);
    const uint32_t outputs = tiles_ * kColumns * p_.rows;
    const float own = threadIdx.x < outputs ? scale_of(threadIdx.x) : 0;
    for (uint32_t i = threadIdx.x; i < outputs; i += kThreads) sums_[i] = 0;
    round_all<kLines>();
    // Codes are there, and zeros to be added to.
    __syncthreads();
    Place at = place_of_warp();
    uint32_t tile = at.tile;
    // One body of a loop, which is in no cache of instructions when another kernel ran before.
#pragma unroll 1
    for (uint32_t slot = 0; at.tile < tiles_; slot = slot + 1 < kAhead ? slot + 1 : 0) {
      if (at.tile != tile) add<kInPlace>(tile), tile = at.tile;
      // Of the groups, one for each unit, all but the newest ones have come.
      await_copies<kAhead - 1>();
      multiply<kInPlace>(
          Lines{shared_.ring[warp_][slot][0][lane_], shared_.ring[warp_][slot][1][lane_]}, at.unit);
      ask_next<kLines>(slot, asked);
      advance(at);
    }
    if (tile < tiles_) add<kInPlace>(tile);
    __syncthreads();
    finish_all(own);
  }

 private:
  // A unit of a tile of the block's.
  struct Place {
    uint32_t tile, unit;
  };

  // The first unit of the warp's: of those of all tiles, one behind the other, it has every
  // sixteenth.
  __device__ __forceinline__ Place place_of_warp() const {
    Place at = {0, warp_};
    wrap(at);
    return at;
  }
  __device__ __forceinline__ void advance(Place &at) const {
    at.unit += kWarps;
    wrap(at);
  }
  __device__ __forceinline__ void wrap(Place &at) const {
    while (at.unit >= units_) at.unit -= units_, at.tile++;
  }

  // The first tile of a block: all have as many, or one more.
  __device__ __forceinline__ uint32_t tile_of(uint32_t block) const {
    return block * p_.tiles_of_block + min(block, p_.one_more);
  }

  // Asks for a unit, if there is one. Each lane copies to a place of the ring that only it reads,
  // and zeros for what is behind the row's end.
  template <bool kLines>
  __device__ __forceinline__ void ask_next(uint32_t slot, Place &place) {
    if (place.tile < tiles_) {
      const uint32_t at = place.unit * kUnitBytes + lane_ % 4 * 16;
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const uint32_t column =
            min((first_ + place.tile) * kColumns + lane_ / 4 + 8 * h, p_.out_features - 1);
        const uint8_t *row = p_.weight + column * p_.weight_stride;
        uint4 &to = shared_.ring[warp_][slot][h][lane_];
        if constexpr (kLines) {
          const bool is_there = at < p_.row_bytes;
          start_copy_or_zeros(&to, row + (is_there ? at : 0), is_there);
        } else {
          uint32_t words[4] = {};
          for (uint32_t i = 0; i < 16 && at + i < p_.row_bytes; i++) {
            words[i / 4] |= static_cast<uint32_t>(row[at + i]) << i % 4 * 8;
          }
          to = {words[0], words[1], words[2], words[3]};
        }
      }
      advance(place);
    }
    commit_copies();
  }

  // Where the code of element `k` of a row of x lies. By ternary weights the 16 codes lie together
  // that a lane multiplies by what one shift gives of its 16 bytes.
  static __device__ __forceinline__ uint32_t place_of(uint32_t k) {
    if (!kTernary) return k;
    // A unit is two blocks of 128 codes, four times 32 each.
    const uint32_t block = k / 128 % 2, quarter = k / 32 % 4;
    return k / kUnit * kUnit + quarter * 64 + block * 32 + k % 32;
  }

  // Eight neighbours of a row of x.
  struct Eight {
    uint4 of[sizeof(T) / 2];
  };

  // Those from `k` on; behind the row's end there are zeros.
  template <bool kLines>
  __device__ __forceinline__ void load(Eight &eight, const T *x, uint32_t k) const {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(T) / 2; i++) {
      eight.of[i] = {0, 0, 0, 0};
      constexpr uint32_t kWidth = Vector<T>::kWidth;
      if constexpr (kLines) {
        const uint32_t at = k + i * kWidth;
        if (at < p_.in_features) eight.of[i] = *reinterpret_cast<const uint4 *>(x + at);
      } else {
        float numbers[kWidth];
#pragma unroll
        for (uint32_t j = 0; j < kWidth; j++) {
          const uint32_t at = k + i * kWidth + j;
          numbers[j] = at < p_.in_features ? static_cast<float>(x[at]) : 0.0f;
        }
        eight.of[i] = Vector<T>::packed(numbers);
        // There are too few registers for all of a thread's at once.
        asm volatile("" ::: "memory");
      }
    }
  }

  static __device__ __forceinline__ void unpack(const Eight &eight, float (&numbers)[8]) {
    constexpr uint32_t kWidth = Vector<T>::kWidth;
#pragma unroll
    for (uint32_t i = 0; i < sizeof(T) / 2; i++) {
      float some[kWidth];
      Vector<T>::unpack(eight.of[i], some);
#pragma unroll
      for (uint32_t j = 0; j < kWidth; j++) numbers[i * kWidth + j] = some[j];
    }
  }

  // Waits for the kernel before, and rounds all rows of x. Of short ones a thread has less than it
  // can hold, and goes without steps for the rest.
  template <bool kLines>
  __device__ __forceinline__ void round_all() {
    const uint32_t whole = units_ * kUnit, step = (kWarps >> p_.rows_log2) * 32 * 8;
    if (kLines && whole <= step) {
      round_rows<kLines, 1>();
    } else if (kLines && whole <= 2 * step) {
      round_rows<kLines, 2>();
    } else {
      round_rows<kLines, kEights>();
    }
  }

  // Warps share a row, as many to each. What a thread has of one, up to so many eights, is read at
  // once, and again where there is more.
  template <bool kLines, uint32_t kHeld>
  __device__ __forceinline__ void round_rows() {
    const uint32_t warps = kWarps >> p_.rows_log2, row = warp_ / warps;
    const uint32_t thread = warp_ % warps * 32 + lane_, step = warps * 32 * 8;
    const T *x = reinterpret_cast<const T *>(static_cast<const uint8_t *>(p_.x) +
                                             min(row, p_.rows - 1) * p_.x_stride);
    // Up to a whole unit there are zeros.
    const uint32_t whole = units_ * kUnit;
    const bool is_held = whole <= kHeld * step;
    // What follows is fetched meanwhile, one instruction behind the other.
    await_previous_kernel();
    Eight held[kHeld];
    const auto load_all = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = 0; i < kHeld; i++) load<kLines>(held[i], x, first + i * step);
    };
    uint32_t most = 0;
#pragma unroll 1
    for (uint32_t first = thread * 8; first < whole; first += kHeld * step) {
      load_all(first);
#pragma unroll
      for (uint32_t i = 0; i < kHeld; i++) {
#pragma unroll
        for (const uint4 &of : held[i].of) most = Vector<T>::max_magnitudes(of, most);
      }
    }
    most = __reduce_max_sync(kAll, Vector<T>::as_f32(most));
    if (lane_ == 0) shared_.of_warp[warp_] = most;
    if (threadIdx.x < kMostRows) shared_.x_sum[threadIdx.x] = 0;
    __syncthreads();
    if (row >= p_.rows) return;
    const uint32_t first_warp = warp_ & ~(warps - 1);
    most = __reduce_max_sync(kAll, lane_ < warps ? shared_.of_warp[first_warp + lane_] : 0);
    const ScaleOfCodes by(most);
    int32_t sum = 0;
    uint8_t *to = codes_ + row * p_.pitch;
#pragma unroll 1
    for (uint32_t first = thread * 8; first < whole; first += kHeld * step) {
      if (!is_held) load_all(first);
#pragma unroll
      for (uint32_t i = 0; i < kHeld; i++) {
        const uint32_t k = first + i * step;
        if (k >= whole) break;
        float numbers[8];
        unpack(held[i], numbers);
        const uint2 words = nearest_codes(by, numbers);
        sum = sum_of_codes(words.x, sum_of_codes(words.y, sum));
        *reinterpret_cast<uint2 *>(to + place_of(k)) = words;
      }
    }
    sum = __reduce_add_sync(kAll, sum);
    if (lane_ == 0) atomicAdd(&shared_.x_sum[row], sum);
    if (thread == 0) shared_.x_scale[row] = by.scale;
  }

  template <bool kInPlace>
  __device__ __forceinline__ void multiply(const Lines &lines, uint32_t unit) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *x = codes_ + min(g, p_.rows - 1) * p_.pitch + unit * kUnit + t * 16;
#pragma unroll
    for (uint32_t i = 0; i < kPlaces; i++) {
      const uint4 b = *reinterpret_cast<const uint4 *>(x + i * 64);
#pragma unroll
      for (uint32_t v = 0; v < 2; v++) {
        const uint32_t left[4] = {
            code<kInPlace>(word(lines.of[0], 2 * v), i),
            code<kInPlace>(word(lines.of[1], 2 * v), i),
            code<kInPlace>(word(lines.of[0], 2 * v + 1), i),
            code<kInPlace>(word(lines.of[1], 2 * v + 1), i),
        };
        const uint32_t right[2] = {word(b, 2 * v), word(b, 2 * v + 1)};
        if constexpr (kInPlace) {
          mma_unsigned(left, right, acc_[i]);
        } else {
          mma(left, right, acc_[v]);
        }
      }
    }
  }

  // Of four bytes the codes of place `i`; where they are, they are 4^i times as much.
  template <bool kInPlace>
  static __device__ __forceinline__ uint32_t code(uint32_t word, uint32_t i) {
    if (!kTernary) return word;
    return kInPlace ? word & 0x03030303 << 2 * i : word >> 2 * i & 0x03030303;
  }

  // What the warp has of a sum.
  template <bool kInPlace>
  __device__ __forceinline__ int32_t sum_of(uint32_t at) const {
    if constexpr (kInPlace) {
      return acc_[0][at] + (acc_[1][at] >> 2) + (acc_[2][at] >> 4) + (acc_[3][at] >> 6);
    }
    return acc_[0][at] + acc_[1][at];
  }

  static __device__ __forceinline__ uint32_t word(const uint4 &of, uint32_t i) {
    return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
  }

  // Adds what the warp has of a tile to what others have, and begins anew.
  template <bool kInPlace>
  __device__ __forceinline__ void add(uint32_t tile) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t row = lane_ % 4 * 2 + i % 2, column = lane_ / 4 + i / 2 * 8;
      if (row < p_.rows) {
        atomicAdd(&sums_[(row * tiles_ + tile) * kColumns + column], sum_of<kInPlace>(i));
      }
#pragma unroll
      for (auto &acc : acc_) acc[i] = 0;
    }
  }

  // Of the column of an output of the block.
  __device__ __forceinline__ float scale_of(uint32_t output) const {
    if (p_.weight_scale == nullptr) return 1;
    const uint32_t column = first_ * kColumns + output % (tiles_ * kColumns);
    return p_.weight_scale[min(column, p_.out_features - 1) / p_.rows_of_scale];
  }

  // `own`: the scale of the first output of the thread, which was asked for ahead.
  __device__ __forceinline__ void finish_all(float own) const {
    const uint32_t columns = tiles_ * kColumns;
    for (uint32_t at = threadIdx.x; at < columns * p_.rows; at += kThreads) {
      if (at >= kThreads) own = scale_of(at);
      const uint32_t row = at / columns, column = first_ * kColumns + at - row * columns;
      if (column >= p_.out_features) continue;
      const int32_t sum = sums_[at] - (kTernary ? shared_.x_sum[row] : 0);
      // Each product is rounded: what is added next is not part of it.
      const float scale = __fmul_rn(own, shared_.x_scale[row]);
      finish(p_, static_cast<Float>(p_.dtype), row, column,
             __fmul_rn(scale, static_cast<float>(sum)));
    }
  }

  const Arguments &p_;
  const uint32_t warp_, lane_;
  // Of a row of the weight.
  const uint32_t units_;
  // The block's tiles.
  const uint32_t first_, tiles_;
  Shared &shared_;
  // Of each row of x, and sums by rows of x, columns of all tiles.
  uint8_t *const codes_;
  int32_t *const sums_;
  // Of each place, or of the halves of a line.
  int32_t acc_[4][4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_FEW_CODES(name, ternary, type)                                   \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 2)                    \
      linear_few_codes_##name(const __grid_constant__ LinearFewCodesArguments params) { \
    unsloth::let_next_kernel_start();                                                   \
    if (params.constant == 0) unsloth::await_previous_kernel();                         \
    extern __shared__ uint4 dynamic[];                                                  \
    unsloth::FewCodes<ternary, type> product(params, dynamic);                          \
    if (params.lines && ternary && params.rows <= unsloth::kMostInPlace) {              \
      product.run<true, ternary>();                                                     \
    } else if (params.lines) {                                                          \
      product.run<true, false>();                                                       \
    } else {                                                                            \
      product.run<false, false>();                                                      \
    }                                                                                   \
  }                                                                                     \
  extern "C" __device__ const LinearFewCodesLaunch linear_few_codes_##name##_launch = { \
      ternary,                                                                          \
      static_cast<int32_t>(unsloth::kDtype<type>),                                      \
      unsloth::kMostRows,                                                               \
      unsloth::kColumns,                                                                \
      unsloth::FewCodes<ternary, type>::kUnit,                                          \
      sizeof(unsloth::Shared),                                                          \
      unsloth::kThreads,                                                                \
      unsloth::kMostBytes,                                                              \
  };
