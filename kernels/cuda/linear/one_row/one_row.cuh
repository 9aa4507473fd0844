// One row of x by weights in blocks, bound by reading these.
//
// Blocks have by turns tiles of 16 rows of the weight, so that what they read at a time is
// neighbours. Two of a block's warps copy these, by turns a chunk of a tile to a slot of a ring:
// 2048 neighbours of 16 rows. They begin before the kernel before has ended, and never wait for x.
// The others make integers of x meanwhile. Then every other chunk is for half of them, of which
// each has a step of 256 neighbours, and lets tensor cores multiply its codes by the digits of x.
// What warps have of a tile is added in an order that is always the same.
//
// Rows that are no whole lines of 16 bytes, or no whole steps, are copied a tile at a time, as
// they lie: eight of them are whole lines. Then each tile is for all warps, which have quads of
// 128 neighbours by turns; the last one may be shorter.
//
// In `linear/blocks` each warp copies what it multiplies, from weights that may lie anywhere. Here
// tiles are whole, and a lane reads its part of x once: the code is shorter.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/pace.cuh"
#include "common/tma.cuh"
#include "linear/blocks/products.cuh"
#include "linear/gated.cuh"
#include "linear/one_row/arguments.h"
#include "linear/one_row/row_of_x.cuh"
#include "linear/one_row/sizes.cuh"

namespace unsloth {

template <Blocks kBlocks, class T>
class OneRow {
  using F = Format<kBlocks>;
  using C = Chunk<kBlocks>;
  using P = Products<kBlocks>;
  using X = RowOfX<kBlocks, T>;

 public:
  // Of 32 neighbours of x; what warps leave of a tile; sums of squares.
  static constexpr uint32_t kXBytes = X::kBytes;
  static constexpr uint32_t kShareBytes = kWarps * kColumns * sizeof(float);
  static constexpr uint32_t kRestBytes = kMostParts * sizeof(float);

  __device__ __forceinline__ OneRow(const LinearOneRowArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        steps_((p.units + kUnits - 1) / kUnits),
        chunks_((steps_ + kSteps - 1) / kSteps),
        rows_(p.gated != 0 ? kColumns / 2 : kColumns),
        tiles_(p.tiles + (blockIdx.x < p.one_more)),
        ring_(shared),
        full_(reinterpret_cast<Mbarrier *>(shared + p.slots * p.slot_bytes +
                                           steps_ * kUnits * X::kBytes)),
        empty_(full_ + p.slots),
        shares_(reinterpret_cast<float *>(empty_ + p.slots) + kMostParts),
        x_(p, warp_, steps_, shared + p.slots * p.slot_bytes, shares_ - kMostParts) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      masks_[i] = lane_ / 8 == i;
      // The compiler, which would select if it knew them, is not to.
      asm("" : "+r"(masks_[i]));
    }
  }

  __device__ __forceinline__ void run() const {
    if (warp_ >= kWarps) {
      const Turn turn = start_ring();
      if (p_.whole_tiles != 0) {
        ask_for_tiles(turn);
      } else {
        ask_for_chunks(turn);
      }
      return;
    }
    uint4 gains[2] = {};
    x_.begin(gains);
    // What does not depend on x is worked out before it is there.
    Place place(*this, warp_ / kSteps);
    OfThread of_thread(*this);
    await_previous_kernel();
    x_.round(gains);
    of_thread.load(*this);
    // The integers are there, and so are the barriers of the ring.
    named_barrier_sync(kReady, kThreads);
    if (p_.whole_tiles != 0) {
      multiply_tiles();
    } else {
      multiply_chunks(place);
    }
    named_barrier_sync(kAmongMultipliers, kMultipliers);
    finish(of_thread);
  }

 private:
  // A slot of the ring, and the parity of what is waited for there.
  struct Turn {
    uint32_t slot, parity;

    __device__ __forceinline__ void advance(uint32_t by, uint32_t slots) {
      slot += by;
      if (slot >= slots) slot -= slots, parity ^= 1;
    }
  };

  // A chunk of a tile of the block. Tiles begin with other chunks than their neighbours: rows are
  // as far apart as chunks of theirs, and if all began alike, some channels of memory would have
  // more to read than others.
  struct Place {
    // Of the tile's chunks, counted from the one it begins with.
    uint32_t tile = 0, chunk, begin;

    __device__ __forceinline__ Place(const OneRow &row, uint32_t chunk)
        : chunk(chunk),
          begin(blockIdx.x - (blockIdx.x * row.p_.chunks_inverse >> 16) * row.chunks_) {
      settle(row);
      // Not to be worked out again where it is needed.
      asm volatile("" : "+r"(tile), "+r"(this->chunk), "+r"(begin));
    }

    // To the chunk behind the tile's chunks, if that is one of another tile.
    __device__ __forceinline__ void settle(const OneRow &row) {
      while (chunk >= row.chunks_) {
        chunk -= row.chunks_;
        tile++;
        begin = begin + 1 < row.chunks_ ? begin + 1 : 0;
      }
    }

    // Which of the row's chunks it is.
    __device__ __forceinline__ uint32_t in_row(const OneRow &row) const {
      const uint32_t at = begin + chunk;
      return at < row.chunks_ ? at : at - row.chunks_;
    }
  };

  // The row of the block's tiles that a thread finishes: where its shares and its output lie, found
  // early, and its residual and biases, which it looks at once the sums are there.
  struct OfThread {
    uint32_t column, shares, stores;
    OfColumn others = {};

    __device__ __forceinline__ explicit OfThread(const OneRow &row) {
      const uint32_t all = row.tiles_ * kColumns, i = min(threadIdx.x, all - 1);
      column = row.column_of(i);
      shares = row.shares_of(i);
      stores = threadIdx.x < all && i % kColumns < row.rows_;
      asm volatile("" : "+r"(column), "+r"(shares), "+r"(stores));
    }

    __device__ __forceinline__ void load(const OneRow &row) { row.load(column, others); }
  };

  // What the warps do that copy: one has every other slot of the ring, from the turn on that is
  // returned.
  __device__ __forceinline__ Turn start_ring() const {
    const uint32_t first = warp_ - kWarps, slot = first + kAskers * lane_;
    if (slot < p_.slots) {
      full_[slot].init(1);
      empty_[slot].init(p_.whole_tiles != 0 ? kWarps : kSteps);
    }
    fence_mbarrier_init();
    __syncwarp();
    named_barrier_arrive(kReady, kThreads);
    return {first, 1};
  }

  // A tile of the block, among all.
  __device__ __forceinline__ uint32_t index_of(uint32_t tile) const {
    return tile * gridDim.x + blockIdx.x;
  }

  // The first row of a tile, and the first one of its upper half.
  struct Rows {
    const uint8_t *low, *high;
  };

  __device__ __forceinline__ Rows rows_of(uint32_t tile) const {
    const int64_t offset = static_cast<int64_t>(index_of(tile)) * rows_ * p_.weight_stride;
    const uint8_t *low = p_.weight + offset;
    return {low, p_.gated != 0 ? p_.up + offset : low + kColumns / 2 * p_.weight_stride};
  }

  // Each warp has the chunks for one half of those that multiply.
  __device__ __forceinline__ void ask_for_chunks(Turn turn) const {
    const uint32_t row_bytes = steps_ * C::kStepBytes;
    Pace pace(p_.interval);
    for (Place place(*this, turn.slot); place.tile < tiles_; place.settle(*this)) {
      pace.await_turn();
      // The first wait for a slot passes at once.
      empty_[turn.slot].wait(turn.parity);
      if (lane_ == 0) {
        const uint32_t at = place.in_row(*this) * C::kBytes;
        const uint32_t bytes = min(C::kBytes, row_bytes - at);
        Mbarrier *full = &full_[turn.slot];
        full->arrive_expect(kColumns * bytes);
        const Rows rows = rows_of(place.tile);
        const uint8_t *low = rows.low + at, *high = rows.high + at;
        uint32_t to = shared_address(ring_ + turn.slot * p_.slot_bytes);
#pragma unroll
        for (uint32_t i = 0; i < kColumns / 2; i++) {
          bulk_load_by_thread(to, low, bytes, full);
          bulk_load_by_thread(to + kColumns / 2 * C::kPitch, high, bytes, full);
          to += C::kPitch, low += p_.weight_stride, high += p_.weight_stride;
        }
      }
      __syncwarp();
      turn.advance(kAskers, p_.slots);
      place.chunk += kAskers;
    }
  }

  // Each warp has every other tile, of rows without gaps.
  __device__ __forceinline__ void ask_for_tiles(Turn turn) const {
    const uint32_t bytes = kColumns / 2 * static_cast<uint32_t>(p_.weight_stride);
    for (uint32_t tile = turn.slot; tile < tiles_; tile += kAskers) {
      empty_[turn.slot].wait(turn.parity);
      if (lane_ == 0) {
        Mbarrier *full = &full_[turn.slot];
        full->arrive_expect(2 * bytes);
        const Rows rows = rows_of(tile);
        const uint32_t to = shared_address(ring_ + turn.slot * p_.slot_bytes);
        bulk_load_by_thread(to, rows.low, bytes, full);
        bulk_load_by_thread(to + bytes, rows.high, bytes, full);
      }
      __syncwarp();
      turn.advance(kAskers, p_.slots);
    }
  }

  // What a warp has of all tiles, to where it is added up: of every other chunk.
  __device__ __forceinline__ void multiply_chunks(Place place) const {
    // The slots of the ring are an even number, so that each is always for the same half.
    const uint32_t of_chunk = warp_ % kSteps;
    Turn turn = {warp_ / kSteps, 0};
    float sums[2] = {};
    while (place.tile < tiles_) {
      const uint32_t tile = place.tile, share = place.chunk * kSteps + of_chunk;
      for (; place.chunk < chunks_; place.chunk += kWarps / kSteps) {
        full_[turn.slot].wait(turn.parity);
        const uint32_t step = place.in_row(*this) * kSteps + of_chunk;
        if (step < steps_) {
          multiply(ring_ + turn.slot * p_.slot_bytes + of_chunk * C::kStepBytes, step, sums);
        }
        __syncwarp();
        if (lane_ == 0) empty_[turn.slot].arrive();
        turn.advance(kWarps / kSteps, p_.slots);
      }
      leave(tile, share, sums);
      place.settle(*this);
    }
  }

  // Of every tile.
  __device__ __forceinline__ void multiply_tiles() const {
    const uint32_t pitch = static_cast<uint32_t>(p_.weight_stride);
    Turn turn = {0, 0};
    for (uint32_t tile = 0; tile < tiles_; tile++) {
      float sums[2] = {};
      full_[turn.slot].wait(turn.parity);
      const uint8_t *low = ring_ + turn.slot * p_.slot_bytes + lane_ / 4 * pitch;
      for (uint32_t unit = warp_ * kQuad; unit < p_.units; unit += kWarps * kQuad) {
        // In its block, if that is longer than the quad.
        const uint32_t first = P::k32s == 1 ? 0 : unit % P::k32s;
        const uint8_t *row = low + (unit - first) / P::k32s * F::kBytes;
        const uint8_t *const rows[2] = {row, row + 8 * pitch};
        multiply_quad<false>(rows, first, unit, sums);
      }
      __syncwarp();
      if (lane_ == 0) empty_[turn.slot].arrive();
      turn.advance(1, p_.slots);
      leave(tile, warp_, sums);
    }
  }

  // A step of 16 rows.
  __device__ __forceinline__ void multiply(const uint8_t *step_of_rows, uint32_t step,
                                           float (&sums)[2]) const {
    const uint8_t *low = step_of_rows + lane_ / 4 * C::kPitch;
    const uint8_t *const rows[2] = {low, low + 8 * C::kPitch};
#pragma unroll
    for (uint32_t first = 0; first < kUnits; first += kQuad) {
      multiply_quad<true>(rows, first, step * kUnits + first, sums);
    }
  }

  // Neighbours of two rows g and g + 8 of 16, from the first unit of a block `first` on, which is
  // the row's `unit`. Four products, of 32 neighbours each, go to columns of their own, two for the
  // digits: lane t of four has the sums of the t-th, and scales them. `kAll`: all four are there.
  template <bool kAll>
  __device__ __forceinline__ void multiply_quad(const uint8_t *const (&rows)[2], uint32_t first,
                                                uint32_t unit, float (&sums)[2]) const {
    constexpr uint32_t k32s = P::k32s;
    constexpr bool kRowAligned = C::kStepBytes % 4 == 0;
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint2 of_lane = x_.digits(unit, g, t);
    int32_t products[P::kParts][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < kQuad; i++) {
      if (!kAll && unit + i >= p_.units) break;
      uint32_t codes[4];
      P::template codes_of<kRowAligned>(rows, first + i, t, codes);
      P::multiply(codes, {of_lane.x * masks_[i], of_lane.y * masks_[i]}, products);
    }
    if (!kAll && unit + t >= p_.units) return;
    using FactorsOf = typename P::template FactorsOf<true>;
    const FactorsOf factors[2] = {P::template block_of<false>(rows[0], first + t),
                                  P::template block_of<false>(rows[1], first + t)};
    P::add(products, x_.scale(unit + t), factors, (first + t) % k32s, sums);
  }

  // Puts a warp's share of a tile where it is added to others.
  __device__ __forceinline__ void leave(uint32_t tile, uint32_t share, float (&sums)[2]) const {
#pragma unroll
    for (float &sum : sums) {
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
    }
    if (lane_ % 4 == 0) {
      float *to = shares_ + (tile * kWarps + share) * kColumns + lane_ / 4;
      to[0] = sums[0], to[8] = sums[1];
    }
    sums[0] = sums[1] = 0;
  }

  // Adds up the rows of the block's tiles, and stores what becomes of them.
  __device__ __forceinline__ void finish(OfThread of_thread) const {
    const uint32_t all = tiles_ * kColumns;
    asm volatile(""
                 : "+r"(of_thread.others.other), "+r"(of_thread.others.bias),
                   "+r"(of_thread.others.up_bias));
    for (uint32_t base = warp_ * 32; base < all; base += kMultipliers) {
      if (base >= kMultipliers) {
        const uint32_t i = min(base + lane_, all - 1);
        of_thread.column = column_of(i), of_thread.shares = shares_of(i);
        of_thread.stores = base + lane_ < all && i % kColumns < rows_;
        of_thread.load(*this);
      }
      const float sum = sum_of_shares(of_thread.shares);
      // Of what is gated, eight rows behind its gate.
      const float up = __shfl_xor_sync(kAllLanes, sum, kColumns / 2);
      if (of_thread.stores != 0) store(of_thread.column, sum, up, of_thread.others);
    }
  }

  // Where the shares of row `i` of the block's tiles begin, from the ring on.
  __device__ __forceinline__ uint32_t shares_of(uint32_t i) const {
    const float *shares = shares_ + i / kColumns * (kWarps * kColumns) + i % kColumns;
    return static_cast<uint32_t>(reinterpret_cast<const uint8_t *>(shares) - ring_);
  }

  // Of a chunk alone half of the warps have none.
  __device__ __forceinline__ float sum_of_shares(uint32_t at) const {
    const float *shares = reinterpret_cast<const float *>(ring_ + at);
    float sum = sum_of_half(shares);
    if (chunks_ > 1 || p_.whole_tiles != 0) sum += sum_of_half(shares + kSteps * kColumns);
    return sum;
  }

  static __device__ __forceinline__ float sum_of_half(const float *shares) {
    float of[kSteps];
#pragma unroll
    for (uint32_t i = 0; i < kSteps; i++) of[i] = shares[i * kColumns];
#pragma unroll
    for (uint32_t step = 1; step < kSteps; step *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kSteps; i += 2 * step) of[i] += of[i + step];
    }
    return of[0];
  }

  // The column of the output that row `i` of the block's tiles is for, or is of no use for.
  __device__ __forceinline__ uint32_t column_of(uint32_t i) const {
    return index_of(i / kColumns) * rows_ + i % rows_;
  }

  __device__ __forceinline__ void load(uint32_t column, OfColumn &to) const {
    to.other = other_of(p_, p_.residual, column);
    load_biases(p_, column, to);
  }

  __device__ __forceinline__ void store(uint32_t column, float sum, float up,
                                        const OfColumn &of_column) const {
    store_number(p_.out, static_cast<Float>(p_.dtype), column, finished(p_, sum, up, of_column));
  }

  const LinearOneRowArguments &p_;
  // Steps and chunks of a row, begun ones too; rows of each weight of a tile; the block's tiles.
  const uint32_t warp_, lane_, steps_, chunks_, rows_, tiles_;
  uint8_t *const ring_;
  Mbarrier *const full_, *const empty_;
  // [tile][warp][column].
  float *const shares_;
  const X x_;
  // 1 for the product of four whose columns a lane has, else 0.
  uint32_t masks_[4];
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_ONE_ROW_OF(name, blocks, type)                               \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)                \
      linear_one_row_##name(const __grid_constant__ LinearOneRowArguments params) { \
    unsloth::let_next_kernel_start();                                               \
    if (params.constant == 0) unsloth::await_previous_kernel();                     \
    extern __shared__ uint4 dynamic[];                                              \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                          \
    unsloth::OneRow<unsloth::Blocks::blocks, type>(params, bytes).run();            \
  }                                                                                 \
  extern "C" __device__ const LinearOneRowLaunch linear_one_row_##name##_launch = { \
      static_cast<int32_t>(unsloth::Blocks::blocks),                                \
      static_cast<int32_t>(unsloth::kDtype<type>),                                  \
      unsloth::kStep,                                                               \
      unsloth::kSteps,                                                              \
      unsloth::Chunk<unsloth::Blocks::blocks>::kSlotBytes,                          \
      unsloth::OneRow<unsloth::Blocks::blocks, type>::kXBytes,                      \
      unsloth::OneRow<unsloth::Blocks::blocks, type>::kShareBytes,                  \
      unsloth::OneRow<unsloth::Blocks::blocks, type>::kRestBytes,                   \
      unsloth::kThreads,                                                            \
      unsloth::kSharedBytes,                                                        \
  };

#define UNSLOTH_LINEAR_ONE_ROW(name, blocks)                    \
  UNSLOTH_LINEAR_ONE_ROW_OF(name##_bf16, blocks, __nv_bfloat16) \
  UNSLOTH_LINEAR_ONE_ROW_OF(name##_f16, blocks, __half)
