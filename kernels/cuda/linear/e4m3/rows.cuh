// Up to some rows of x by weights that are 8-bit floats (e4m3) with scales apart, both as they are:
// bound by reading the weights.
//
// Codes become numbers of x's dtype in registers, without rounding, and tensor cores multiply them
// by x. An x of f32 is the sum of three numbers of bf16, each multiplied by the codes: nothing is
// rounded but sums. A scale multiplies a sum at its end.
//
// Neighbouring rows of the weight (columns of the output) are a tile. Blocks take one tile after
// another, all blocks together neighbouring ones: memory is read from one end to the other. The
// steps of a block's tiles, 128 bytes of each row, are dealt out to its warps by turns. A lane
// multiplies the bytes that it copied itself, some steps ahead, into its own part of shared memory,
// so that nobody waits for others before a tile's end; which elements a lane has is free, as long
// as those of x lie at equal places. Shares of a tile are added in the order of warps.
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
  static constexpr uint32_t kParts = Neighbours<T>::kParts;
  static constexpr uint32_t kColumns = 16 * kUnits;
  // Of a warp: its ring, what it copies in a step, and its share of a tile.
  static constexpr uint32_t kSlots = kUnits == 1 ? 3 : 2;
  static constexpr uint32_t kSlotBytes = kColumns * kStep;
  static constexpr uint32_t kPitch = kColumns + 4;
  static constexpr uint32_t kShareBytes = kRows * kPitch * sizeof(float);
  // One tile's shares are added while the next is computed, if there is room for both.
  static constexpr uint32_t kBuffers = kEights == 1 ? 2 : 1;
  // Whether x is loaded while its codes are on their way, and scales before their tile: if there
  // are registers for it.
  static constexpr bool kAhead = kEights <= (kParts == 1 ? 2 : 1);
  static constexpr bool kScalesAhead = kParts == 1;
  // Sums of a number of the tile, so that not every product waits for the one before.
  static constexpr uint32_t kChains = kEights == 1 && kParts == 1 ? 2 : 1;

  __device__ __forceinline__ Rows(const Arguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        warps_(blockDim.x / 32),
        first_row_(blockIdx.y * kRows),
        whole_steps_(p.aligned != 0 ? p.in_features / kStep : 0),
        x_steps_(p.x_aligned != 0 ? p.in_features / kStep : 0),
        ring_(shared + warp_ * kSlots * kSlotBytes + lane_ * kLine),
        shares_(reinterpret_cast<float *>(shared + warps_ * kSlots * kSlotBytes)) {}

  __device__ __forceinline__ void run() {
    const uint32_t first = blockIdx.x * kColumns, tiles = gridDim.x * kColumns;
    // Where the warp's next step is that it has not asked for.
    uint32_t column = warp_ < p_.steps ? first : p_.out_features, step = warp_, to = 0;
    const auto ask = [&] {
      if (column < p_.out_features) {
        fill(ring_ + to * kSlotBytes, column, step);
        step += warps_;
        if (step >= p_.steps) step = warp_, column += tiles;
      }
      commit_copies();
      to = to + 1 == kSlots ? 0 : to + 1;
    };
    // The last slot is asked for behind the first of x, which would come that much later.
    for (uint32_t i = 0; i + 1 < kSlots; i++) ask();
    // No more was read than a constant weight.
    await_previous_kernel();
    uint32_t slot = 0, buffer = 0;
#pragma unroll 1
    for (uint32_t tile = first; tile < p_.out_features; tile += tiles) {
      // Behind the tile's end it would be waited for.
      float scale = kScalesAhead ? scale_of(tile + threadIdx.x % kColumns) : 0;
#pragma unroll 1
      for (uint32_t i = warp_; i < p_.steps; i += warps_) {
        Neighbours<T> x[kAhead ? kEights : 1][2];
        if (kAhead) {
#pragma unroll
          for (uint32_t e = 0; e < kEights; e++) load<2>(x[e], e, i, 0);
        }
        ask();
        await_copies<kSlots - 1>();
        multiply(ring_ + slot * kSlotBytes, i, x);
        slot = slot + 1 == kSlots ? 0 : slot + 1;
      }
      float *shares = shares_ + buffer * warps_ * kRows * kPitch;
      leave(shares + warp_ * kRows * kPitch);
      __syncthreads();
      if (!kScalesAhead) scale = scale_of(tile + threadIdx.x % kColumns);
      add(shares, tile, scale);
      if (kBuffers == 1) __syncthreads();
      buffer = kBuffers - 1 - buffer;
    }
  }

 private:
  // f32 is multiplied in parts.
  using Part = std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>;

  // Of a column that may not be there.
  __device__ __forceinline__ float scale_of(uint32_t column) const {
    if (p_.weight_scale == nullptr || column >= p_.out_features) return 1;
    return p_.weight_scale[p_.rows_of_scale == 1 ? column : column / p_.rows_of_scale];
  }

  // Starts to copy what a lane has of a step: of each eight columns the row of its own, there from
  // 16 t on and from 64 + 16 t on.
  __device__ __forceinline__ void fill(uint8_t *to, uint32_t tile, uint32_t step) const {
    const uint32_t column = tile + lane_ / 4, at = step * kStep + lane_ % 4 * kLine;
    const uint8_t *from = p_.weight + column * p_.weight_stride + at;
    const int64_t eight = 8 * p_.weight_stride;
    if (step < whole_steps_ && tile + kColumns <= p_.out_features) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * kUnits; i++) {
        start_copy(to + 2 * i * 32 * kLine, from);
        start_copy(to + (2 * i + 1) * 32 * kLine, from + 64);
        from += eight;
      }
      return;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < 4 * kUnits; i++) {
      if (column + i / 2 * 8 >= p_.out_features) break;
      gather(to + i * 32 * kLine, from + i / 2 * eight + i % 2 * 64, at + i % 2 * 64);
    }
  }

  // A byte at a time, if it must be, and zeros behind a row's end.
  __device__ __forceinline__ void gather(uint8_t *to, const uint8_t *from, uint32_t at) const {
    if (p_.aligned != 0 && at + kLine <= p_.in_features) {
      start_copy(to, from);
      return;
    }
    uint32_t words[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < kLine; i++) {
      if (at + i < p_.in_features) words[i / 4] |= static_cast<uint32_t>(from[i]) << i % 4 * 8;
    }
    *reinterpret_cast<uint4 *>(to) = {words[0], words[1], words[2], words[3]};
  }

  // What multiplies a lane's lines of a step from line `first` on, of the row of `eight` that is
  // the lane's.
  template <uint32_t kCount>
  __device__ __forceinline__ void load(Neighbours<T> *x, uint32_t eight, uint32_t step,
                                       uint32_t first) const {
    // Rows that are not there are the last one again.
    const uint32_t row = min(first_row_ + 8 * eight + lane_ / 4, p_.rows - 1);
    const uint32_t at = step * kStep + 64 * first + lane_ % 4 * kLine;
    const T *from =
        reinterpret_cast<const T *>(static_cast<const uint8_t *>(p_.x) + row * p_.x_stride) + at;
    if (step < x_steps_) {
#pragma unroll
      for (uint32_t j = 0; j < kCount; j++) x[j].load(from + 64 * j);
      return;
    }
#pragma unroll
    for (uint32_t j = 0; j < kCount; j++) {
#pragma unroll
      for (uint32_t i = 0; i < kLine; i++) {
        const uint32_t element = 64 * j + i;
        x[j].set(i, at + element < p_.in_features ? from[element] : static_cast<T>(0.0f));
      }
    }
  }

  __device__ __forceinline__ void multiply(const uint8_t *lines, uint32_t step,
                                           Neighbours<T> (&of)[kAhead ? kEights : 1][2]) {
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      Neighbours<T> x[kEights];
#pragma unroll
      for (uint32_t e = 0; e < kEights; e++) {
        if (kAhead) {
          x[e] = of[e][j];
        } else {
          load<1>(&x[e], e, step, j);
        }
      }
      uint4 line[kUnits][2];
#pragma unroll
      for (uint32_t i = 0; i < 2 * kUnits; i++) {
        const uint8_t *from = lines + (2 * i + j) * 32 * kLine;
        line[i / 2][i % 2] = *reinterpret_cast<const uint4 *>(from);
      }
      // In f32 apart from what there is, as a tensor core rounds its sums down.
      float sums[kUnits][kEights][4] = {};
#pragma unroll
      for (uint32_t w = 0; w < 4; w++) {
        uint32_t parts[kEights][kParts][2];
#pragma unroll
        for (uint32_t e = 0; e < kEights; e++) x[e].four(w, parts[e]);
#pragma unroll
        for (uint32_t u = 0; u < kUnits; u++) {
          uint32_t codes[4];
#pragma unroll
          for (uint32_t h = 0; h < 2; h++) {
            const uint32_t four = word(line[u][h], w);
            nan_[u][h] |= lost_nan_of_e4m3(four);
            uint32_t pairs[2];
            pairs_of_e4m3<Part>(four, pairs);
            codes[h] = pairs[0], codes[2 + h] = pairs[1];
          }
#pragma unroll
          for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
            for (uint32_t part = 0; part < kParts; part++) {
              mma<Part>(codes, parts[e][part], kParts == 1 ? acc_[w % kChains][u][e] : sums[u][e]);
            }
          }
        }
      }
      if constexpr (kParts > 1) {
#pragma unroll
        for (uint32_t u = 0; u < kUnits; u++) {
#pragma unroll
          for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) acc_[0][u][e][i] += sums[u][e][i];
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
        bool is_nan = false;
        if constexpr (!kConvertsE4m3) {
          // Of the row's codes that the four lanes have.
          uint32_t nan = nan_[u][h];
          nan |= __shfl_xor_sync(0xffffffff, nan, 1);
          nan |= __shfl_xor_sync(0xffffffff, nan, 2);
          is_nan = (nan & kNanOfE4m3) != 0;
          nan_[u][h] = 0;
        }
#pragma unroll
        for (uint32_t e = 0; e < kEights; e++) {
#pragma unroll
          for (uint32_t i = 0; i < 2; i++) {
            float sum = 0;
#pragma unroll
            for (uint32_t chain = 0; chain < kChains; chain++) {
              float &part = acc_[chain][u][e][2 * h + i];
              sum += part;
              part = 0;
            }
            const uint32_t row = 8 * e + lane_ % 4 * 2 + i, column = 16 * u + 8 * h + lane_ / 4;
            share[row * kPitch + column] = is_nan ? __uint_as_float(0x7fc00000) : sum;
          }
        }
      }
    }
  }

  // Adds the shares of the tile from `first` on, and stores their sums. A thread's are all of the
  // column whose scale it has.
  __device__ __forceinline__ void add(const float *shares, uint32_t first, float scale) const {
    const uint32_t column = first + threadIdx.x % kColumns;
    if (column >= p_.out_features) return;
    const uint32_t there = min(p_.rows - first_row_, kRows), sharing = min(warps_, p_.steps);
    for (uint32_t row = threadIdx.x / kColumns; row < there; row += blockDim.x / kColumns) {
      const float *from = shares + row * kPitch + threadIdx.x % kColumns;
      float sum = 0;
#pragma unroll 8
      for (uint32_t w = 0; w < sharing; w++) sum += from[w * kRows * kPitch];
      finish(p_, kDtype<T> == static_cast<Float>(p_.dtype) ? kDtype<T> : Float::kF32,
             first_row_ + row, column, sum * kUnitOfE4m3<Part> * scale);
    }
  }

  const Arguments &p_;
  const uint32_t warp_, lane_, warps_;
  // Of x.
  const uint32_t first_row_;
  // Steps that are whole, and lie at whole lines, in the weight and in x.
  const uint32_t whole_steps_, x_steps_;
  // The lane's part of the warp's slots; all warps' shares.
  uint8_t *const ring_;
  float *const shares_;
  float acc_[kChains][kUnits][kEights][4] = {};
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
      unsloth::Rows<type, eights, units>::kSlots *                             \
              unsloth::Rows<type, eights, units>::kSlotBytes +                 \
          unsloth::Rows<type, eights, units>::kBuffers *                       \
              unsloth::Rows<type, eights, units>::kShareBytes,                 \
      unsloth::kThreads,                                                       \
      unsloth::kSharedBytes,                                                   \
  };
