// Many rows of x, of 16 bits, by weights of fewer bits that are read as they are: bound by
// products.
//
// 128 rows of the weight become numbers of x's dtype in registers (`Weight`: e4m3.cuh, blocks.cuh),
// and are the left-hand side of wgmma; x is the right-hand side, in shared memory. A warp copies
// both into rings. Each of two warpgroups has 64 rows of the weight and the sums of all rows of x
// of the tile. It takes half a step of the weight apart while tensor cores multiply the one before.
// A block takes one tile after another: while its warps store a tile's sums, the next one's first
// steps are copied. Blocks of a cluster, which have one tile, part a row of the weight among them,
// and each adds up the sums of some of the rows of x.
#pragma once

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/registers.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "common/wgmma.cuh"
#include "linear/epilogue.cuh"
#include "linear/wide/arguments.h"
#include "linear/wide/weight.cuh"

namespace unsloth {

using Arguments = LinearWideArguments;

// Rows of the weight of a tile: columns of the output.
constexpr int kColumns = 128;
// Threads that multiply, and all.
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
// Rows of x up to which blocks of a cluster give each other all their sums.
constexpr int kFewRows = 64;
// Blocks of a multiprocessor: of few rows two, so that one's start and end are beside the other's
// products. For 8-bit floats there are too few registers then.
template <class Weight, int kRows>
constexpr int kBlocks = kRows <= kFewRows && !Weight::kHasScales ? 2 : 1;

// Bytes of a block's rings at most: beside them are barriers, and sums on their way to be stored.
template <class Weight, int kRows>
constexpr int kRoom = (kBlocks<Weight, kRows> == 2 ? 101 : 215) * 1024;
// Of x, stages at most.
template <class Weight, int kRows>
constexpr int kMostX = kRows == 256                  ? 5
                       : kRows == 128                ? 8
                       : kBlocks<Weight, kRows> == 1 ? 10
                       : kRows == 64                 ? 6
                                                     : 12;

template <class Weight, int kRows>
struct alignas(1024) SharedTiles {
  static constexpr int kXBytes = kRows * kHalf * 2, kWeightBytes = kColumns * Weight::kPitch;
  // Stages of both rings: of the weight, at least two and as many as there is room for.
  static constexpr int stages_of_x() {
    int stages = kMostX<Weight, kRows>;
    while (kRoom<Weight, kRows> - stages * kXBytes < 2 * kWeightBytes) stages--;
    return stages;
  }
  static constexpr int kX = stages_of_x();
  static constexpr int kFit = (kRoom<Weight, kRows> - kX * kXBytes) / kWeightBytes;
  static constexpr int kWeight = kFit < 8 ? kFit : 8;
  static_assert(kX >= 2, "one is copied while one is multiplied");
  union {
    struct {
      uint8_t x[kX][kXBytes];
      uint8_t weight[kWeight][kWeightBytes];
    };
    // Sums as threads have them, by rows of x: of few rows all, of many half.
    float4 shares[kRows / (kRows <= kFewRows ? 8 : 16)][kConsumers];
  };
  // Rows of a warp's sums on their way to be stored: even and odd ones are in different banks.
  static constexpr int kLeaving = 16, kLeavingPitch = 20;
  float leaving[kConsumers / 32][kLeaving][kLeavingPitch];
  Mbarrier x_full[kX], x_empty[kX], weight_full[kWeight], weight_empty[kWeight];
};

// What a block needs, with what aligns the struct, and what it may ask for, to be alone on a
// multiprocessor.
template <class Weight, int kRows>
constexpr int kNeededBytes = sizeof(SharedTiles<Weight, kRows>) + 1024;
constexpr int kSharedBytes = 227 * 1024;

template <class Weight, class T, int kRows>
class Tiles {
 public:
  using Shared = SharedTiles<Weight, kRows>;

  __device__ __forceinline__ Tiles(const Arguments &p, Shared &shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        part_(blockIdx.x % p.parts),
        begin_(p.steps * part_ / p.parts),
        end_(p.steps * (part_ + 1) / p.parts) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shared::kX; i++) {
        shared_.x_full[i].init(1);
        shared_.x_empty[i].init(kConsumers / 32);
      }
      for (int i = 0; i < Shared::kWeight; i++) {
        shared_.weight_full[i].init(1);
        shared_.weight_empty[i].init(kConsumers / 32);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
    if (warp_ >= kConsumers / 32) {
      release_registers_to<kProducerRegisters>();
      if (warp_ == kConsumers / 32) produce();
      // As consumers do, who add.
      if (p_.parts != 1) cluster_sync(), cluster_sync();
      return;
    }
    acquire_registers_to<kConsumerRegisters>();
    consume();
  }

 private:
  static constexpr int kSums = kRows / 2;
  static constexpr int kProducerRegisters = kBlocks<Weight, kRows> == 2 ? 32 : 24;
  static constexpr int kConsumerRegisters = kBlocks<Weight, kRows> == 2 ? 104 : 240;
  static constexpr int kHalves = Weight::kStep / kHalf;
  // Blocks of a cluster that part a row of the weight, at most.
  static constexpr uint32_t kMostParts = 8;
  static constexpr int kConsumersBarrier = 1;
  // When there are registers for scales and biases: before a tile's products, beside the last, or
  // behind them.
  static constexpr bool kFactorsFirst = kRows == 128, kFactorsLast = kRows <= kFewRows;

  __device__ __forceinline__ void produce() {
    Ring<Shared::kX> x;
    Ring<Shared::kWeight> weight;
    // A constant weight is asked for before the kernel before has ended; x is not.
    const uint32_t first = blockIdx.x / p_.parts;
    uint32_t ahead = min(end_ - begin_, static_cast<uint32_t>(Shared::kWeight));
    for (uint32_t i = 0; i < ahead; i++) ask_weight(weight, begin_ + i, column_of(first));
    await_previous_kernel();
    for (uint32_t tile = first; tile < p_.tiles; tile += gridDim.x / p_.parts) {
      for (uint32_t step = begin_; step < end_; step++) {
        if (step - begin_ >= ahead) ask_weight(weight, step, column_of(tile));
        ask_x(x, step, row_of(tile));
      }
      ahead = 0;
    }
  }

  // Asks for a step of the rows of x from `row` on.
  __device__ __forceinline__ void ask_x(Ring<Shared::kX> &x, uint32_t step, uint32_t row) {
    for (int half = 0; half < kHalves; half++) {
      Mbarrier &full = shared_.x_full[x.stage];
      shared_.x_empty[x.stage].wait(x.parity ^ 1);
      if (lane_ == 0) full.arrive_expect(sizeof shared_.x[0]);
      __syncwarp();
      tma_load_4d(shared_address(shared_.x[x.stage]), &p_.x, &full, kEvictLast,
                  step * Weight::kStep + half * kHalf, row, 0, 0);
      x.advance();
    }
  }

  // The first row of x of a tile, and its first column.
  __device__ __forceinline__ uint32_t row_of(uint32_t tile) const {
    return tile % p_.row_tiles * kRows;
  }
  __device__ __forceinline__ uint32_t column_of(uint32_t tile) const {
    return tile / p_.row_tiles * kColumns;
  }

  __device__ __forceinline__ void ask_weight(Ring<Shared::kWeight> &ring, uint32_t step,
                                             uint32_t column) {
    Mbarrier &full = shared_.weight_full[ring.stage];
    shared_.weight_empty[ring.stage].wait(ring.parity ^ 1);
    if (lane_ == 0) full.arrive_expect(sizeof shared_.weight[0]);
    __syncwarp();
    // In pairs of bytes, from a line's first on.
    tma_load_4d(shared_address(shared_.weight[ring.stage]), &p_.weight, &full, kEvictNormal,
                step * Weight::kBytes / 16 * 8, column, 0, 0);
    ring.advance();
  }

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier.arrive();
  }

  __device__ __forceinline__ void consume() {
    // Bias and residual may be the kernel's before, and it may read the output.
    await_previous_kernel();
    Ring<Shared::kX> x, done;
    Ring<Shared::kWeight> weight;
    float sums[kSums];
    uint32_t codes[2][kLeft];
#pragma unroll 1
    for (uint32_t tile = blockIdx.x / p_.parts; tile < p_.tiles; tile += gridDim.x / p_.parts) {
      // Of the eight columns that the lane will store.
      const uint32_t column = column_of(tile) + warp_ * 16 + lane_ % 2 * 8;
      if (kFactorsFirst) load_factors(column);
#pragma unroll 1
      for (uint32_t step = begin_; step < end_; step++) {
        shared_.weight_full[weight.stage].wait(weight.parity);
        // Rows g and g + 8 of the warp's 16, of each 16 neighbours the pairs 2 t and 8 + 2 t.
        const uint8_t *rows = shared_.weight[weight.stage] + step * Weight::kBytes % 16;
        typename Weight::template Lane<T> of_lane(rows + (warp_ * 16 + lane_ / 4) * Weight::kPitch,
                                                  lane_ % 4);
#pragma unroll
        for (int half = 0; half < kHalves; half++) {
          uint32_t (&left)[kLeft] = codes[half % 2];
          of_lane.widen(half, 0, left);
          of_lane.widen(half, 1, left);
          if (half == kHalves - 1) {
            release(shared_.weight_empty[weight.stage]);
            weight.advance();
          }
          shared_.x_full[x.stage].wait(x.parity);
          const uint64_t matrix = descriptor_k_major(shared_address(shared_.x[x.stage]));
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kChunks; i++) {
            Wgmma<T, kRows>::template rs<0>(sums, left + 4 * i, matrix + i * 32 / 16,
                                            step != begin_ || half != 0 || i != 0);
          }
          wgmma_commit();
          x.advance();
          // The products before are done, with their codes and their x.
          wgmma_wait<1>();
          hold(codes[1 - half % 2]);
          if (step != begin_ || half != 0) {
            release(shared_.x_empty[done.stage]);
            done.advance();
          }
        }
      }
      if (!kFactorsFirst && !kFactorsLast) load_factors(column);
      wgmma_wait<0>();
      hold(sums);
      if (kFactorsLast) load_factors(column);
      release(shared_.x_empty[done.stage]);
      done.advance();
      if constexpr (kRows <= kFewRows) {
        if (p_.parts == 1) {
          leave<0, kRows>(sums, row_of(tile), column);
        } else {
          // All copies were waited for by all consumers.
          named_barrier_sync(kConsumersBarrier, kConsumers);
          add_shares(sums, row_of(tile), column);
        }
      } else {
        if (p_.parts != 1) {
          named_barrier_sync(kConsumersBarrier, kConsumers);
          if (part_ == 0) {
            exchange<0>(sums);
          } else {
            exchange<1>(sums);
          }
        }
        // Halves, so that what stores them is there once for both forms.
        constexpr int kHalfRows = kRows / 2;
        if (part_ == 0) leave<0, kHalfRows>(sums, row_of(tile), column);
        if (part_ + 1 == p_.parts) leave<kHalfRows, kHalfRows>(sums, row_of(tile), column);
        // Nobody ends while the other reads.
        if (p_.parts != 1) cluster_sync();
      }
    }
  }

  // Of two blocks each adds to its sums of half of the rows those that the other has.
  template <int kPart>
  __device__ __forceinline__ void exchange(float (&sums)[kSums]) {
    constexpr int kMine = kPart * kSums / 2, kOther = kSums / 2 - kMine;
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      const float *of = sums + kOther + 4 * i;
      shared_.shares[i][threadIdx.x] = {of[0], of[1], of[2], of[3]};
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      const float4 four = load_from_peer(peer_address(&shared_.shares[i][threadIdx.x], 1 - kPart));
      float *to = sums + kMine + 4 * i;
      to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
    }
  }

  // Of few rows each block of a cluster adds all shares of the sums of some, in one order, and
  // stores them.
  __device__ __forceinline__ void add_shares(const float (&sums)[kSums], uint32_t first_row,
                                             uint32_t column) {
    constexpr uint32_t kEights = kRows / 8;
#pragma unroll
    for (int i = 0; i < kSums / 4; i++) {
      const float *of = sums + 4 * i;
      shared_.shares[i][threadIdx.x] = {of[0], of[1], of[2], of[3]};
    }
    cluster_sync();
    const uint32_t each = (kEights + p_.parts - 1) / p_.parts;
    const uint32_t first = part_ * each, end = min(first + each, kEights);
#pragma unroll 2
    for (uint32_t i = first; i < end; i++) {
      // All at once, as another block's are slow to come.
      float4 fours[kMostParts] = {};
#pragma unroll
      for (uint32_t part = 0; part < kMostParts; part++) {
        if (part >= p_.parts) break;
        fours[part] = load_from_peer(peer_address(&shared_.shares[i][threadIdx.x], part));
      }
      float4 sum = {};
#pragma unroll
      for (uint32_t part = 0; part < kMostParts; part++) {
        sum.x += fours[part].x, sum.y += fours[part].y;
        sum.z += fours[part].z, sum.w += fours[part].w;
      }
      const float eight[4] = {sum.x, sum.y, sum.z, sum.w};
      leave_eight(eight, first_row + 8 * i, column);
    }
    // Nobody ends while others read.
    cluster_sync();
  }

  // As `leave`, of eight rows: two lanes have a row's 16 columns, and half of the lanes none.
  __device__ __forceinline__ void leave_eight(const float (&sums)[4], uint32_t first_row,
                                              uint32_t column) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    auto &leaving = shared_.leaving[warp_];
#pragma unroll
    for (int i = 0; i < 4; i++) leaving[2 * t + i % 2][g + i / 2 * 8] = sums[i];
    __syncwarp();
    const float *from = &leaving[lane_ / 2][lane_ % 2 * 8];
    const float4 low = *reinterpret_cast<const float4 *>(from);
    const float4 high = *reinterpret_cast<const float4 *>(from + 4);
    __syncwarp();
    const uint32_t row = first_row + lane_ / 2;
    if (lane_ >= 16 || row >= p_.rows || column >= p_.out_features) return;
    float eights[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    finish_eight(row, column, min(p_.out_features - column, 8u), eights);
  }

  // Stores a warp's sums of `kCount` rows of x, some at a time: two lanes have a row's 16 columns,
  // eight each.
  template <int kBegin, int kCount>
  __device__ __forceinline__ void leave(const float (&sums)[kSums], uint32_t first_row,
                                        uint32_t column) {
    constexpr int kLeaving = Shared::kLeaving;
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    float (&leaving)[kLeaving][Shared::kLeavingPitch] = shared_.leaving[warp_];
    const uint32_t columns = column < p_.out_features ? min(p_.out_features - column, 8u) : 0;
    const float *from = &leaving[lane_ / 2][lane_ % 2 * 8];
#pragma unroll
    for (int first = kBegin; first < kBegin + kCount; first += kLeaving) {
#pragma unroll
      for (int j = 0; j < kLeaving / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          leaving[8 * j + 2 * t + i % 2][g + i / 2 * 8] = sums[(first / 8 + j) * 4 + i];
        }
      }
      __syncwarp();
      float eights[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(from + i);
        eights[i] = four.x, eights[i + 1] = four.y;
        eights[i + 2] = four.z, eights[i + 3] = four.w;
      }
      __syncwarp();
      const uint32_t row = first_row + first + lane_ / 2;
      if (row >= p_.rows || columns == 0) continue;
      finish_eight(row, column, columns, eights);
    }
  }

  // What belongs to the eight columns whose sums the thread stores: behind the products it would be
  // waited for.
  __device__ __forceinline__ void load_factors(uint32_t column) {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      const uint32_t at = min(column + i, p_.out_features - 1);
      scales_[i] = !Weight::kHasScales || p_.weight_scale == nullptr
                       ? 1.0f
                       : p_.weight_scale[at / p_.rows_of_scale];
      biases_[i] = p_.bias_dtype == 0 ? 0.0f : number_of(p_.bias, p_.bias_dtype, at);
    }
  }

  __device__ __forceinline__ void finish_eight(uint32_t row, uint32_t column, uint32_t columns,
                                               float (&eights)[8]) const {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      eights[i] = fmaf(eights[i] * Weight::template kUnit<T>, scales_[i], biases_[i]);
    }
    store(row, column, columns, eights);
  }

  // Rounds and stores eight neighbours, or as many as there are, once residual or gate have their
  // part in them.
  __device__ __forceinline__ void store(uint32_t row, uint32_t column, uint32_t columns,
                                        float (&eights)[8]) const {
    uint8_t *out = static_cast<uint8_t *>(p_.out) + row * p_.out_stride;
    const uint8_t *others = static_cast<const uint8_t *>(p_.residual) + row * p_.residual_stride;
    if (p_.epilogue != static_cast<uint32_t>(Epilogue::kStore)) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        if (i >= columns) break;
        const float other = number_of(others, p_.dtype, column + i);
        if (p_.epilogue == static_cast<uint32_t>(Epilogue::kAdd)) {
          eights[i] += other;
        } else {
          eights[i] *= activate(other, p_.epilogue);
        }
      }
    }
    if (p_.dtype == static_cast<uint32_t>(Float::kF32)) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        if (i < columns) reinterpret_cast<float *>(out)[column + i] = eights[i];
      }
      return;
    }
    const uint4 packed = Vector<T>::packed(eights);
    if (p_.vectors && columns == 8) {
      *reinterpret_cast<uint4 *>(out + column * 2) = packed;
      return;
    }
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      if (i < columns) {
        reinterpret_cast<uint16_t *>(out)[column + i] =
            static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      }
    }
  }

  const Arguments &p_;
  Shared &shared_;
  const uint32_t warp_, lane_;
  // Of a row, and its steps.
  const uint32_t part_, begin_, end_;
  float scales_[8], biases_[8];
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_WIDE(name, of, type, rows)                                         \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads,                         \
                                               (unsloth::kBlocks<unsloth::of, rows>))     \
      linear_wide_##name(const __grid_constant__ LinearWideArguments params) {            \
    unsloth::let_next_kernel_start();                                                     \
    if (params.constant == 0) unsloth::await_previous_kernel();                           \
    extern __shared__ uint4 dynamic[];                                                    \
    const uint32_t start = unsloth::shared_address(dynamic);                              \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic) + (1024 - start % 1024) % 1024; \
    auto &shared = *reinterpret_cast<unsloth::SharedTiles<unsloth::of, rows> *>(bytes);   \
    unsloth::Tiles<unsloth::of, type, rows>(params, shared).run();                        \
  }                                                                                       \
  extern "C" __device__ const LinearWideLaunch linear_wide_##name##_launch = {            \
      static_cast<int32_t>(unsloth::kDtype<type>),                                        \
      unsloth::of::kCode,                                                                 \
      rows,                                                                               \
      unsloth::kColumns,                                                                  \
      unsloth::of::kStep,                                                                 \
      unsloth::of::kBytes,                                                                \
      unsloth::of::kPitch,                                                                \
      unsloth::kNeededBytes<unsloth::of, rows>,                                           \
      unsloth::kThreads,                                                                  \
      unsloth::kSharedBytes,                                                              \
  };

// By weights in blocks.
#define UNSLOTH_LINEAR_WIDE_BLOCKS(name, blocks, type, rows) \
  UNSLOTH_LINEAR_WIDE(name, InBlocks<unsloth::Blocks::blocks>, type, rows)
