// Many rows of x, of 16 bits, by weights that are 8-bit floats (e4m3) with scales apart, both as
// they are: bound by products.
//
// The codes of 128 rows of the weight become numbers of x's dtype in registers, without rounding,
// and are the left-hand side of wgmma; x is the right-hand side, in shared memory. A warp copies
// both into rings. Each of two warpgroups has 64 rows of the weight and the sums of all rows of x
// of the tile. It takes the codes of one step apart while tensor cores multiply those before. A
// block takes one tile after another: while its warps store a tile's sums, the next one's first
// steps are copied. Two blocks of a cluster, which have one tile, part a row of the weight between
// them, and each adds up the sums of half of the rows of x.
#pragma once

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/e4m3.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/registers.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "common/wgmma.cuh"
#include "linear/e4m3_tiles/arguments.h"
#include "linear/epilogue.cuh"

namespace unsloth {

using Arguments = LinearE4m3TilesArguments;

// Rows of the weight of a tile: columns of the output.
constexpr int kColumns = 128;
// Weights of a row that are copied at a time; x comes in halves of them.
constexpr int kStep = 128, kHalf = 64;
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// Stages of both rings, by rows of x of a tile.
template <int kRows>
constexpr int kStagesOfX = kRows == 256   ? 5
                           : kRows == 128 ? 8
                                          : 10;
template <int kRows>
constexpr int kStagesOfWeight = kRows == 256   ? 3
                                : kRows == 128 ? 5
                                               : 8;

template <int kRows>
struct alignas(1024) SharedTiles {
  static constexpr int kX = kStagesOfX<kRows>, kWeight = kStagesOfWeight<kRows>;
  union {
    struct {
      uint8_t x[kX][kRows * kHalf * 2];
      uint8_t weight[kWeight][kColumns * kStep];
    };
    // Sums of half of the rows, as threads have them.
    float4 given[kRows / 16][kConsumers];
  };
  // Rows of a warp's sums on their way to be stored: even and odd ones are in different banks.
  static constexpr int kLeaving = 16, kLeavingPitch = 20;
  float leaving[kConsumers / 32][kLeaving][kLeavingPitch];
  Mbarrier x_full[kX], x_empty[kX], weight_full[kWeight], weight_empty[kWeight];
};

// Of a block, with what aligns the struct.
template <int kRows>
constexpr int kSharedBytes = sizeof(SharedTiles<kRows>) + 1024;

template <class T, int kRows>
class Tiles {
 public:
  using Shared = SharedTiles<kRows>;

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
  // Left-hand sides of the products of half a step.
  static constexpr int kCodes = kHalf / 16 * 4;
  static constexpr int kConsumersBarrier = 1;
  // Whether registers for scales and biases are free only beside a tile's last products.
  static constexpr bool kFactorsLate = kRows == 256;

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
        for (int half = 0; half < 2; half++) {
          Mbarrier &full = shared_.x_full[x.stage];
          shared_.x_empty[x.stage].wait(x.parity ^ 1);
          if (lane_ == 0) full.arrive_expect(sizeof shared_.x[0]);
          __syncwarp();
          tma_load_4d(shared_address(shared_.x[x.stage]), &p_.x, &full, kEvictLast,
                      step * kStep + half * kHalf, row_of(tile), 0, 0);
          x.advance();
        }
      }
      ahead = 0;
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
    // In pairs of codes.
    tma_load_4d(shared_address(shared_.weight[ring.stage]), &p_.weight, &full, kEvictNormal,
                step * (kStep / 2), column, 0, 0);
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
    uint32_t codes[2][kCodes];
#pragma unroll 1
    for (uint32_t tile = blockIdx.x / p_.parts; tile < p_.tiles; tile += gridDim.x / p_.parts) {
      // Of the eight columns that the lane will store.
      const uint32_t column = column_of(tile) + warp_ * 16 + lane_ % 2 * 8;
      if (!kFactorsLate) load_factors(column);
#pragma unroll 1
      for (uint32_t step = begin_; step < end_; step++) {
        shared_.weight_full[weight.stage].wait(weight.parity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          widen(shared_.weight[weight.stage], half, codes[half]);
          if (half == 1) {
            release(shared_.weight_empty[weight.stage]);
            weight.advance();
          }
          shared_.x_full[x.stage].wait(x.parity);
          const uint64_t matrix = descriptor_k_major(shared_address(shared_.x[x.stage]));
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kHalf / 16; i++) {
            Wgmma<T, kRows>::template rs<0>(sums, codes[half] + 4 * i, matrix + i * 32 / 16,
                                            step != begin_ || half != 0 || i != 0);
          }
          wgmma_commit();
          x.advance();
          // The products before are done, with their codes and their x.
          wgmma_wait<1>();
          hold(codes[1 - half]);
          if (step != begin_ || half != 0) {
            release(shared_.x_empty[done.stage]);
            done.advance();
          }
        }
      }
      if (kFactorsLate) load_factors(column);
      wgmma_wait<0>();
      hold(sums);
      release(shared_.x_empty[done.stage]);
      done.advance();
      if (p_.parts == 1) {
        leave<0, kRows>(sums, row_of(tile), column);
        continue;
      }
      // All copies were waited for by all consumers.
      named_barrier_sync(kConsumersBarrier, kConsumers);
      if (part_ == 0) {
        share<0>(sums, row_of(tile), column);
      } else {
        share<1>(sums, row_of(tile), column);
      }
    }
  }

  // A lane's codes of half a step as left-hand sides: of rows g and g + 8 of its warp's 16, of each
  // 16 neighbours the pairs 2 t and 8 + 2 t.
  __device__ __forceinline__ void widen(const uint8_t *tile, int half, uint32_t (&to)[kCodes]) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint8_t *row = tile + (warp_ * 16 + g) * kStep + 2 * t;
#pragma unroll
    for (int i = 0; i < kHalf / 16; i++) {
      // The copy engine puts line `i` of a row in place `i ^ row % 8`.
      const uint8_t *line = row + ((half * (kHalf / 16) + i) ^ g) * 16;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t low = *reinterpret_cast<const uint16_t *>(line + h * 8 * kStep);
        const uint32_t high = *reinterpret_cast<const uint16_t *>(line + h * 8 * kStep + 8);
        const uint32_t four = low | high << 16;
        uint32_t pairs[2];
        pairs_of_e4m3<T>(four, pairs);
        to[4 * i + h] = pairs[0], to[4 * i + 2 + h] = pairs[1];
      }
    }
  }

  // Of two blocks each adds to its sums of half of the rows those that the other has, and stores
  // them.
  template <int kPart>
  __device__ __forceinline__ void share(float (&sums)[kSums], uint32_t first_row, uint32_t column) {
    constexpr int kMine = kPart * kSums / 2, kOther = kSums / 2 - kMine;
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      const float *of = sums + kOther + 4 * i;
      shared_.given[i][threadIdx.x] = {of[0], of[1], of[2], of[3]};
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      const float4 four = load_from_peer(peer_address(&shared_.given[i][threadIdx.x], 1 - kPart));
      float *to = sums + kMine + 4 * i;
      to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
    }
    leave<kPart * kRows / 2, kRows / 2>(sums, first_row, column);
    // Nobody ends while the other reads.
    cluster_sync();
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
      scales_[i] = p_.weight_scale == nullptr ? 1.0f : p_.weight_scale[at / p_.rows_of_scale];
      biases_[i] = p_.bias_dtype == 0 ? 0.0f : number_of(p_.bias, p_.bias_dtype, at);
    }
  }

  __device__ __forceinline__ void finish_eight(uint32_t row, uint32_t column, uint32_t columns,
                                               float (&eights)[8]) const {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      eights[i] = fmaf(eights[i] * kUnitOfE4m3<T>, scales_[i], biases_[i]);
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
#define UNSLOTH_LINEAR_E4M3_TILES(name, type, rows)                                       \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)                      \
      linear_e4m3_tiles_##name(const __grid_constant__ LinearE4m3TilesArguments params) { \
    unsloth::let_next_kernel_start();                                                     \
    if (params.constant == 0) unsloth::await_previous_kernel();                           \
    extern __shared__ uint4 dynamic[];                                                    \
    const uint32_t start = unsloth::shared_address(dynamic);                              \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic) + (1024 - start % 1024) % 1024; \
    auto &shared = *reinterpret_cast<unsloth::SharedTiles<rows> *>(bytes);                \
    unsloth::Tiles<type, rows>(params, shared).run();                                     \
  }                                                                                       \
  extern "C" __device__ const LinearE4m3TilesLaunch linear_e4m3_tiles_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                                        \
      rows,                                                                               \
      unsloth::kColumns,                                                                  \
      unsloth::kStep,                                                                     \
      unsloth::kThreads,                                                                  \
      unsloth::kSharedBytes<rows>,                                                        \
  };
