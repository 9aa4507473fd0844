// Up to eight rows of x by weights in blocks, both as they are, each warp with the x of one step of
// the rows in its registers.
//
// A step is 512 neighbouring weights of a row. A warp has one step for the whole launch, and takes
// that part of one tile of 16 rows after another: so a block reads whole rows, which lie one behind
// the other, no x is staged, and no warp waits for others before its first product. The bytes come
// by bulk copies into a ring of the warp. A row of more steps than a block has warps is parted
// between the blocks of a cluster. Shares of a tile are added in the order of its steps.
#pragma once

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "linear/blocks/numbers.cuh"
#include "linear/blocks/units.cuh"
#include "linear/epilogue.cuh"
#include "linear/steps/arguments.h"

namespace unsloth {

// Of a block, at most: threads, bytes of shared memory.
constexpr int kThreads = 512;
constexpr int kSharedBytes = 227 * 1024;

// Bytes of a step in shared memory.
template <Blocks kBlocks>
struct Step {
  using F = Format<kBlocks>;
  static constexpr int kWeights = 512;
  static constexpr int kBytes = kWeights / F::kLength * F::kBytes;
  // Whether it begins with a line of 16 bytes; else it may touch one more.
  static constexpr bool kIsLines = kBytes % 16 == 0;
  static constexpr int kMostLines = kIsLines ? kBytes / 16 : (kBytes + 14 + 15) / 16;
  // Odd, so that the same word of eight rows lies in different banks.
  static constexpr int kPitch = (kMostLines / 2 * 2 + 1) * 16;
  static constexpr int kSlotBytes = kColumns * kPitch;
};

template <Blocks kBlocks, class T>
class Steps {
 public:
  static constexpr int kRows = 8;

  __device__ __forceinline__ Steps(const LinearStepsArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        across_(warp_ % p.across),
        part_(blockIdx.x % p.parts),
        first_(blockIdx.x / p.parts * p.columns),
        end_(min(first_ + p.columns, p.out_features)),
        tiles_((end_ - first_ + kColumns - 1) / kColumns),
        step_(part_ * p.along + warp_ / p.across) {
    const uint32_t warps = p.across * p.along;
    ring_ = shared + warp_ * p.slots * S::kSlotBytes;
    uint8_t *rest = shared + warps * p.slots * S::kSlotBytes;
    full_ = reinterpret_cast<Mbarrier *>(rest) + warp_ * p.slots;
    const uint32_t barriers = warps * p.slots * static_cast<uint32_t>(sizeof(Mbarrier));
    shares_ = reinterpret_cast<float *>(rest + (barriers + 15) / 16 * 16);
    const uint32_t begin = step_ * S::kBytes;
    const uint32_t end = min(begin + S::kBytes, p.blocks * F::kBytes);
    begin_ = begin / 16 * 16;
    size_ = (end + 15) / 16 * 16 - begin_;
    const uint32_t blocks = p.blocks * k32s, before = step_ * kCount;
    count_ = before < blocks ? min(blocks - before, static_cast<uint32_t>(kCount)) : 0;
  }

  __device__ __forceinline__ void run() {
    if (lane_ == 0) {
      for (uint32_t i = 0; i < p_.slots; i++) full_[i].init(1);
      fence_mbarrier_init();
    }
    __syncwarp();
    const bool has_step = step_ < p_.steps;
    if (has_step) {
      for (uint32_t i = 0; i < p_.slots; i++) fill(across_ + i * p_.across, i);
    }
    // No more was read than a constant weight.
    await_previous_kernel();
    load_x();
    // The other blocks' shared memory is there from here on.
    if (p_.parts != 1) cluster_sync();
    uint32_t buffer = 0;
    for (uint32_t base = 0; base < tiles_; base += of_round()) {
      const uint32_t until = min(base + of_round(), tiles_);
      if (has_step) {
#pragma unroll 1
        for (uint32_t tile = base + across_; tile < until; tile += p_.across) {
          take(tile, tile - base, buffer);
        }
      }
      sync();
      // Shares of the next round go to the other buffer meanwhile.
      add_shares(buffer, base, until);
      buffer ^= 1;
    }
  }

 private:
  using F = Format<kBlocks>;
  using S = Step<kBlocks>;
  using Bytes = Staged<F::kAlignment, S::kBytes % 4 == 0>;
  static constexpr uint32_t k32s = F::kLength / 32;
  // Of a step, in blocks of 32.
  static constexpr int kCount = S::kWeights / 32;
  static constexpr uint32_t kParts = F::kGroup == 16 ? 2 : 1;
  static constexpr bool kHasOffsets =
      kHasScalesOfScales<kBlocks> || kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1;
  // Of a tile.
  static constexpr uint32_t kOutputs = kColumns * kRows;

  // Tiles between two additions of shares.
  __device__ __forceinline__ uint32_t of_round() const { return p_.tiles_of_round * p_.across; }

  __device__ __forceinline__ void sync() const {
    if (p_.parts != 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // Starts to copy the step's part of a tile, a row by each lane.
  __device__ __forceinline__ void fill(uint32_t tile, uint32_t slot) const {
    if (tile >= tiles_) return;
    const uint32_t columns = first_ + tile * kColumns;
    const uint32_t there = min(end_ - columns, static_cast<uint32_t>(kColumns));
    if (lane_ == 0) full_[slot].arrive_expect(there * size_);
    __syncwarp();
    if (lane_ < there) {
      bulk_load_by_thread(shared_address(ring_ + slot * S::kSlotBytes + lane_ * S::kPitch),
                          p_.weight + (columns + lane_) * p_.weight_stride + begin_, size_,
                          &full_[slot]);
    }
  }

  // The step of all rows of x: lane 4 g + t has of row g neighbours 4 t to 4 t + 3 and 16 + 4 t to
  // 16 + 4 t + 3 of each 32. What is not there is zero.
  __device__ __forceinline__ void load_x() {
    const uint32_t row = lane_ / 4, t = lane_ % 4;
    const uint8_t *x = static_cast<const uint8_t *>(p_.x) +
                       static_cast<int64_t>(min(row, p_.rows - 1)) * p_.x_stride +
                       static_cast<uint64_t>(step_) * S::kWeights * 2 + t * 8;
#pragma unroll
    for (uint32_t i = 0; i < kCount; i++) {
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        uint2 four = {0, 0};
        if (row < p_.rows && i < count_) {
          four = *reinterpret_cast<const uint2 *>(x + i * 64 + half * 32);
        }
        x_[i][half][0] = four.x, x_[i][half][1] = four.y;
      }
    }
  }

  // Takes the warp's part of a tile, and leaves its share with the block that adds the tile's.
  __device__ __forceinline__ void take(uint32_t tile, uint32_t in_round, uint32_t buffer) {
    full_[slot_].wait(parity_);
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *slot = ring_ + slot_ * S::kSlotBytes + step_ * S::kBytes % 16;
    const uint8_t *rows[2] = {slot + g * S::kPitch, slot + (g + 8) * S::kPitch};
    float acc[4] = {};
    if (count_ == kCount) {
      multiply<true>(rows, acc);
    } else {
      multiply<false>(rows, acc);
    }
    // All lanes have read the slot.
    __syncwarp();
    fill(tile + p_.slots * p_.across, slot_);
    if (++slot_ == p_.slots) slot_ = 0, parity_ ^= 1;

    float *share = shares_of(buffer, in_round / p_.parts) + step_ * kOutputs;
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
      float *to = share + (2 * t + e % 2) * kColumns + g + e / 2 * 8;
      if (p_.parts != 1) {
        store_to_peer(peer_address(to, in_round % p_.parts), acc[e]);
      } else {
        *to = acc[e];
      }
    }
  }

  // [step][row of x][column] of a tile of the round, of those that one block adds.
  __device__ __forceinline__ float *shares_of(uint32_t buffer, uint32_t tile) const {
    const uint32_t of_block = (of_round() + p_.parts - 1) / p_.parts;
    return shares_ + (buffer * of_block + tile) * p_.parts * p_.along * kOutputs;
  }

  __device__ __forceinline__ void add_shares(uint32_t buffer, uint32_t base, uint32_t until) const {
    const uint32_t there = until - base;
    const uint32_t mine = there > part_ ? (there - part_ + p_.parts - 1) / p_.parts : 0;
    for (uint32_t i = threadIdx.x; i < mine * kOutputs; i += blockDim.x) {
      const uint32_t tile = i / kOutputs, output = i % kOutputs;
      const uint32_t row = output / kColumns;
      const uint32_t column =
          first_ + (base + tile * p_.parts + part_) * kColumns + output % kColumns;
      if (row >= p_.rows || column >= end_) continue;
      const float *from = shares_of(buffer, tile) + output;
      float sum = 0;
#pragma unroll 8
      for (uint32_t s = 0; s < p_.steps; s++) sum += from[s * kOutputs];
      finish(p_, static_cast<Float>(p_.dtype), row, column, sum);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void multiply(const uint8_t *const (&rows)[2], float (&acc)[4]) const {
    // Of four groups of the block at hand, whose scales of scales are taken apart but once.
    uint32_t scales[2], offsets[2];
    float scale[2], offset[2];
#pragma unroll
    for (uint32_t i = 0; i < kCount; i++) {
      if (!kWhole && i >= count_) break;
      const uint32_t j = i % k32s;
      uint32_t codes[2][4];
      Factors by[2][kParts];
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const Bytes block = {rows[h], i / k32s * F::kBytes};
        left_hand_sides<kBlocks, T, Bytes>(rows[h], i, lane_ % 4, h, codes);
        if constexpr (kHasScalesOfScales<kBlocks>) {
          by[h][0] = ScalesOfScales(block).of(j);
        } else {
          const auto half = [&](int at) { return block.half(at); };
          const auto byte = [&](int at) { return block.byte(at); };
#pragma unroll
          for (uint32_t part = 0; part < kParts; part++) {
            by[h][part] = factors_of<kBlocks>(half, byte, j * 32 / F::kGroup + part);
          }
        }
      }
      // Sums of x, in every row: products by ones.
      float sums[4] = {};
      if constexpr (kHasOffsets) {
        constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        mma<T>(ones, x_[i][0], sums);
        mma<T>(ones, x_[i][1], sums);
      }
      float products[kParts][4] = {};
      mma<T>(codes[0], x_[i][0], products[0]);
      mma<T>(codes[1], x_[i][1], products[kParts - 1]);
#pragma unroll
      for (uint32_t part = 0; part < kParts; part++) {
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
          const Factors &factors = by[e / 2][part];
          acc[e] = fmaf(factors.scale, products[part][e], acc[e]);
          if constexpr (kHasOffsets) acc[e] = fmaf(factors.offset, sums[e], acc[e]);
        }
      }
    }
  }

  const LinearStepsArguments &p_;
  // Columns of the cluster begin at `first_`; tiles are counted from there.
  const uint32_t warp_, lane_, across_, part_, first_, end_, tiles_, step_;
  uint8_t *ring_;
  Mbarrier *full_;
  float *shares_;
  // The step of a row of the weight: where its lines begin, their bytes, and blocks of 32.
  uint32_t begin_, size_, count_;
  uint32_t slot_ = 0, parity_ = 0;
  uint32_t x_[kCount][2][2];
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_STEPS_OF(name, blocks, type)                              \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)             \
      linear_steps_##name(const __grid_constant__ LinearStepsArguments params) { \
    unsloth::let_next_kernel_start();                                            \
    if (params.constant == 0) unsloth::await_previous_kernel();                  \
    extern __shared__ uint4 dynamic[];                                           \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                       \
    unsloth::Steps<unsloth::Blocks::blocks, type>(params, bytes).run();          \
  }                                                                              \
  extern "C" __device__ const LinearStepsLaunch linear_steps_##name##_launch = { \
      static_cast<int32_t>(unsloth::Blocks::blocks),                             \
      static_cast<int32_t>(unsloth::kDtype<type>),                               \
      unsloth::Steps<unsloth::Blocks::blocks, type>::kRows,                      \
      unsloth::Step<unsloth::Blocks::blocks>::kWeights,                          \
      unsloth::Step<unsloth::Blocks::blocks>::kSlotBytes,                        \
      unsloth::kThreads,                                                         \
      unsloth::kSharedBytes,                                                     \
  };

#define UNSLOTH_LINEAR_STEPS(name, blocks)                    \
  UNSLOTH_LINEAR_STEPS_OF(name##_bf16, blocks, __nv_bfloat16) \
  UNSLOTH_LINEAR_STEPS_OF(name##_f16, blocks, __half)
