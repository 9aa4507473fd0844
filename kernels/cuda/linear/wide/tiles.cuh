// Many rows of x, of 16 bits or rounded to codes of 8, by weights of no more bits that are read as
// they are: bound by products.
//
// 128 rows of the weight become numbers of x's dtype in registers (`Weight`: e4m3.cuh, blocks.cuh,
// codes.cuh), and are the left-hand side of wgmma; x is the right-hand side, in shared memory. A
// warp copies both into rings. Each of two warpgroups has 64 rows of the weight and the sums of all
// rows of x of the tile. It takes half a step of the weight apart while tensor cores multiply the
// one before. A block takes one tile after another: while its warps store a tile's sums, the next
// one's first steps are copied. Blocks of a cluster, which have one tile, part a row of the weight
// among them, and each adds up the sums of some of the rows of x. Where tiles are few and rows
// long, blocks have even shares of all tiles' steps instead (pieces.cuh).
#pragma once

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/registers.cuh"
#include "common/tag.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "linear/wide/arguments.h"
#include "linear/wide/output.cuh"
#include "linear/wide/pieces.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

// Threads that multiply, and all.
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
// Rows of x up to which blocks of a cluster give each other all their sums.
constexpr int kFewRows = 64;
// Blocks of a multiprocessor: of few rows two, so that one's start and end are beside the other's
// products. For 8-bit floats there are too few registers then, and for 64 rows and weights of 8
// bits rings would be too short.
template <class Weight, int kRows>
constexpr bool kIsLong = kRows == 64 && Weight::kBytes >= 256;
template <class Weight, int kRows>
constexpr int kBlocks =
    kRows <= kFewRows && (Weight::kOfCodes || !Weight::kHasScales) && !kIsLong<Weight, kRows> ? 2
                                                                                              : 1;

// Bytes of a block's rings at most: beside them are barriers, sums on their way to be stored, and
// what belongs to codes of x.
template <class Weight, int kRows>
constexpr int kRoom = (kBlocks<Weight, kRows> == 2 ? 101
                       : Weight::kOfCodes          ? 212
                                                   : 215) *
                      1024;
// Of x, stages at most.
template <class Weight, int kRows>
constexpr int kMostX = kRows == 256                  ? 5
                       : kRows == 128                ? 8
                       : kBlocks<Weight, kRows> == 1 ? 10
                       : kRows == 64                 ? 6
                                                     : 12;

// Rows of x that are copied together, as a box. A last tile's boxes behind x are left out: the copy
// engine fills them with zeros, which takes it longer than rows of x do. What shared memory has in
// their place is multiplied, and those sums are not stored.
template <int kRows>
constexpr int kBoxRows = kRows >= 128 ? 64 : 32;

template <class Weight, int kRows>
struct alignas(1024) SharedTiles {
  static constexpr int kXBytes = kRows * kHalfBytes;
  static constexpr int kWeightBytes = Weight::kBoxes * kColumns * Weight::kPitch;
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
  Leaving leaving[kConsumers / 32];
  OfRows<Weight::kOfCodes ? kRows : 1> of_rows;
  Mbarrier x_full[kX], x_empty[kX], weight_full[kWeight], weight_empty[kWeight];
  Mbarrier of_rows_full, of_rows_empty;
};

// What a block needs, with what aligns the struct, and what it may ask for, to be alone on a
// multiprocessor.
template <class Weight, int kRows>
constexpr int kNeededBytes = sizeof(SharedTiles<Weight, kRows>) + 1024;
constexpr int kSharedBytes = 227 * 1024;

// What a launch is of, where rows are parted among two: of the first rows, or of the rest beside
// it, which is launched next.
constexpr uint32_t kFirst = 1, kRest = 2;

// What tells the host the kernels' x: a contract's Float, or that it was rounded to codes.
template <class T>
constexpr int32_t kDtypeOfX = static_cast<int32_t>(kDtype<T>);
template <>
constexpr int32_t kDtypeOfX<int8_t> = kDtypeI8;

template <class Weight, class T, int kRows>
class Tiles {
 public:
  using Shared = SharedTiles<Weight, kRows>;

  __device__ __forceinline__ Tiles(const LinearWideArguments &p, Shared &shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        part_(blockIdx.x % p.parts),
        output_(p, shared.leaving[warp_ % (kConsumers / 32)], shared.of_rows) {}

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
      shared_.of_rows_full.init(1);
      shared_.of_rows_empty.init(kConsumers / 32);
      fence_mbarrier_init();
    }
    __syncthreads();
    if (warp_ >= kConsumers / 32) {
      release_registers_to<kProducerRegisters>();
      if (warp_ == kConsumers / 32) produce();
      if (warp_ == kConsumers / 32 + 1) tell();
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
  static constexpr int kSums = kRows / 2;
  // Rows of x in eights, of which a thread has four sums each.
  static constexpr uint32_t kEights = kRows / 8;
  static constexpr int kProducerRegisters = kBlocks<Weight, kRows> == 2 ? 32 : 24;
  static constexpr int kConsumerRegisters = kBlocks<Weight, kRows> == 2 ? 104 : 240;
  static constexpr int kHalves = Weight::kStep * sizeof(T) / kHalfBytes;
  using Sum = typename Weight::Sum;
  // Blocks of a cluster that part a row of the weight, at most.
  static constexpr uint32_t kMostParts = 8;
  // Of all threads that multiply; the first of two, of each warpgroup's turn; of all that multiply
  // and the warp that tells.
  static constexpr int kConsumersBarrier = 1, kTurn = 2, kHandedBarrier = 4;
  // Whether warpgroups ask for products by turns: one takes codes apart while tensor cores have
  // what the other asked for.
  static constexpr bool kTurns = kRows > kFewRows;
  // When there are registers for scales and biases: before a tile's products, beside the last, or
  // behind them.
  static constexpr bool kFactorsFirst =
      kRows == 128 ||
      (Weight::kOfCodes && (kRows == 32 || (kRows == 64 && kBlocks<Weight, kRows> == 1)));
  static constexpr bool kFactorsLast = kRows <= kFewRows && !kFactorsFirst;

  // Waits for what is multiplied. Once that is there, a launch for the rest of the rows has nothing
  // to wait for: it is started then, beside this one.
  __device__ __forceinline__ void await_inputs() const {
    if (p_.launch == kRest) {
      // What this multiprocessor has cached of them may be older.
      __threadfence();
      return;
    }
    await_previous_kernel();
    if (p_.launch == kFirst) let_next_kernel_start();
  }

  __device__ __forceinline__ void produce() {
    Ring<Shared::kX> x;
    Ring<Shared::kWeight> weight;
    uint32_t of_rows = 0;
    Pieces pieces(p_);
    Piece piece;
    if (!pieces.next(piece)) return;
    // A constant weight is asked for before the kernel before has ended; x is not.
    uint32_t ahead = min(piece.end - piece.begin, static_cast<uint32_t>(Shared::kWeight));
    for (uint32_t i = 0; i < ahead; i++) {
      ask_weight(weight, piece.begin + i, column_of(piece.tile));
    }
    await_inputs();
    do {
      for (uint32_t step = piece.begin; step < piece.end; step++) {
        if (step - piece.begin >= ahead) ask_weight(weight, step, column_of(piece.tile));
        ask_x(x, step, row_of(piece.tile));
      }
      ahead = 0;
      if (Weight::kOfCodes && is_stored(piece)) {
        // Behind the steps: before all of the last tile is stored they do not fit.
        shared_.of_rows_empty.wait(of_rows ^ 1);
        ask_of_rows(row_of(piece.tile));
        of_rows ^= 1;
      }
    } while (pieces.next(piece));
  }

  // Whether the block stores what it has of a tile, or hands it over.
  __device__ __forceinline__ bool is_stored(const Piece &piece) const {
    return p_.parts != 1 || piece.begin == 0;
  }

  // Asks for scales and sums of the rows of x from `row` on: there are whole lines of them.
  __device__ __forceinline__ void ask_of_rows(uint32_t row) {
    const uint32_t rows = min(p_.rows - row, static_cast<uint32_t>(kRows));
    const uint32_t bytes = (rows + 3) / 4 * 16;
    if (lane_ == 0) shared_.of_rows_full.arrive_expect(2 * bytes);
    __syncwarp();
    bulk_load(shared_address(shared_.of_rows.scale), p_.x_scale + row, bytes,
              &shared_.of_rows_full);
    bulk_load(shared_address(shared_.of_rows.sum), p_.x_sum + row, bytes, &shared_.of_rows_full);
  }

  // Asks for a step of the rows of x from `row` on.
  __device__ __forceinline__ void ask_x(Ring<Shared::kX> &x, uint32_t step, uint32_t row) {
    constexpr uint32_t kBox = kBoxRows<kRows>;
    const uint32_t boxes = (min(p_.rows - row, static_cast<uint32_t>(kRows)) + kBox - 1) / kBox;
    for (int half = 0; half < kHalves; half++) {
      Mbarrier &full = shared_.x_full[x.stage];
      shared_.x_empty[x.stage].wait(x.parity ^ 1);
      if (lane_ == 0) full.arrive_expect(boxes * kBox * kHalfBytes);
      __syncwarp();
      // In pairs of bytes.
#pragma unroll 1
      for (uint32_t box = 0; box < boxes; box++) {
        tma_load_4d(shared_address(shared_.x[x.stage] + box * kBox * kHalfBytes), &p_.x, &full,
                    kEvictLast, (step * kHalves + half) * (kHalfBytes / 2), row + box * kBox, 0, 0);
      }
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
    for (int box = 0; box < Weight::kBoxes; box++) {
      tma_load_4d(shared_address(shared_.weight[ring.stage] + box * kColumns * Weight::kPitch),
                  &p_.weight, &full, kEvictNormal,
                  (step * Weight::kBytes / 16 + box * Weight::kPitch / 16) * 8, column, 0, 0);
    }
    ring.advance();
  }

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) const {
    __syncwarp();
    if (lane_ == 0) barrier.arrive();
  }

  __device__ __forceinline__ void consume() {
    // Bias and residual may be the kernel's before, and it may read the output.
    await_inputs();
    Ring<Shared::kX> x, done;
    Ring<Shared::kWeight> weight;
    uint32_t of_rows = 0;
    Sum sums[kSums];
    uint32_t codes[2][kLeft];
    if (kTurns && warp_ / 4 == 1) named_barrier_arrive(kTurn, kConsumers);
    Pieces pieces(p_);
    Piece piece;
#pragma unroll 1
    while (pieces.next(piece)) {
      // Of the eight columns that the lane will store.
      const uint32_t column = column_of(piece.tile) + warp_ * 16 + lane_ % 2 * 8;
      if (kFactorsFirst) output_.load_factors(column);
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
          x.advance();
          // The products before are done, with their codes and their x.
          wgmma_wait<1>();
          hold(codes[1 - half % 2]);
          if (step != piece.begin || half != 0) {
            release(shared_.x_empty[done.stage]);
            done.advance();
          }
        }
      }
      if (!kFactorsFirst && !kFactorsLast) output_.load_factors(column);
      wgmma_wait<0>();
      hold(sums);
      if (kFactorsLast) output_.load_factors(column);
      release(shared_.x_empty[done.stage]);
      done.advance();
      uint32_t begin = 0, end = kEights;
      if (!is_stored(piece)) {
        hand_over(pieces, sums);
        continue;
      }
      if (Weight::kOfCodes) shared_.of_rows_full.wait(of_rows), of_rows ^= 1;
      if (piece.end - piece.begin < p_.steps && p_.parts == 1) {
        take_over(pieces, piece.tile, sums);
      } else if (p_.parts != 1) {
        // All copies were waited for by all consumers.
        named_barrier_sync(kConsumersBarrier, kConsumers);
        if constexpr (kRows <= kFewRows) {
          add_shares(sums, row_of(piece.tile), column);
          end = 0;
        } else if (part_ == 0) {
          exchange<0>(sums);
          end = kEights / 2;
        } else {
          exchange<1>(sums);
          begin = kEights / 2;
        }
      }
      leave(sums, begin, end, row_of(piece.tile), column);
      if (Weight::kOfCodes) release(shared_.of_rows_empty);
      // Nobody ends while the other reads.
      if (kRows > kFewRows && p_.parts != 1) cluster_sync();
    }
    // Takes the last turn.
    if (kTurns && warp_ / 4 == 0) named_barrier_sync(kTurn, kConsumers);
  }

  // Four sums as they are moved, and their addition to others.
  static __device__ __forceinline__ float4 as_float4(const Sum *of) {
    return {bits_as_float(of[0]), bits_as_float(of[1]), bits_as_float(of[2]), bits_as_float(of[3])};
  }
  static __device__ __forceinline__ void add_four(const float4 &four, Sum *to) {
    to[0] += float_as_bits<Sum>(four.x), to[1] += float_as_bits<Sum>(four.y);
    to[2] += float_as_bits<Sum>(four.z), to[3] += float_as_bits<Sum>(four.w);
  }

  // Leaves what the block has of a tile in the workspace, for the block that has begun the tile.
  __device__ __forceinline__ void hand_over(const Pieces &pieces, const Sum (&sums)[kSums]) {
    float4 *to = handed_by(pieces.share());
#pragma unroll
    for (int i = 0; i < kSums / 4; i++) {
      to[i * kConsumers] = as_float4(sums + 4 * i);
    }
    named_barrier_arrive(kHandedBarrier, kConsumers + 32);
  }

  // What a warp does that multiplies nothing: once all that multiply have left their sums, it tells
  // the other block so, while they go on.
  __device__ __forceinline__ void tell() const {
    await_inputs();
    Pieces pieces(p_);
    Piece piece;
    if (p_.share == 0 || !pieces.next(piece) || piece.begin == 0) return;
    named_barrier_sync(kHandedBarrier, kConsumers + 32);
    if (lane_ == 0) store_tag(&p_.left[pieces.share()], p_.launch_tag);
  }

  // Adds what other blocks have handed over of a tile that this one has begun, in their order.
  __device__ __forceinline__ void take_over(const Pieces &pieces, uint32_t tile,
                                            Sum (&sums)[kSums]) const {
    const uint32_t first = pieces.share() + 1, last = pieces.last_share(tile);
    for (uint32_t share = first + lane_; share <= last; share += 32) {
      await_tag(&p_.left[share], p_.launch_tag);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t share = first; share <= last; share++) {
      const float4 *from = handed_by(share);
#pragma unroll
      for (int i = 0; i < kSums / 4; i++) {
        add_four(__ldcg(from + i * kConsumers), sums + 4 * i);
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
    return reinterpret_cast<float4 *>(p_.partial) + share * (kSums / 4 * kConsumers) + threadIdx.x;
  }

  // Of two blocks each adds to its sums of half of the rows those that the other has.
  template <int kPart>
  __device__ __forceinline__ void exchange(Sum (&sums)[kSums]) {
    constexpr int kMine = kPart * kSums / 2, kOther = kSums / 2 - kMine;
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      shared_.shares[i][threadIdx.x] = as_float4(sums + kOther + 4 * i);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kSums / 8; i++) {
      add_four(load_from_peer(peer_address(&shared_.shares[i][threadIdx.x], 1 - kPart)),
               sums + kMine + 4 * i);
    }
  }

  // Of few rows each block of a cluster adds all shares of the sums of some, in one order, and
  // stores them.
  __device__ __forceinline__ void add_shares(const Sum (&sums)[kSums], uint32_t first_row,
                                             uint32_t column) {
#pragma unroll
    for (int i = 0; i < kSums / 4; i++) {
      shared_.shares[i][threadIdx.x] = as_float4(sums + 4 * i);
    }
    cluster_sync();
    const uint32_t each = (kEights + p_.parts - 1) / p_.parts;
    const uint32_t first = part_ * each, end = min(first + each, kEights);
#pragma unroll 1
    for (uint32_t i = first; i < end; i++) {
      // All at once, as another block's are slow to come.
      float4 fours[kMostParts] = {};
#pragma unroll
      for (uint32_t part = 0; part < kMostParts; part++) {
        if (part >= p_.parts) break;
        fours[part] = load_from_peer(peer_address(&shared_.shares[i][threadIdx.x], part));
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

  // Stores a warp's sums of some eights of rows, an even number. All are stored by the same
  // instructions: a block comes here once, and these are in no cache yet.
  __device__ __forceinline__ void leave(const Sum (&sums)[kSums], uint32_t begin, uint32_t end,
                                        uint32_t first_row, uint32_t column) const {
    if constexpr (kRows > kFewRows) {
      if (output_.is_packed()) return leave_packed(sums, begin, end, first_row, column);
    }
#pragma unroll 1
    for (uint32_t eight = begin; eight < end; eight += 2) {
#pragma unroll
      for (uint32_t i = 0; i < kEights; i += 2) {
        if (i == eight) output_.put_eight(sums + 4 * i, 0), output_.put_eight(sums + 4 * i + 4, 8);
      }
      output_.store_rows(16, first_row + 8 * eight, column);
    }
  }

  // The same of sums to which at most a residual is added, packed to 16 bits before they are put by
  // rows: a multiple of four eights. The residual's next rows are on their way meanwhile.
  __device__ __forceinline__ void leave_packed(const Sum (&sums)[kSums], uint32_t begin,
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
      for (uint32_t i = 0; i < kEights; i += 4) {
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
  // Of a row.
  const uint32_t part_;
  Output<Weight, T, kRows> output_;
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_WIDE(name, of, type, rows)                                         \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads,                         \
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
      unsloth::kColumns,                                                                  \
      unsloth::of::kStep,                                                                 \
      unsloth::of::kBytes,                                                                \
      unsloth::of::kPitch,                                                                \
      unsloth::kBlocks<unsloth::of, rows>,                                                \
      unsloth::kNeededBytes<unsloth::of, rows>,                                           \
      unsloth::kThreads,                                                                  \
      unsloth::kSharedBytes,                                                              \
  };

// By weights in blocks.
#define UNSLOTH_LINEAR_WIDE_BLOCKS(name, blocks, type, rows) \
  UNSLOTH_LINEAR_WIDE(name, InBlocks<unsloth::Blocks::blocks>, type, rows)
