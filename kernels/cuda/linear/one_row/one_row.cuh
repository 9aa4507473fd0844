// One row of x by weights in blocks, bound by reading these.
//
// A block has neighbouring rows of the weight, in tiles of 16. Two of its warps copy these, by
// turns a chunk of a tile to a slot of a ring: 2048 neighbours of 16 rows. They begin before the
// kernel before has ended, and never wait for x. The others make integers of x meanwhile. Then
// every other chunk is for half of them, of which each has a step of 256 neighbours, and lets
// tensor cores multiply its codes by the digits of x. So the block reads whole rows that lie one
// behind the other. What warps have of a tile is added in the order of its steps.
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
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "linear/blocks/products.cuh"
#include "linear/gated.cuh"
#include "linear/norm.cuh"
#include "linear/one_row/arguments.h"

namespace unsloth {

// Warps that multiply, and those that copy.
constexpr uint32_t kWarps = 16, kAskers = 2;
// Their threads, and all.
constexpr uint32_t kMultipliers = 32 * kWarps, kThreads = kMultipliers + 32 * kAskers;
constexpr uint32_t kSharedBytes = 227 * 1024;
// Neighbouring weights of a row that a warp multiplies at a time, and how many of them are copied
// together.
constexpr uint32_t kStep = 256, kSteps = 8;
// Units of 32 neighbours: of a step, and of a quad, whose products go to columns of their own.
constexpr uint32_t kUnits = kStep / 32, kQuad = 4;

// A chunk of a tile in shared memory.
template <Blocks kBlocks>
struct Chunk {
  using F = Format<kBlocks>;
  static constexpr uint32_t kStepBytes = kStep / F::kLength * F::kBytes;
  static constexpr uint32_t kBytes = kSteps * kStepBytes;
  // From row to row: the same words of eight of them lie in different banks.
  static constexpr uint32_t kPitch = kBytes + (kBytes % 128 == 16 ? 32 : 16);
  static_assert(kPitch % 16 == 0 && (kPitch / 4 % 32 == 4 || kPitch / 4 % 32 == 12));
  static constexpr uint32_t kSlotBytes = kColumns * kPitch;
};

template <Blocks kBlocks, class T>
class OneRow {
  using F = Format<kBlocks>;
  using C = Chunk<kBlocks>;
  using D = Digits<kBlocks>;
  using P = Products<kBlocks>;
  using Scale = typename D::Scale;

 public:
  // Of 32 neighbours of x; what warps leave of a tile; sums of squares.
  static constexpr uint32_t kXBytes = 64 + sizeof(Scale);
  static constexpr uint32_t kShareBytes = kWarps * kColumns * sizeof(float);
  static constexpr uint32_t kRestBytes = kMostParts * sizeof(float);

  __device__ __forceinline__ OneRow(const LinearOneRowArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        steps_((p.units + kUnits - 1) / kUnits),
        chunks_((steps_ + kSteps - 1) / kSteps),
        rows_(p.gated != 0 ? kColumns / 2 : kColumns),
        first_(p.tiles * blockIdx.x + min(p.one_more, blockIdx.x)),
        tiles_(p.tiles + (blockIdx.x < p.one_more)),
        ring_(shared) {
    uint8_t *rest = shared + p.slots * p.slot_bytes;
    numbers_ = reinterpret_cast<uint32_t *>(rest);
    rest += steps_ * kUnits * 64;
    scales_ = reinterpret_cast<Scale *>(rest);
    rest += steps_ * kUnits * sizeof(Scale);
    full_ = reinterpret_cast<Mbarrier *>(rest);
    empty_ = full_ + p.slots;
    rest += 2 * p.slots * sizeof(Mbarrier);
    squares_ = reinterpret_cast<float *>(rest);
    shares_ = squares_ + kMostParts;
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
    if (p_.norm_dtype != 0) fetch_gains(p_, p_.units * 32);
    await_previous_kernel();
    round_row();
    // A thread will finish one row of a tile: it loads that row's residual and bias now, and looks
    // at them once the sums are there.
    const uint32_t all = tiles_ * kColumns;
    OfColumn of_column = {};
    if (threadIdx.x < all) load(column_of(threadIdx.x), of_column);
    // The integers are there, and so are the barriers of the ring.
    named_barrier_sync(kReady, kThreads);
    if (p_.whole_tiles != 0) {
      multiply_tiles();
    } else {
      multiply_chunks();
    }
    named_barrier_sync(kAmongMultipliers, kMultipliers);
    asm volatile("" : "+r"(of_column.other), "+r"(of_column.bias), "+r"(of_column.up_bias));
    for (uint32_t base = warp_ * 32; base < all; base += kMultipliers) {
      const uint32_t i = base + lane_;
      if (base >= kMultipliers && i < all) load(column_of(i), of_column);
      const float sum = i < all ? sum_of_shares(i) : 0;
      // Of what is gated, eight rows behind its gate.
      const float up = __shfl_xor_sync(kAllLanes, sum, kColumns / 2);
      if (i < all && i % kColumns < rows_) store(column_of(i), sum, up, of_column);
    }
  }

 private:
  // Vectors of x that a lane asks for at a time.
  static constexpr uint32_t kAhead = 4;
  // Barriers: of those that multiply, and of all.
  static constexpr int kAmongMultipliers = 1, kReady = 2;

  // A slot of the ring, and the parity of what is waited for there.
  struct Turn {
    uint32_t slot, parity;

    __device__ __forceinline__ void advance(uint32_t by, uint32_t slots) {
      slot += by;
      if (slot >= slots) slot -= slots, parity ^= 1;
    }
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

  // The first row of a tile, and the first one of its upper half.
  struct Rows {
    const uint8_t *low, *high;
  };

  __device__ __forceinline__ Rows rows_of(uint32_t tile) const {
    const int64_t offset = (first_ + tile) * rows_ * p_.weight_stride;
    const uint8_t *low = p_.weight + offset;
    return {low, p_.gated != 0 ? p_.up + offset : low + kColumns / 2 * p_.weight_stride};
  }

  // Each warp has the chunks for one half of those that multiply.
  __device__ __forceinline__ void ask_for_chunks(Turn turn) const {
    const uint32_t row_bytes = steps_ * C::kStepBytes;
    uint32_t chunk = turn.slot, tile = 0;
    for (;;) {
      while (chunk >= chunks_) chunk -= chunks_, tile++;
      if (tile >= tiles_) return;
      // The first wait for a slot passes at once.
      empty_[turn.slot].wait(turn.parity);
      if (lane_ == 0) {
        const uint32_t at = chunk * C::kBytes, bytes = min(C::kBytes, row_bytes - at);
        Mbarrier *full = &full_[turn.slot];
        full->arrive_expect(kColumns * bytes);
        const Rows rows = rows_of(tile);
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
      chunk += kAskers;
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
  __device__ __forceinline__ void multiply_chunks() const {
    // The slots of the ring are an even number, so that each is always for the same half.
    const uint32_t half = warp_ / kSteps, of_chunk = warp_ % kSteps;
    Turn turn = {half, 0};
    uint32_t tile = 0, chunk = half;
    while (chunk >= chunks_) chunk -= chunks_, tile++;
    float sums[2] = {};
    while (tile < tiles_) {
      const uint32_t share = chunk * kSteps + of_chunk;
      for (; chunk < chunks_; chunk += kWarps / kSteps) {
        full_[turn.slot].wait(turn.parity);
        const uint32_t step = chunk * kSteps + of_chunk;
        if (step < steps_) {
          multiply(ring_ + turn.slot * p_.slot_bytes + of_chunk * C::kStepBytes, step, sums);
        }
        __syncwarp();
        if (lane_ == 0) empty_[turn.slot].arrive();
        turn.advance(kWarps / kSteps, p_.slots);
      }
      leave(tile, share, sums);
      while (chunk >= chunks_) chunk -= chunks_, tile++;
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
    const uint32_t *numbers = numbers_ + (unit * 2 + g) * 8 + t;
    const uint32_t of_lane[2] = {numbers[0], numbers[4]};
    int32_t products[P::kParts][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < kQuad; i++) {
      if (!kAll && unit + i >= p_.units) break;
      uint32_t codes[4];
      P::template codes_of<kRowAligned>(rows, first + i, t, codes);
      P::multiply(codes, {of_lane[0] * masks_[i], of_lane[1] * masks_[i]}, products);
    }
    if (!kAll && unit + t >= p_.units) return;
    using FactorsOf = typename P::template FactorsOf<true>;
    const FactorsOf factors[2] = {P::template block_of<false>(rows[0], first + t),
                                  P::template block_of<false>(rows[1], first + t)};
    P::add(products, scales_[unit + t], factors, (first + t) % k32s, sums);
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

  // Of row `i` of the block's tiles. Of a chunk alone half of the warps have none.
  __device__ __forceinline__ float sum_of_shares(uint32_t i) const {
    const float *shares = shares_ + i / kColumns * (kWarps * kColumns) + i % kColumns;
    float sum = 0;
#pragma unroll
    for (uint32_t half = 0; half < kWarps / kSteps; half++) {
      if (half >= chunks_ && p_.whole_tiles == 0) break;
      float of[kSteps];
#pragma unroll
      for (uint32_t j = 0; j < kSteps; j++) of[j] = shares[(half * kSteps + j) * kColumns];
#pragma unroll
      for (uint32_t j = 0; j < kSteps; j++) sum += of[j];
    }
    return sum;
  }

  // The column of the output that row `i` of the block's tiles is for, or is of no use for.
  __device__ __forceinline__ uint32_t column_of(uint32_t i) const {
    return (first_ + i / kColumns) * rows_ + i % rows_;
  }

  // Makes integers of x. A lane has eight neighbours at a time, so that four have 32.
  __device__ __forceinline__ void round_row() const {
    const uint32_t vectors = p_.units * 4;
    const uint4 *x = static_cast<const uint4 *>(p_.x);
    const auto load = [&](uint32_t at) { return at < vectors ? x[at] : uint4{}; };
    uint32_t at = threadIdx.x;
    // What is asked for before any is looked at.
    uint4 words[kAhead], gains[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < kAhead; i++) words[i] = load(at + i * kMultipliers);
    float scale = 1;
    if (p_.norm_dtype != 0) {
      load_gains(min(at, vectors - 1), gains);
      uint4 of_part = words[0];
#pragma unroll 1
      for (uint32_t part = warp_; part < steps_; part += kWarps) {
        if (part != warp_) of_part = load(part * 32 + lane_);
        const float sum = squares_of_part<T>(of_part);
        if (lane_ == 0) squares_[part] = sum;
      }
      named_barrier_sync(kAmongMultipliers, kMultipliers);
      scale = scale_of_row<true>(p_, squares_, steps_);
    }
    // All lanes of a warp have some, or none has: those behind the row have zeros.
#pragma unroll 1
    for (; at < steps_ * 32; at += kMultipliers) {
      if (p_.norm_dtype != 0 && at < vectors) {
        if (at >= kMultipliers) load_gains(at, gains);
        normalise(gains, scale, words[0]);
      }
      round(words[0], at);
#pragma unroll
      for (uint32_t i = 0; i + 1 < kAhead; i++) words[i] = words[i + 1];
      words[kAhead - 1] = load(at + kAhead * kMultipliers);
    }
  }

  // Of eight neighbours, as they are stored.
  __device__ __forceinline__ void load_gains(uint32_t at, uint4 (&gains)[2]) const {
    const uint4 *norm = static_cast<const uint4 *>(p_.norm);
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      gains[0] = norm[2 * at], gains[1] = norm[2 * at + 1];
    } else {
      gains[0] = norm[at];
    }
  }

  // Rounded to the dtype of x, as they would be stored.
  __device__ __forceinline__ void normalise(const uint4 (&words)[2], float scale, uint4 &x) const {
    float gains[8], eight[8];
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      const uint4 &a = words[0], &b = words[1];
      const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; i++) gains[i] = __uint_as_float(bits[i]);
    } else {
      Vector<T>::unpack(words[0], gains);
    }
    Vector<T>::unpack(x, eight);
#pragma unroll
    for (int i = 0; i < 8; i++) eight[i] = normalised(p_, eight[i], gains[i], scale);
    x = Vector<T>::packed(eight);
  }

  // By the four lanes of 32 neighbours. Digits lie as they are read: [32 neighbours][digit][16 of
  // them][four], a word each.
  __device__ __forceinline__ void round(const uint4 &words, uint32_t at) const {
    // As bits, two at a time.
    constexpr uint32_t kSignless = 0x7fff7fff;
    uint32_t pair = __vmaxu2(__vmaxu2(words.x & kSignless, words.y & kSignless),
                             __vmaxu2(words.z & kSignless, words.w & kSignless));
    pair = __vmaxu2(pair, __shfl_xor_sync(kAllLanes, pair, 1));
    pair = __vmaxu2(pair, __shfl_xor_sync(kAllLanes, pair, 2));
    const Rounding rounding(__float_as_uint(unpack<T>(max(pair & 0xffff, pair >> 16)).x));
    float x[8];
    Vector<T>::unpack(words, x);
    const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
    uint2 upper, lower;
    int32_t sum = rounding.round(low, upper.x, lower.x);
    sum += rounding.round(high, upper.y, lower.y);
    uint2 *to = reinterpret_cast<uint2 *>(numbers_) + at / 4 * 8 + at % 4;
    to[0] = upper, to[4] = lower;
    int32_t others = 0;
    if constexpr (D::kSumFactor != 0) {
      // Of halves of the 32.
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      others = __shfl_xor_sync(kAllLanes, sum, 2);
    }
    if (at % 4 != 0) return;
    const float unit = D::kSumFactor * rounding.scale();
    if constexpr (D::kHalves) {
      scales_[at / 4] = {rounding.scale(), {unit * sum, unit * others}, 0};
    } else {
      scales_[at / 4] = {rounding.scale(), unit * (sum + others)};
    }
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
  // Steps and chunks of a row, begun ones too; rows of each weight of a tile; the block's first
  // tile, and how many it has.
  const uint32_t warp_, lane_, steps_, chunks_, rows_, first_, tiles_;
  uint8_t *const ring_;
  uint32_t *numbers_;
  Scale *scales_;
  Mbarrier *full_, *empty_;
  // [part], [tile][warp][column].
  float *squares_, *shares_;
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
