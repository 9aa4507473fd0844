// What a block has in shared memory.
#pragma once

#include "common/mbarrier.cuh"
#include "linear/wide/by_warps.cuh"
#include "linear/wide/output.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

// Blocks of a multiprocessor: of few rows two, so that one's start and end are beside the other's
// products. For 8-bit floats and where warps multiply there are too few registers then, and for 64
// rows and weights of 8 bits rings would be too short.
template <class Weight, int kRows>
constexpr bool kIsLong = kRows == 64 && Weight::kBytes >= 256;
template <class Weight, int kRows>
constexpr int kBlocks = kRows <= kFewRows && (Weight::kOfCodes || !Weight::kHasScales) &&
                                !kIsLong<Weight, kRows> && !kByWarps<Weight, kRows>
                            ? 2
                            : 1;

// Bytes of a block's rings at most: beside them are barriers, sums on their way to be stored, and
// what belongs to codes of x.
template <class Weight, int kRows>
constexpr int kRoom = (kBlocks<Weight, kRows> == 2 ? 101
                       : kByWarps<Weight, kRows>   ? 180
                       : Weight::kOfCodes          ? 212
                                                   : 215) *
                      1024;
// Of x, stages at most, and half steps of a stage.
template <class Weight, int kRows>
constexpr int kMostX = kRows == 256                  ? 5
                       : kRows == 128                ? 8
                       : kByWarps<Weight, kRows>     ? 20
                       : kBlocks<Weight, kRows> == 1 ? 10
                       : kRows == 64                 ? 6
                                                     : 12;
template <class Weight, int kRows>
constexpr int kHalvesOfStage = kByWarps<Weight, kRows> ? Weight::kStep / kHalfBytes : 1;

// Rows of x that are copied together, as a box. A last tile's boxes behind x are left out: the copy
// engine fills them with zeros, which takes it longer than rows of x do. What shared memory has in
// their place is multiplied, and those sums are not stored.
template <int kRows>
constexpr int kBoxRows = kRows >= 128  ? 64
                         : kRows == 16 ? 16
                                       : 32;

template <class Weight, int kRows>
struct alignas(1024) SharedTiles {
  static constexpr int kXBytes = kHalvesOfStage<Weight, kRows> * kRows * kHalfBytes;
  static constexpr int kWeightBytes = Weight::kBoxes * kColumns * Weight::kPitch;
  // Stages of both rings: of the weight, at least two and as many as there is room for. Where warps
  // take turns, a stage is of one turn throughout a tile, and all meet between tiles. A barrier
  // tells even phases from odd ones alone: to a warp that waits for a stage's next copy before the
  // last has come, which it has not waited for, the next one seems to be there.
  static constexpr int kTurns = kByWarps<Weight, kRows> ? kTurnsOfWarps : 1;
  static constexpr int kLeast = kTurns == 1 ? 2 : kTurns, kMost = kTurns == 1 ? 8 : 12;
  static constexpr int stages_of_x() {
    int stages = kMostX<Weight, kRows>;
    while (kRoom<Weight, kRows> - stages * kXBytes < kLeast * kWeightBytes) stages -= kTurns;
    return stages;
  }
  static constexpr int kX = stages_of_x();
  static constexpr int kFit = (kRoom<Weight, kRows> - kX * kXBytes) / kWeightBytes;
  static constexpr int kWeight = kFit < kMost ? kFit / kTurns * kTurns : kMost;
  static_assert(kX >= 2 && kX % kTurns == 0, "one is copied while one is multiplied");
  union {
    struct {
      uint8_t x[kX][kXBytes];
      uint8_t weight[kWeight][kWeightBytes];
    };
    // Sums as threads have them, by rows of x: of few rows all, of many half.
    float4 shares[kRows / (kRows <= kFewRows ? 8 : 16)][kPair];
  };
  OfTurns<kByWarps<Weight, kRows> ? kRows : 0> of_turns;
  alignas(16) Leaving leaving[kConsumers<Weight, kRows> / 32];
  OfRows<Weight::kOfCodes ? kRows : 1> of_rows;
  Mbarrier x_full[kX], x_empty[kX], weight_full[kWeight], weight_empty[kWeight];
  Mbarrier of_rows_full, of_rows_empty;
};

// What a block needs, with what aligns the struct, and what it may ask for, to be alone on a
// multiprocessor.
template <class Weight, int kRows>
constexpr int kNeededBytes = sizeof(SharedTiles<Weight, kRows>) + 1024;
constexpr int kSharedBytes = 227 * 1024;

// One lane per warp arrives, once the whole warp is past the instruction before.
__device__ __forceinline__ void release(Mbarrier &barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

}  // namespace unsloth
