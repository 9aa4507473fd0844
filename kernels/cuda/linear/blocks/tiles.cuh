// Rows of x by weights in blocks, from some rows on: bound by reading the weights, and by taking
// them apart.
//
// Codes become numbers of x's dtype in registers, without rounding, and tensor cores multiply them
// by x as it is. Sums of the neighbours that share a scale are scaled in f32, so that nothing is
// rounded but x, by whoever gave it.
//
// A warp has neighbouring rows of the weight (columns of the output) and all rows of x. Warps of a
// block have other columns, or every other of some steps along a row. A stage of shared memory has
// the rows of x of these steps and the bytes of the weight that the warps have of them, and is
// filled some stages ahead. Blocks of a cluster, where there are such, part a row of the weight
// among them, and add each other's sums; so do the warps, in one order.
#pragma once

#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/math.cuh"
#include "common/mma.cuh"
#include "common/vector.cuh"
#include "linear/blocks/arguments.h"
#include "linear/blocks/numbers.cuh"
#include "linear/epilogue.cuh"
#include "units.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "common/cluster.cuh"
#endif

namespace unsloth {

using Arguments = LinearBlocksArguments;

// Of a block, at most: threads, bytes of shared memory.
constexpr int kThreads = 512;
constexpr int kSharedBytes = 227 * 1024;

// `kEights`: rows of x, in eights.
template <Blocks kBlocks, class T, int kEights>
class Tiles {
 public:
  static constexpr int kRows = 8 * kEights;
  // Units of a warp, side by side, and their columns.
  static constexpr int kUnits = 1;
  static constexpr int kOfWarp = kUnits * kColumns;
  // Of a row of x and a step, of the units that a warp has of a step, and of its sums.
  static constexpr int kXBytes = Unit<kBlocks>::kWeights * 2 + 32;
  static constexpr int kSlotBytes = kUnits * Unit<kBlocks>::kSlotBytes;
  static constexpr int kSumsBytes = kRows * (kOfWarp + 4) * static_cast<int>(sizeof(float));

  __device__ __forceinline__ Tiles(const Arguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        warps_(blockDim.x / 32),
        across_(p.across),
        along_(warps_ / across_),
        part_(blockIdx.x % p.parts),
        first_(blockIdx.x / p.parts * p.columns_of_block),
        mine_(first_ + warp_ % across_ * kOfWarp),
        first_row_(blockIdx.y * kRows),
        begin_(p.steps * part_ / p.parts),
        end_(p.steps * (part_ + 1) / p.parts),
        weight_(p, lane_),
        shared_(shared),
        stage_bytes_(along_ * kRows * kPitch + warps_ * kUnits * U::kSlotBytes) {}

  __device__ __forceinline__ void run() {
    const uint32_t stages = (end_ - begin_ + along_ - 1) / along_;
    uint32_t asked = 0, to = 0;
    const auto ask = [&] {
      if (asked < stages) fill(shared_ + to * stage_bytes_, begin_ + asked * along_);
      commit_copies();
      asked++;
      to = to + 1 == p_.slots ? 0 : to + 1;
    };
    // The first turns of the loop only begin copies: of as many stages as there are slots.
    const uint32_t ahead = p_.slots;
    for (uint32_t i = 0, from = 0; i < stages + ahead; i++) {
      if (i >= ahead) {
        await_stage();
        // All threads' copies are there.
        __syncthreads();
        const uint32_t step = begin_ + (i - ahead) * along_ + warp_ / across_;
        if (step < end_) multiply(shared_ + from * stage_bytes_, step);
        from = from + 1 == p_.slots ? 0 : from + 1;
        // All have done with the stage that is filled next.
        if (asked < stages) __syncthreads();
      }
      ask();
    }
    await_copies<0>();
    __syncthreads();
    leave();
    add_shares();
  }

 private:
  using F = Format<kBlocks>;
  using U = Unit<kBlocks>;
  // Bytes of a row of x in a stage, of a step's: eight rows begin in different banks.
  static constexpr uint32_t kPitch = kXBytes;
  static constexpr uint32_t k32s = F::kLength / 32;
  // Blocks of a cluster, at most.
  static constexpr uint32_t kMostParts = 8;
  static constexpr uint32_t kParts = F::kGroup == 16 ? 2 : 1;
  static constexpr bool kHasOffsets =
      kHasScalesOfScales<kBlocks> || kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1;
  // Blocks that together begin at a word, where the first does.
  static constexpr uint32_t kAtOnce = F::kBytes % 4 == 0 || U::kCount == 1 ? 1 : 2;

  // Waits for the copies of the next stage: those of stages behind it may go on.
  __device__ __forceinline__ void await_stage() const {
    if (p_.slots == 4) {
      await_copies<3>();
    } else if (p_.slots == 3) {
      await_copies<2>();
    } else {
      await_copies<1>();
    }
  }

  __device__ __forceinline__ uint8_t *units_of(uint8_t *stage) const {
    return stage + along_ * kRows * kPitch + warp_ * kUnits * U::kSlotBytes;
  }

  // Starts to copy the steps from `first` on: the warp's units, and its share of x.
  __device__ __forceinline__ void fill(uint8_t *stage, uint32_t first) const {
    const uint32_t step = first + warp_ / across_;
    if (step < end_) {
      uint8_t *slot = units_of(stage);
#pragma unroll 1
      for (uint32_t i = 0; i < kUnits; i++) {
        const uint32_t columns = mine_ + i * kColumns;
        if (columns >= p_.out_features) break;
        copy(p_, slot + i * U::kSlotBytes, columns, step);
      }
    }
    for (uint32_t i = warp_; i < along_ * kRows; i += warps_) {
      // Rows that are not there are the last one again.
      const uint32_t row = min(first_row_ + i % kRows, p_.rows - 1);
      const uint32_t column = (first + i / kRows) * U::kWeights;
      const uint8_t *x = static_cast<const uint8_t *>(p_.x) + row * p_.x_stride;
#pragma unroll
      for (uint32_t at = 8 * lane_; at < U::kWeights; at += 8 * 32) {
        if (column + at >= p_.blocks * F::kLength) break;
        const uint8_t *eight = x + static_cast<uint64_t>(column + at) * 2;
        uint8_t *to = stage + i * kPitch + at * 2;
        if (p_.x_aligned == 2) {
          start_copy(to, eight);
        } else {
#pragma unroll
          for (uint32_t j = 0; j < 16; j += 2) {
            *reinterpret_cast<uint16_t *>(to + j) = *reinterpret_cast<const uint16_t *>(eight + j);
          }
        }
      }
    }
  }

  // Apart, so that what it computes takes no registers from products.
  static __device__ __noinline__ void copy(const Arguments &p, uint8_t *slot, uint32_t columns,
                                           uint32_t step) {
    const uint32_t there = min(p.out_features - columns, static_cast<uint32_t>(kColumns));
    Units<kBlocks>(p, threadIdx.x % 32).copy(slot, columns, there, step);
  }

  __device__ __forceinline__ void multiply(uint8_t *stage, uint32_t step) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *slot = units_of(stage);
    const uint8_t *rows[kUnits][2];
#pragma unroll
    for (uint32_t i = 0; i < kUnits; i++) {
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        rows[i][h] =
            weight_.row_of(slot + i * U::kSlotBytes, mine_ + i * kColumns, g + 8 * h, step);
      }
    }
    const uint8_t *x = stage + (warp_ / across_ * kRows + g) * kPitch + t * 8;
    const uint32_t count = weight_.count(step);
    if (count != U::kCount) {
#pragma unroll 1
      for (uint32_t i = 0; i < count; i++) multiply_blocks<false, 1>(rows, i, x);
    } else if (weight_.are_lines()) {
#pragma unroll 1
      for (uint32_t i = 0; i < U::kCount; i += kAtOnce) multiply_blocks<true, kAtOnce>(rows, i, x);
    } else {
#pragma unroll 1
      for (uint32_t i = 0; i < U::kCount; i += kAtOnce) multiply_blocks<false, kAtOnce>(rows, i, x);
    }
  }

  // Blocks of the unit from `first` on.
  template <bool kRowAligned, uint32_t kCount>
  __device__ __forceinline__ void multiply_blocks(const uint8_t *const (&rows)[kUnits][2],
                                                  uint32_t first, const uint8_t *x) {
    const uint32_t at = first * F::kBytes;
    x += first * F::kLength * 2;
#pragma unroll(F::kLength == 256 && F::kGroup != 16 ? 2 : 8)
    for (uint32_t i = 0; i < kCount * k32s; i++) {
      multiply_32<kRowAligned>(rows, at, i, x + i * 64);
    }
  }

  // The 32 neighbours `i` of the blocks from byte `at` on.
  template <bool kRowAligned>
  __device__ __forceinline__ void multiply_32(const uint8_t *const (&rows)[kUnits][2], uint32_t at,
                                              uint32_t i, const uint8_t *x) {
    using Bytes = Staged<F::kAlignment, kRowAligned>;
    const uint32_t t = lane_ % 4, j = i % k32s;
    // As the left-hand side of two products.
    uint32_t codes[kUnits][2][4];
    Factors by[kUnits][2][kParts];
#pragma unroll
    for (uint32_t u = 0; u < kUnits; u++) {
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *row = rows[u][h] + at;
        const Bytes block = {row, i / k32s * F::kBytes};
        left_hand_sides<kBlocks, T, Bytes>(row, i, t, h, codes[u]);
#pragma unroll
        for (uint32_t part = 0; part < kParts; part++) {
          by[u][h][part] = factors(block, j * 32 / F::kGroup + part);
        }
      }
    }
#pragma unroll
    for (uint32_t f = 0; f < kEights; f++) {
      uint32_t of_x[2][2];
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const uint2 four = *reinterpret_cast<const uint2 *>(x + f * 8 * kPitch + half * 32);
        of_x[half][0] = four.x, of_x[half][1] = four.y;
      }
      // Sums of x, in every row: products by ones.
      float sums[4] = {};
      if constexpr (kHasOffsets) {
        constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        mma<T>(ones, of_x[0], sums);
        mma<T>(ones, of_x[1], sums);
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnits; u++) {
        float products[kParts][4] = {};
        mma<T>(codes[u][0], of_x[0], products[0]);
        mma<T>(codes[u][1], of_x[1], products[kParts - 1]);
#pragma unroll
        for (uint32_t part = 0; part < kParts; part++) {
#pragma unroll
          for (uint32_t e = 0; e < 4; e++) {
            float &sum = acc_[u][f][e];
            const Factors &factors = by[u][e / 2][part];
            sum = fmaf(factors.scale, products[part][e], sum);
            if constexpr (kHasOffsets) sum = fmaf(factors.offset, sums[e], sum);
          }
        }
      }
    }
  }

  template <class Block>
  static __device__ __forceinline__ Factors factors(const Block &block, uint32_t group) {
    const auto half = [&](int at) { return block.half(at); };
    const auto byte = [&](int at) { return block.byte(at); };
    if constexpr (kHasScalesOfScales<kBlocks>) {
      return scaled_scales(half, byte, group);
    } else {
      return factors_of<kBlocks>(half, byte, group);
    }
  }

  // Floats of a row of x in the shares: four rows of lanes are in different banks.
  __device__ __forceinline__ uint32_t pitch() const { return p_.columns_of_block + 4; }

  // Puts what the warp has where others add it: [warp along a row][row of x][column].
  __device__ __forceinline__ void leave() const {
    float *to = reinterpret_cast<float *>(shared_) + warp_ / across_ * kRows * pitch() +
                warp_ % across_ * kOfWarp;
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (uint32_t u = 0; u < kUnits; u++) {
#pragma unroll
      for (uint32_t f = 0; f < kEights; f++) {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
          to[(8 * f + 2 * t + e % 2) * pitch() + u * kColumns + g + e / 2 * 8] = acc_[u][f][e];
        }
      }
    }
  }

  // Adds the shares of all blocks that have these columns: a lane those of four neighbours, a warp
  // those of 128 outputs.
  __device__ __forceinline__ void add_shares() const {
    const float *shares = reinterpret_cast<const float *>(shared_);
    const uint32_t there = min(p_.rows - first_row_, static_cast<uint32_t>(kRows));
    const uint32_t of_row = p_.columns_of_block / 4, share = kRows * pitch();
    sync();
    const uint32_t step = p_.parts * blockDim.x;
    for (uint32_t i = part_ * blockDim.x + threadIdx.x; i < there * of_row; i += step) {
      const uint32_t row = i / of_row, column = i % of_row * 4;
      const float *at = shares + row * pitch() + column;
      float4 sum = {};
      for (uint32_t j = 0; j < along_; j++) {
        float4 of_parts[kMostParts] = {};
        // All at once, as another block's are slow to come.
#pragma unroll
        for (uint32_t part = 0; part < kMostParts; part++) {
          if (part < p_.parts) of_parts[part] = load(at + j * share, part);
        }
#pragma unroll
        for (uint32_t part = 0; part < kMostParts; part++) {
          sum.x += of_parts[part].x, sum.y += of_parts[part].y;
          sum.z += of_parts[part].z, sum.w += of_parts[part].w;
        }
      }
      const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll 1
      for (uint32_t j = 0; j < 4 && first_ + column + j < p_.out_features; j++) {
        const float of = j == 0 ? sums[0] : j == 1 ? sums[1] : j == 2 ? sums[2] : sums[3];
        finish(p_, kDtype<T> == static_cast<Float>(p_.dtype) ? kDtype<T> : Float::kF32,
               first_row_ + row, first_ + column + j, of);
      }
    }
    // Nobody ends while others read.
    if (p_.parts != 1) sync();
  }

  // Four floats of a block of the cluster; there is one without clusters.
  __device__ __forceinline__ float4 load(const float *at, uint32_t part) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (p_.parts != 1) return load_from_peer(peer_address(at, part));
#endif
    return *reinterpret_cast<const float4 *>(at);
  }

  __device__ __forceinline__ void sync() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (p_.parts != 1) return cluster_sync();
#endif
    __syncthreads();
  }

  const Arguments &p_;
  const uint32_t warp_, lane_, warps_;
  // Warps side by side, and along a row of the weight.
  const uint32_t across_, along_;
  // Of a row, and columns and rows of x of the block; columns of the warp.
  const uint32_t part_, first_, mine_, first_row_;
  // Steps of the block's part of a row.
  const uint32_t begin_, end_;
  const Units<kBlocks> weight_;
  uint8_t *const shared_;
  const uint32_t stage_bytes_;
  float acc_[kUnits][kEights][4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_BLOCKS_TILES_OF(name, blocks, type, eights)                 \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)               \
      linear_blocks_##name(const __grid_constant__ LinearBlocksArguments params) { \
    unsloth::let_next_kernel_start();                                              \
    unsloth::await_previous_kernel();                                              \
    extern __shared__ uint4 dynamic[];                                             \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                         \
    unsloth::Tiles<unsloth::Blocks::blocks, type, eights>(params, bytes).run();    \
  }                                                                                \
  extern "C" __device__ const LinearBlocksLaunch linear_blocks_##name##_launch = { \
      static_cast<int32_t>(unsloth::Blocks::blocks),                               \
      static_cast<int32_t>(unsloth::kDtype<type>),                                 \
      8 * eights,                                                                  \
      unsloth::Tiles<unsloth::Blocks::blocks, type, eights>::kOfWarp,              \
      unsloth::Unit<unsloth::Blocks::blocks>::kWeights,                            \
      unsloth::Tiles<unsloth::Blocks::blocks, type, eights>::kSlotBytes,           \
      unsloth::Tiles<unsloth::Blocks::blocks, type, eights>::kXBytes,              \
      unsloth::Tiles<unsloth::Blocks::blocks, type, eights>::kSumsBytes,           \
      unsloth::kThreads,                                                           \
      unsloth::kSharedBytes,                                                       \
  };

#define UNSLOTH_LINEAR_BLOCKS_TILES(name, blocks)                          \
  UNSLOTH_LINEAR_BLOCKS_TILES_OF(name##_bf16_16, blocks, __nv_bfloat16, 2) \
  UNSLOTH_LINEAR_BLOCKS_TILES_OF(name##_bf16_32, blocks, __nv_bfloat16, 4) \
  UNSLOTH_LINEAR_BLOCKS_TILES_OF(name##_f16_16, blocks, __half, 2)         \
  UNSLOTH_LINEAR_BLOCKS_TILES_OF(name##_f16_32, blocks, __half, 4)
