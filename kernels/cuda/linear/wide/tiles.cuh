// Many rows of x, of 16 bits or rounded to codes of 8, by weights of no more bits that are read as
// they are: bound by products.
//
// 128 rows of the weight become numbers of x's dtype in registers (`Weight`: e4m3.cuh, blocks.cuh,
// codes.cuh), and are the left-hand side of wgmma; x is the right-hand side, in shared memory. Two
// more warps have both copied into rings (copies.cuh). Each of two warpgroups has 64 rows of the
// weight and the sums of all rows of x of the tile. It takes half a step of the weight apart while
// tensor cores multiply the one before. The fewest rows, by ternary codes, warps multiply instead
// (by_warps.cuh). A block takes one tile after another: while its warps store a tile's sums, the
// next one's first steps are copied. Blocks of a cluster, which have one tile, part a row of the
// weight among them, and each adds up the sums of some of the rows of x. Where tiles are few and
// rows long, blocks have even shares of all tiles' steps instead (pieces.cuh).
#pragma once

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/registers.cuh"
#include "common/tag.cuh"
#include "common/wgmma.cuh"
#include "linear/wide/arguments.h"
#include "linear/wide/by_warps.cuh"
#include "linear/wide/copies.cuh"
#include "linear/wide/output.cuh"
#include "linear/wide/pieces.cuh"
#include "linear/wide/shared.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

// What tells the host the kernels' x: a contract's Float, or that it was rounded to codes.
template <class T>
constexpr int32_t kDtypeOfX = static_cast<int32_t>(kDtype<T>);
template <>
constexpr int32_t kDtypeOfX<int8_t> = kDtypeI8;

// Threads of a block.
template <class Weight, int kRows>
constexpr int kThreads = kConsumers<Weight, kRows> + 128;

// In place of products by warps, where warpgroups multiply.
struct NotByWarps {
  static constexpr int kSums = 0, kMine = 0;
  template <class Shared>
  __device__ __forceinline__ NotByWarps(Shared &, uint32_t) {}
  __device__ __forceinline__ uint32_t sixteen() const { return 0; }
  __device__ __forceinline__ uint32_t half() const { return 0; }
};

template <class Weight, class T, int kRows>
class Tiles {
 public:
  using Shared = SharedTiles<Weight, kRows>;

  __device__ __forceinline__ Tiles(const LinearWideArguments &p, Shared &shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        by_warps_(shared, warp_),
        output_(p, shared.leaving[warp_ % (kConsumers / 32)], shared.of_rows) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Shared::kX; i++) {
        shared_.x_full[i].init(1);
        shared_.x_empty[i].init(kReaders);
      }
      for (int i = 0; i < Shared::kWeight; i++) {
        shared_.weight_full[i].init(1);
        shared_.weight_empty[i].init(kReaders);
      }
      shared_.of_rows_full.init(1);
      shared_.of_rows_empty.init(kConsumers / 32);
      fence_mbarrier_init();
    }
    __syncthreads();
    if (warp_ >= kConsumers / 32) {
      release_registers_to<kProducerRegisters>();
      Copies<Weight, T, kRows> copies(p_, shared_);
      switch (warp_ - kConsumers / 32) {
        case 0:
          copies.ask_for_weight();
          break;
        case 1:
          copies.ask_for_x();
          break;
        case 2:
          copies.ask_for_scales_or_tell();
          break;
      }
      // As consumers do, who add.
      if (p_.parts != 1) cluster_sync(), cluster_sync();
      return;
    }
    acquire_registers_to<kConsumerRegisters>();
    consume();
    // The kernel behind awaits this one alone, and reads what both have made.
    if (p_.launch == kRest) await_previous_kernel();
  }

 private:
  static constexpr bool kByWarps = unsloth::kByWarps<Weight, kRows>;
  static constexpr int kConsumers = unsloth::kConsumers<Weight, kRows>;
  // Warps that wait for a stage.
  static constexpr int kReaders = kByWarps ? kWarpsOfTurn : kConsumers / 32;
  using ByWarps = std::conditional_t<kByWarps, unsloth::ByWarps<Weight, Shared, kRows>, NotByWarps>;
  // Sums of a thread; of a tile's those that it stores, hands over or gives to other blocks.
  static constexpr int kSums = kByWarps ? ByWarps::kSums : kRows / 2;
  static constexpr int kMine = kByWarps ? ByWarps::kMine : kSums;
  // Rows of x in eights, of which a thread has four sums each.
  static constexpr uint32_t kEights = kRows / 8, kOwnEights = kMine / 4;
  static constexpr int kProducerRegisters = kBlocks<Weight, kRows> == 2 || kByWarps ? 32 : 24;
  static constexpr int kConsumerRegisters = kByWarps                      ? 112
                                            : kBlocks<Weight, kRows> == 2 ? 104
                                                                          : 240;
  static constexpr int kHalves = Weight::kStep * sizeof(T) / kHalfBytes;
  using Sum = typename Weight::Sum;
  // Blocks of a cluster that part a row of the weight, at most.
  static constexpr uint32_t kMostParts = 8;
  // Barriers: of all threads that multiply; the first of two, of each warpgroup's turn.
  static constexpr int kConsumersBarrier = 1, kTurn = 2;
  // Whether warpgroups ask for products by turns: one takes codes apart while tensor cores have
  // what the other asked for.
  static constexpr bool kTurns = kRows > kFewRows;
  // When there are registers for scales and biases: before a tile's products, beside the last, or
  // behind them.
  static constexpr bool kFactorsFirst =
      kRows == 128 ||
      (Weight::kOfCodes && (kRows <= 32 || (kRows == 64 && kBlocks<Weight, kRows> == 1)));
  static constexpr bool kFactorsLast = kRows <= kFewRows && !kFactorsFirst;

  __device__ __forceinline__ void consume() {
    Ring<Shared::kX> x;
    Ring<Shared::kWeight> weight;
    uint32_t of_rows = 0;
    Sum sums[kSums];
    if (kTurns && warp_ / 4 == 1) named_barrier_arrive(kTurn, kConsumers);
    Pieces pieces(p_);
    Piece piece;
#pragma unroll 1
    while (pieces.next(piece)) {
      // Of the eight columns that the lane will store.
      const uint32_t column = column_of(p_, piece.tile) + sixteen() * 16 + lane_ % 2 * 8;
      if (kFactorsFirst) output_.load_scales(column);
      // Bias and residual may be the kernel's before, and it may read the output.
      await_inputs(p_);
      if (kFactorsFirst) output_.load_biases(column);
      if constexpr (kByWarps) {
        by_warps_.multiply(piece, x, weight, sums);
      } else {
        multiply(piece, x, weight, sums);
      }
      if (!kFactorsFirst && !kFactorsLast) load_factors(column);
      if constexpr (!kByWarps) {
        wgmma_wait<0>();
        hold(sums);
        release(shared_.x_empty[before(x)]);
      }
      if (kFactorsLast) load_factors(column);
      Sum own[kMine];
      Sum(&mine)[kMine] = own_part(sums, own);
      uint32_t begin = 0, end = kOwnEights;
      if (!is_stored(p_, piece)) {
        hand_over(pieces, mine);
        continue;
      }
      if (Weight::kOfCodes) shared_.of_rows_full.wait(of_rows), of_rows ^= 1;
      if (piece.end - piece.begin < p_.steps && p_.parts == 1) {
        take_over(pieces, piece.tile, mine);
      } else if (p_.parts != 1) {
        // All copies were waited for by all consumers.
        named_barrier_sync(kConsumersBarrier, kConsumers);
        if constexpr (kRows <= kFewRows) {
          add_shares(mine, row_of<kRows>(p_, piece.tile), column);
          end = 0;
        } else if (part() == 0) {
          exchange<0>(mine);
          end = kEights / 2;
        } else {
          exchange<1>(mine);
          begin = kEights / 2;
        }
      }
      leave(mine, begin, end, row_of<kRows>(p_, piece.tile) + half() * (kRows / 2), column);
      if (Weight::kOfCodes) release(shared_.of_rows_empty);
      // Nobody ends while the other reads.
      if (kRows > kFewRows && p_.parts != 1) cluster_sync();
    }
    // Takes the last turn.
    if (kTurns && warp_ / 4 == 0) named_barrier_sync(kTurn, kConsumers);
  }

  // Multiplies what the block has of a tile. The last products are on their way then, of the half
  // step of x before `x`.
  __device__ __forceinline__ void multiply(const Piece &piece, Ring<Shared::kX> &x,
                                           Ring<Shared::kWeight> &weight, Sum (&sums)[kSums]) {
    uint32_t codes[2][kLeft];
#pragma unroll 1
    for (uint32_t step = piece.begin; step < piece.end; step++) {
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
        if (kTurns) named_barrier_sync(kTurn + warp_ / 4, kConsumers);
        const uint64_t matrix = descriptor_k_major(shared_address(shared_.x[x.stage]));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kChunks; i++) {
          Wgmma<T, kRows>::template rs<0>(sums, left + 4 * i, matrix + i * 32 / 16,
                                          step != piece.begin || half != 0 || i != 0);
        }
        wgmma_commit();
        if (kTurns) named_barrier_arrive(kTurn + 1 - warp_ / 4, kConsumers);
        // The products before are done, with their codes and their x.
        wgmma_wait<1>();
        hold(codes[1 - half % 2]);
        if (step != piece.begin || half != 0) release(shared_.x_empty[before(x)]);
        x.advance();
      }
    }
  }

  // The stage before.
  static __device__ __forceinline__ int before(const Ring<Shared::kX> &x) {
    return x.stage == 0 ? Shared::kX - 1 : x.stage - 1;
  }

  // The sums that the thread stores or gives to other blocks: all, or by warps its part of the
  // tile, once other warps have given it theirs.
  __device__ __forceinline__ Sum (&own_part(Sum (&sums)[kSums], Sum (&own)[kMine])) [kMine] {
    if constexpr (kByWarps) {
      by_warps_.template part<kConsumersBarrier, kConsumers>(sums, own);
      return own;
    } else {
      return sums;
    }
  }

  __device__ __forceinline__ void load_factors(uint32_t column) {
    output_.load_scales(column);
    output_.load_biases(column);
  }

  // Of the tile's sixteens of rows of the weight, and of halves of rows of x, whose sums the warp
  // stores.
  __device__ __forceinline__ uint32_t sixteen() const {
    return kByWarps ? by_warps_.sixteen() : warp_;
  }
  __device__ __forceinline__ uint32_t half() const { return kByWarps ? by_warps_.half() : 0; }

  // The block's of a row, where blocks of a cluster have one.
  __device__ __forceinline__ uint32_t part() const { return blockIdx.x % p_.parts; }

  // Leaves what the block has of a tile in the workspace, for the block that has begun the tile.
  __device__ __forceinline__ void hand_over(const Pieces &pieces, const Sum (&mine)[kMine]) {
    float4 *to = handed_by(pieces.share());
#pragma unroll
    for (int i = 0; i < kMine / 4; i++) {
      to[i * kConsumers] = as_float4(mine + 4 * i);
    }
    named_barrier_arrive(kHandedBarrier, kConsumers + 32);
  }

  // Adds what other blocks have handed over of a tile that this one has begun, in their order.
  __device__ __forceinline__ void take_over(const Pieces &pieces, uint32_t tile,
                                            Sum (&mine)[kMine]) const {
    const uint32_t first = pieces.share() + 1, last = pieces.last_share(tile);
    for (uint32_t share = first + lane_; share <= last; share += 32) {
      await_tag(&p_.left[share], p_.launch_tag);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t share = first; share <= last; share++) {
      const float4 *from = handed_by(share);
#pragma unroll
      for (int i = 0; i < kMine / 4; i++) {
        add_four(__ldcg(from + i * kConsumers), mine + 4 * i);
      }
    }
    // All warps have seen the tags: they are taken away, as a launch that a graph repeats has the
    // same one.
    named_barrier_sync(kConsumersBarrier, kConsumers);
    for (uint32_t share = first + threadIdx.x; share <= last; share += kConsumers) {
      p_.left[share] = 0;
    }
  }

  // Where the block with a share leaves this thread's sums.
  __device__ __forceinline__ float4 *handed_by(uint32_t share) const {
    return reinterpret_cast<float4 *>(p_.partial) + share * (kMine / 4 * kConsumers) + threadIdx.x;
  }

  // Of two blocks each adds to its sums of half of the rows those that the other has.
  template <int kPart>
  __device__ __forceinline__ void exchange(Sum (&sums)[kSums]) {
    constexpr int kOwn = kPart * kSums / 2, kOther = kSums / 2 - kOwn;
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      shared_.shares[i][threadIdx.x] = as_float4(sums + kOther + 4 * i);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      add_four(load_from_peer(peer_address(&shared_.shares[i][threadIdx.x], 1 - kPart)),
               sums + kOwn + 4 * i);
    }
  }

  // Of few rows each block of a cluster adds all shares of the sums of some, in one order, and
  // stores them.
  __device__ __forceinline__ void add_shares(const Sum (&mine)[kMine], uint32_t first_row,
                                             uint32_t column) {
    const uint32_t thread = sixteen() * 32 + lane_;
#pragma unroll
    for (int i = 0; i < kMine / 4; i++) {
      shared_.shares[half() * kOwnEights + i][thread] = as_float4(mine + 4 * i);
    }
    cluster_sync();
    const uint32_t each = (kEights + p_.parts - 1) / p_.parts;
    const uint32_t first = part() * each, end = min(first + each, kEights);
#pragma unroll 1
    for (uint32_t i = first + half(); i < end; i += kByWarps ? 2 : 1) {
      // All at once, as another block's are slow to come.
      float4 fours[kMostParts] = {};
#pragma unroll
      for (uint32_t part = 0; part < kMostParts; part++) {
        if (part >= p_.parts) break;
        fours[part] = load_from_peer(peer_address(&shared_.shares[i][thread], part));
      }
      Sum eight[4] = {};
#pragma unroll
      for (uint32_t part = 0; part < kMostParts; part++) add_four(fours[part], eight);
      output_.put_eight(eight, 0);
      output_.store_rows(8, first_row + 8 * i, column);
    }
    // Nobody ends while others read.
    cluster_sync();
  }

  // Stores a warp's sums of some eights of rows, an even number or one. All are stored by the same
  // instructions: a block comes here once, and these are in no cache yet.
  __device__ __forceinline__ void leave(const Sum (&sums)[kMine], uint32_t begin, uint32_t end,
                                        uint32_t first_row, uint32_t column) const {
    if constexpr (kRows > kFewRows) {
      if (output_.is_packed()) return leave_packed(sums, begin, end, first_row, column);
    }
    if constexpr (kOwnEights == 1) {
      if (begin == end) return;
      output_.put_eight(sums, 0);
      output_.store_rows(8, first_row, column);
    } else {
#pragma unroll 1
      for (uint32_t eight = begin; eight < end; eight += 2) {
#pragma unroll
        for (uint32_t i = 0; i < kOwnEights; i += 2) {
          if (i == eight) {
            output_.put_eight(sums + 4 * i, 0), output_.put_eight(sums + 4 * i + 4, 8);
          }
        }
        output_.store_rows(16, first_row + 8 * eight, column);
      }
    }
  }

  // The same of sums to which at most a residual is added, packed to 16 bits before they are put by
  // rows: a multiple of four eights. The residual's next rows are on their way meanwhile.
  __device__ __forceinline__ void leave_packed(const Sum (&sums)[kMine], uint32_t begin,
                                               uint32_t end, uint32_t first_row,
                                               uint32_t column) const {
    uint4 next[2] = {};
    if (output_.adds()) output_.load_added(first_row + 8 * begin, column, next);
#pragma unroll 1
    for (uint32_t eight = begin; eight < end; eight += 4) {
      uint32_t added[8] = {};
      if (output_.adds()) {
        output_.turn_added(next, added);
        if (eight + 4 < end) output_.load_added(first_row + 8 * eight + 32, column, next);
      }
      Sum some[16];
#pragma unroll
      for (uint32_t i = 0; i < kOwnEights; i += 4) {
        // The compiler must know which registers.
        if (i != eight) continue;
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) some[j] = sums[4 * i + j];
        // A branch, not as many choices.
        hold(some);
      }
      output_.put_packed(some, first_row % kRows + 8 * eight, added);
      output_.store_packed(first_row + 8 * eight, column);
    }
  }

  const LinearWideArguments &p_;
  Shared &shared_;
  const uint32_t warp_, lane_;
  [[no_unique_address]] ByWarps by_warps_;
  Output<Weight, T, kRows> output_;
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_WIDE(name, of, type, rows)                                         \
  extern "C" __global__ void __launch_bounds__((unsloth::kThreads<unsloth::of, rows>),    \
                                               (unsloth::kBlocks<unsloth::of, rows>))     \
      linear_wide_##name(const __grid_constant__ LinearWideArguments params) {            \
    if (params.launch != unsloth::kFirst) unsloth::let_next_kernel_start();               \
    if (params.constant == 0 && params.launch != unsloth::kRest) {                        \
      unsloth::await_previous_kernel();                                                   \
    }                                                                                     \
    extern __shared__ uint4 dynamic[];                                                    \
    const uint32_t start = unsloth::shared_address(dynamic);                              \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic) + (1024 - start % 1024) % 1024; \
    auto &shared = *reinterpret_cast<unsloth::SharedTiles<unsloth::of, rows> *>(bytes);   \
    unsloth::Tiles<unsloth::of, type, rows>(params, shared).run();                        \
  }                                                                                       \
  extern "C" __device__ const LinearWideLaunch linear_wide_##name##_launch = {            \
      static_cast<int32_t>(unsloth::kDtypeOfX<type>),                                     \
      unsloth::of::kCode,                                                                 \
      rows,                                                                               \
      unsloth::kBoxRows<rows>,                                                            \
      (unsloth::kHalvesOfStage<unsloth::of, rows>),                                       \
      unsloth::kColumns,                                                                  \
      unsloth::of::kStep,                                                                 \
      unsloth::of::kBytes,                                                                \
      unsloth::of::kPitch,                                                                \
      unsloth::kBlocks<unsloth::of, rows>,                                                \
      unsloth::kNeededBytes<unsloth::of, rows>,                                           \
      unsloth::kThreads<unsloth::of, rows>,                                               \
      unsloth::kSharedBytes,                                                              \
  };

// By weights in blocks.
#define UNSLOTH_LINEAR_WIDE_BLOCKS(name, blocks, type, rows) \
  UNSLOTH_LINEAR_WIDE(name, InBlocks<unsloth::Blocks::blocks>, type, rows)
