// Products of up to 16 rows of x, rounded to codes, by ternary weights: by warps.
//
// Products of warpgroups (`wgmma`) are by 32 rows of x at least. Eight warps have a multiprocessor
// to themselves then, and each waits for a step, takes it apart, and waits for products, one behind
// the other. Here are sixteen: four take a step, of which each has 32 rows of the weight, and four
// such groups take steps by turns. What a warp has of its next step it loads before it multiplies
// this one. At the end the warps give each other their sums of parts of the tile.
#pragma once

#include "common/mbarrier.cuh"
#include "common/memory.cuh"
#include "common/mma.cuh"
#include "common/named_barrier.cuh"
#include "linear/wide/codes.cuh"
#include "linear/wide/output.cuh"
#include "linear/wide/pieces.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

constexpr uint32_t kTurnsOfWarps = 4, kWarpsOfTurn = 4;

// In shared memory: the sums that each turn's warps have of the parts of the tile that other turns'
// warps store.
template <int kRows>
struct OfTurns {
  float4 of[kTurnsOfWarps][kTurnsOfWarps - 1][kRows / 16][kWarpsOfTurn * 32];

  // Four sums that a thread of turn `by` has of the part that turn `of_turn` stores.
  __device__ __forceinline__ float4 &at(uint32_t of_turn, uint32_t by, uint32_t i) {
    const uint32_t other = (by + kTurnsOfWarps - of_turn) % kTurnsOfWarps - 1;
    return of[of_turn][other][i][threadIdx.x % (kWarpsOfTurn * 32)];
  }
};
template <>
struct OfTurns<0> {};

template <class Weight, class Shared, int kRows>
class ByWarps {
 public:
  // Rows of x in eights, of which a thread has four sums each, of two sixteens of the weight's
  // rows.
  static constexpr uint32_t kEights = kRows / 8;
  static constexpr int kSums = 2 * kEights * 4, kMine = kSums / kTurnsOfWarps;

  __device__ __forceinline__ ByWarps(Shared &shared, uint32_t warp)
      : shared_(shared),
        warp_(warp % kWarpsOfTurn),
        turn_(warp / kWarpsOfTurn),
        lane_(threadIdx.x % 32) {}

  // Of the tile's sixteens of rows of the weight, and of halves of the rows of x, the warp's part.
  __device__ __forceinline__ uint32_t sixteen() const { return warp_ * 2 + turn_ % 2; }
  __device__ __forceinline__ uint32_t half() const { return turn_ / 2; }

  // Makes the sums of products of those of a piece's steps whose turn is this warp's, and leaves
  // both rings behind the piece.
  __device__ __forceinline__ void multiply(const Piece &piece, Ring<Shared::kX> &x,
                                           Ring<Shared::kWeight> &weight, int32_t (&sums)[kSums]) {
    for (int32_t &sum : sums) sum = 0;
    Ring<Shared::kX> at_x = x;
    Ring<Shared::kWeight> at_weight = weight;
    advance(at_x, turn_), advance(at_weight, turn_);
    uint32_t step = piece.begin + turn_;
    OfSixteens next[kHalves];
    if (step < piece.end) load_words(at_weight, next);
#pragma unroll 1
    for (; step < piece.end; step += kTurnsOfWarps) {
      OfSixteens words[kHalves];
      for (int half = 0; half < kHalves; half++) words[half] = next[half];
      shared_.x_full[at_x.stage].wait(at_x.parity);
      const uint8_t *rows = shared_.x[at_x.stage];
      Right right[kHalves];
      load_right(rows, right[0]);
      advance(at_weight, kTurnsOfWarps);
      if (step + kTurnsOfWarps < piece.end) load_words(at_weight, next);
#pragma unroll
      for (int half = 0; half < kHalves; half++) {
        if (half + 1 < kHalves) {
          load_right(rows + (half + 1) * kRows * kHalfBytes, right[half + 1]);
        }
        multiply(words[half], right[half], sums);
      }
      release(shared_.x_empty[at_x.stage]);
      advance(at_x, kTurnsOfWarps);
    }
    advance(x, piece.end - piece.begin), advance(weight, piece.end - piece.begin);
  }

  // Adds up what all turns have of the part of the tile that this warp stores. `kBarrier`: of all
  // `kThreads` threads that multiply.
  template <int kBarrier, int kThreads>
  __device__ __forceinline__ void part(const int32_t (&sums)[kSums], int32_t (&mine)[kMine]) const {
    constexpr uint32_t kFours = kMine / 4;
    // All have read what was there before.
    named_barrier_sync(kBarrier, kThreads);
#pragma unroll
    for (uint32_t turn = 0; turn < kTurnsOfWarps; turn++) {
      const int32_t *of_turn = sums + 4 * (turn % 2 * kEights + turn / 2 * kFours);
      if (turn == turn_) {
#pragma unroll
        for (int i = 0; i < kMine; i++) mine[i] = of_turn[i];
      } else {
#pragma unroll
        for (uint32_t i = 0; i < kFours; i++) {
          shared_.of_turns.at(turn, turn_, i) = as_float4(of_turn + 4 * i);
        }
      }
    }
    named_barrier_sync(kBarrier, kThreads);
#pragma unroll
    for (uint32_t other = 1; other < kTurnsOfWarps; other++) {
#pragma unroll
      for (uint32_t i = 0; i < kFours; i++) {
        add_four(shared_.of_turns.at(turn_, (turn_ + other) % kTurnsOfWarps, i), mine + 4 * i);
      }
    }
  }

 private:
  static constexpr int kHalves = Weight::kStep / kHalfBytes;
  // Of half a step what a lane has of two sixteens of the weight's rows: of two rows of each.
  struct OfSixteens {
    Words<Weight> of[2][2];
  };
  // And of all rows of x, as right-hand sides: of eight rows of two products.
  struct Right {
    uint32_t of[kChunks / 2][kEights][4];
  };

  template <int kStages>
  static __device__ __forceinline__ void advance(Ring<kStages> &ring, uint32_t by) {
    const uint32_t stage = ring.stage + by;
    ring.parity ^= stage / kStages & 1;
    ring.stage = stage % kStages;
  }

  // Loads what the lane has of a stage, which is read then.
  __device__ __forceinline__ void load_words(const Ring<Shared::kWeight> &at,
                                             OfSixteens (&words)[kHalves]) const {
    shared_.weight_full[at.stage].wait(at.parity);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = (warp_ * 2 + i) * 16 + lane_ / 4;
      const LaneOfCodes<Weight> lane(shared_.weight[at.stage] + row * Weight::kPitch, lane_ % 4);
#pragma unroll
      for (int k = 0; k < 2 * kHalves; k++) words[k / 2].of[i][k % 2] = lane.words(k / 2, k % 2);
    }
    release(shared_.weight_empty[at.stage]);
  }

  // Rows lie as the copy engine puts them: 16 bytes `i` of a row in place `i ^ row % 8`.
  __device__ __forceinline__ void load_right(const uint8_t *rows, Right &right) const {
#pragma unroll
    for (int two = 0; two < kChunks / 2; two++) {
      const uint32_t line = (4 * two + lane_ / 8) ^ lane_ % 8;
      const uint32_t at = shared_address(rows) + lane_ % 8 * kHalfBytes + line * 16;
#pragma unroll
      for (uint32_t eight = 0; eight < kEights; eight++) {
        load_matrix_x4(at + eight * 8 * kHalfBytes, right.of[two][eight]);
      }
    }
  }

  template <int kCount, class N>
  static __device__ __forceinline__ N (&some(N *from))
      [kCount] { return reinterpret_cast<N(&)[kCount]>(*from); }

  static __device__ __forceinline__
      void multiply(const OfSixteens &words, const Right &right, int32_t (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      uint32_t left[2][4];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        left[k / 4][k % 4] = Weight::codes(words.of[k / 4][k % 2], i, k / 2 % 2);
      }
#pragma unroll
      for (uint32_t eight = 0; eight < kEights; eight++) {
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
          mma(left[j], some<2>(right.of[i / 2][eight] + i % 2 * 2),
              some<4>(sums + 4 * (j * kEights + eight)));
        }
      }
    }
  }

  Shared &shared_;
  const uint32_t warp_, turn_, lane_;
};

}  // namespace unsloth
