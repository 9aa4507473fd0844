// Up to some rows of x by weights that are 8-bit floats (e4m3) with scales apart, both as they are:
// bound by reading the weights.
//
// Codes become numbers of x's dtype in registers, without rounding, and tensor cores multiply them
// by x. An x of f32 is the sum of three numbers of bf16, each multiplied by the codes: nothing is
// rounded but sums. A scale multiplies a sum at its end.
//
// A block has neighbouring rows of the weight (columns of the output), as many as any other, and
// takes a tile of them after another. Its warps share the bytes of a tile's rows: a step is 128 of
// each. A lane multiplies the bytes that it copied itself, some steps ahead, into its own part of
// shared memory, so that nobody waits for others before a tile's end; which elements a lane has is
// free, as long as those of x lie at equal places. Shares of a tile are added in the order of
// warps.
//
// It is CUDA C++ for words of codes, which CubeCL's types do not say.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/e4m3.cuh"
#include "common/mma.cuh"
#include "common/vector.cuh"
#include "linear/e4m3/arguments.h"
#include "linear/epilogue.cuh"

namespace unsloth {

using Arguments = LinearE4m3Arguments;

// Of a block, at most: threads, bytes of shared memory.
constexpr int kThreads = 512;
constexpr int kSharedBytes = 227 * 1024;
// Bytes of a row of the weight that a warp takes at a time, and a lane's of them at a time.
constexpr uint32_t kStep = 128, kLine = 16;
// Of a warp's ring: with more, nothing was faster.
constexpr uint32_t kSlots = 2;

// 16 neighbours of a row of x, as right-hand sides of four products of 4 of them each.
template <class T>
struct Neighbours {
  static constexpr uint32_t kParts = 1;
  uint32_t words[8];

  __device__ __forceinline__ void load(const T *from) {
    const uint4 *lines = reinterpret_cast<const uint4 *>(from);
    const uint4 first = lines[0], second = lines[1];
    words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
    words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
  }

  __device__ __forceinline__ void set(uint32_t i, T x) {
    const uint16_t bits = reinterpret_cast<const uint16_t &>(x);
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | static_cast<uint32_t>(bits) << 16;
  }

  __device__ __forceinline__ void four(uint32_t i, uint32_t (&to)[kParts][2]) const {
    to[0][0] = words[2 * i], to[0][1] = words[2 * i + 1];
  }
};

template <>
struct Neighbours<float> {
  static constexpr uint32_t kParts = 3;
  float numbers[16];

  __device__ __forceinline__ void load(const float *from) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const float4 four = reinterpret_cast<const float4 *>(from)[i];
      numbers[4 * i] = four.x, numbers[4 * i + 1] = four.y;
      numbers[4 * i + 2] = four.z, numbers[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void set(uint32_t i, float x) { numbers[i] = x; }

  // The least part first. Parts are cut off, so that none overflows; what is left is exact.
  __device__ __forceinline__ void four(uint32_t i, uint32_t (&to)[kParts][2]) const {
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
      uint32_t low = __float_as_uint(numbers[4 * i + 2 * pair]);
      uint32_t high = __float_as_uint(numbers[4 * i + 2 * pair + 1]);
#pragma unroll
      for (uint32_t part = 0; part < kParts; part++) {
        to[kParts - 1 - part][pair] = __byte_perm(low, high, 0x7632);
        low = rest(low), high = rest(high);
      }
    }
  }

  static __device__ __forceinline__ uint32_t rest(uint32_t bits) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & 0xffff0000));
  }
};

// `kEights`: rows of x, in eights. `kUnits`: columns of a tile, in sixteens.
template <class T, uint32_t kEights, uint32_t kUnits>
class Rows {
 public:
  static constexpr uint32_t kRows = 8 * kEights;
  static constexpr uint32_t kColumns = 16 * kUnits;
  // Of a warp: what it copies in a step, and its share of a tile.
  static constexpr uint32_t kSlotBytes = kColumns * kStep;
  static constexpr uint32_t kPitch = kColumns + 4;
  static constexpr uint32_t kShareBytes = kRows * kPitch * sizeof(float);
  // One tile's shares are added while the next is computed, if there is room for both.
  static constexpr uint32_t kBuffers = kEights == 1 ? 2 : 1;

  __device__ __forceinline__ Rows(const Arguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        warps_(blockDim.x / 32),
        first_(blockIdx.x / p.row_tiles * p.columns),
        end_(min(first_ + p.columns, p.out_features)),
        first_row_(blockIdx.x % p.row_tiles * kRows),
        tiles_((end_ - first_ + kColumns - 1) / kColumns),
        scales_(reinterpret_cast<float *>(shared)),
        ring_(shared + p.scales_bytes + warp_ * kSlots * kSlotBytes + lane_ * kLine),
        shares_(reinterpret_cast<float *>(shared + p.scales_bytes + warps_ * kSlots * kSlotBytes)) {
  }

  __device__ __forceinline__ void run() {
    uint32_t asked_tile = warp_ < p_.steps ? 0 : tiles_, asked_step = warp_;
    const auto ask = [&](uint32_t slot) {
      if (asked_tile < tiles_) {
        fill(slot, asked_tile, asked_step);
        asked_step += warps_;
        if (asked_step >= p_.steps) asked_step = warp_, asked_tile++;
      }
      commit_copies();
    };
    for (uint32_t slot = 0; slot < kSlots; slot++) ask(slot);
    // No more was read than a constant weight.
    await_previous_kernel();
    // So that no tile's end waits for them. Others see them behind the first tile's barrier.
    for (uint32_t i = threadIdx.x; i < end_ - first_; i += blockDim.x) {
      scales_[i] =
          p_.weight_scale == nullptr ? 1.0f : p_.weight_scale[(first_ + i) / p_.rows_of_scale];
    }
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t tile = 0; tile < tiles_; tile++) {
#pragma unroll 1
      for (uint32_t step = warp_; step < p_.steps; step += warps_) {
        Neighbours<T> x[2];
        if (kEights == 1) load(x[0], 0, step, 0), load(x[1], 0, step, 1);
        await_copies<kSlots - 1>();
        multiply(slot, step, x);
        ask(slot);
        slot = slot + 1 == kSlots ? 0 : slot + 1;
      }
      float *shares = shares_ + tile % kBuffers * warps_ * kRows * kPitch;
      leave(shares + warp_ * kRows * kPitch);
      __syncthreads();
      add(shares, tile * kColumns);
      if (kBuffers == 1) __syncthreads();
    }
  }

 private:
  // f32 is multiplied in parts.
  using Part = std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>;

  // Starts to copy what a lane has of a step: of each eight columns the row of its own, there from
  // 16 t on and from 64 + 16 t on.
  __device__ __forceinline__ void fill(uint32_t slot, uint32_t tile, uint32_t step) const {
    uint8_t *to = ring_ + slot * kSlotBytes;
    const uint32_t column = first_ + tile * kColumns + lane_ / 4;
    const uint32_t at = step * kStep + lane_ % 4 * kLine;
    const uint8_t *from = p_.weight + column * p_.weight_stride + at;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kUnits; i++) {
      if (column + 8 * i >= end_) break;
#pragma unroll
      for (uint32_t j = 0; j < 2; j++) {
        uint8_t *line = to + (2 * i + j) * 32 * kLine;
        const uint8_t *bytes = from + 8 * i * p_.weight_stride + 64 * j;
        if (p_.aligned && at + 64 * j + kLine <= p_.in_features) {
          start_copy(line, bytes);
        } else {
          gather(line, bytes, p_.in_features, at + 64 * j);
        }
      }
    }
  }

  // A byte at a time, and zeros behind a row's end.
  static __device__ __noinline__ void gather(uint8_t *to, const uint8_t *from, uint32_t columns,
                                             uint32_t at) {
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < kLine && at + i < columns; i++) {
      words[i / 4] |= static_cast<uint32_t>(from[i]) << i % 4 * 8;
    }
    *reinterpret_cast<uint4 *>(to) = {words[0], words[1], words[2], words[3]};
  }

  // What multiplies a lane's line `j` of a step, of the row of `eight` that is the lane's.
  __device__ __forceinline__ void load(Neighbours<T> &x, uint32_t eight, uint32_t step,
                                       uint32_t j) const {
    // Rows that are not there are the last one again.
    const uint32_t row = min(first_row_ + 8 * eight + lane_ / 4, p_.rows - 1);
    const uint32_t at = step * kStep + 64 * j + lane_ % 4 * kLine;
    const T *from =
        reinterpret_cast<const T *>(static_cast<const uint8_t *>(p_.x) + row * p_.x_stride) + at;
    if (p_.x_aligned && at + kLine <= p_.in_features) {
      x.load(from);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kLine; i++) {
        x.set(i, at + i < p_.in_features ? from[i] : static_cast<T>(0.0f));
      }
    }
  }

  __device__ __forceinline__ void multiply(uint32_t slot, uint32_t step, Neighbours<T> (&of)[2]) {
    const uint8_t *lines = ring_ + slot * kSlotBytes;
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      Neighbours<T> x[kEights];
#pragma unroll
      for (uint32_t e = 0; e < kEights; e++) {
        if (kEights == 1) {
          x[e] = of[j];
        } else {
          load(x[e], e, step, j);
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnits; u++) {
        uint4 line[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
          const uint8_t *from = lines + (4 * u + 2 * h + j) * 32 * kLine;
          line[h] = *reinterpret_cast<const uint4 *>(from);
        }
        // In f32 apart from what there is, as a tensor core rounds its sums down.
        float sums[kEights][4] = {};
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) {
          uint32_t codes[4];
#pragma unroll
          for (uint32_t h = 0; h < 2; h++) {
            const uint32_t four = word(line[h], w);
            nan_[u][h] |= nan_of_e4m3(four);
            uint32_t pairs[2];
            pairs_of_e4m3<Part>(four, pairs);
            codes[h] = pairs[0], codes[2 + h] = pairs[1];
          }
#pragma unroll
          for (uint32_t e = 0; e < kEights; e++) {
            uint32_t parts[Neighbours<T>::kParts][2];
            x[e].four(w, parts);
#pragma unroll
            for (uint32_t part = 0; part < Neighbours<T>::kParts; part++) {
              mma<Part>(codes, parts[part], Neighbours<T>::kParts == 1 ? acc_[u][e] : sums[e]);
            }
          }
        }
        if constexpr (Neighbours<T>::kParts > 1) {
#pragma unroll
          for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) acc_[u][e][i] += sums[e][i];
          }
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t word(const uint4 &of, uint32_t i) {
    return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
  }

  // Puts what the warp has where others add it, [row of x][column], and begins anew.
  __device__ __forceinline__ void leave(float *share) {
#pragma unroll
    for (uint32_t u = 0; u < kUnits; u++) {
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        // Of the row's codes that the four lanes have.
        uint32_t nan = nan_[u][h];
        nan |= __shfl_xor_sync(0xffffffff, nan, 1);
        nan |= __shfl_xor_sync(0xffffffff, nan, 2);
        const bool is_nan = (nan & kNanOfE4m3) != 0;
        nan_[u][h] = 0;
#pragma unroll
        for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
          for (uint32_t i = 0; i < 2; i++) {
            float &sum = acc_[u][e][2 * h + i];
            const uint32_t row = 8 * e + lane_ % 4 * 2 + i, column = 16 * u + 8 * h + lane_ / 4;
            share[row * kPitch + column] = is_nan ? __uint_as_float(0x7fc00000) : sum;
            sum = 0;
          }
        }
      }
    }
  }

  // Adds the shares of the tile from the block's `column` on, and stores their sums.
  __device__ __forceinline__ void add(const float *shares, uint32_t column) const {
    const uint32_t there = min(p_.rows - first_row_, kRows), sharing = min(warps_, p_.steps);
    for (uint32_t i = threadIdx.x; i < there * kColumns; i += blockDim.x) {
      const uint32_t row = i / kColumns, of_tile = i % kColumns;
      const uint32_t of_block = column + of_tile;
      if (first_ + of_block >= end_) continue;
      const float *from = shares + row * kPitch + of_tile;
      float sum = 0;
#pragma unroll 8
      for (uint32_t w = 0; w < sharing; w++) sum += from[w * kRows * kPitch];
      finish(p_, kDtype<T> == static_cast<Float>(p_.dtype) ? kDtype<T> : Float::kF32,
             first_row_ + row, first_ + of_block, sum * kUnitOfE4m3<Part> * scales_[of_block]);
    }
  }

  const Arguments &p_;
  const uint32_t warp_, lane_, warps_;
  // Columns and rows of x of the block, and its tiles.
  const uint32_t first_, end_, first_row_, tiles_;
  // Of the block's columns; the lane's part of the warp's slots; all warps' shares.
  float *const scales_;
  uint8_t *const ring_;
  float *const shares_;
  float acc_[kUnits][kEights][4] = {};
  uint32_t nan_[kUnits][2] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_E4M3(name, type, eights, units)                         \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)           \
      linear_e4m3_##name(const __grid_constant__ LinearE4m3Arguments params) { \
    unsloth::let_next_kernel_start();                                          \
    if (params.constant == 0) unsloth::await_previous_kernel();                \
    extern __shared__ uint4 dynamic[];                                         \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                     \
    unsloth::Rows<type, eights, units>(params, bytes).run();                   \
  }                                                                            \
  extern "C" __device__ const LinearE4m3Launch linear_e4m3_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                             \
      unsloth::Rows<type, eights, units>::kRows,                               \
      unsloth::Rows<type, eights, units>::kColumns,                            \
      unsloth::kStep,                                                          \
      unsloth::kSlots * unsloth::Rows<type, eights, units>::kSlotBytes +       \
          unsloth::Rows<type, eights, units>::kBuffers *                       \
              unsloth::Rows<type, eights, units>::kShareBytes,                 \
      unsloth::kThreads,                                                       \
      unsloth::kSharedBytes,                                                   \
  };
