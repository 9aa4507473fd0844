// Those of a block who have the copy engine copy what others multiply.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/named_barrier.cuh"
#include "common/tag.cuh"
#include "common/tma.cuh"
#include "linear/wide/arguments.h"
#include "linear/wide/pieces.cuh"
#include "linear/wide/shared.cuh"

namespace unsloth {

// What a launch is of, where rows are parted among two: of the first rows, or of the rest beside
// it, which is launched next.
constexpr uint32_t kFirst = 1, kRest = 2;
// The barrier of all that multiply and the warp that tells another block what they have left.
constexpr int kHandedBarrier = 4;

// Waits for what is multiplied. Once that is there, a launch for the rest of the rows has nothing
// to wait for: it is started then, beside this one.
__device__ __forceinline__ void await_inputs(const LinearWideArguments &p) {
  if (p.launch == kRest) {
    // What this multiprocessor has cached of them may be older.
    __threadfence();
    return;
  }
  await_previous_kernel();
  if (p.launch == kFirst) let_next_kernel_start();
}

// The first column of a tile.
__device__ __forceinline__ uint32_t column_of(const LinearWideArguments &p, uint32_t tile) {
  return tile / p.row_tiles * kColumns;
}
// And its first row of x.
template <int kRows>
__device__ __forceinline__ uint32_t row_of(const LinearWideArguments &p, uint32_t tile) {
  return tile % p.row_tiles * kRows;
}

// Whether the block stores what it has of a tile, or hands it over.
__device__ __forceinline__ bool is_stored(const LinearWideArguments &p, const Piece &piece) {
  return p.parts != 1 || piece.begin == 0;
}

// A whole warp has each of these parts. A warp that did all of it took 450 ns to ask for a step,
// longer than few rows by codes take to be multiplied (LADDER.md).
template <class Weight, class T, int kRows>
class Copies {
 public:
  using Shared = SharedTiles<Weight, kRows>;

  __device__ __forceinline__ Copies(const LinearWideArguments &p, Shared &shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  // Asks for all steps of the weight: if it is constant, before the kernel before has ended.
  __device__ __forceinline__ void ask_for_weight() {
    Ring<Shared::kWeight> ring;
    Pieces pieces(p_);
    Piece piece;
    while (pieces.next(piece)) {
      const uint32_t column = once(column_of(p_, piece.tile));
      for (uint32_t step = piece.begin; step < piece.end; step++) ask_weight(ring, step, column);
    }
  }

  // Asks for all steps of x.
  __device__ __forceinline__ void ask_for_x() {
    Ring<Shared::kX> ring;
    Pieces pieces(p_);
    Piece piece;
    while (pieces.next(piece)) {
      const uint32_t row = once(row_of<kRows>(p_, piece.tile));
      const uint32_t rows = min(p_.rows - row, static_cast<uint32_t>(kRows));
      const uint32_t boxes = once((rows + kBox - 1) / kBox);
      await_inputs(p_);
      for (uint32_t step = piece.begin; step < piece.end; step++) ask_x(ring, step, row, boxes);
    }
  }

  // For a tile that this block stores, asks for the scales and sums of its rows of x. For one that
  // it hands over, waits until all that multiply have left their sums, and tells the other block,
  // while they go on.
  __device__ __forceinline__ void ask_for_scales_or_tell() {
    uint32_t of_rows = 0;
    Pieces pieces(p_);
    Piece piece;
    while (pieces.next(piece)) {
      await_inputs(p_);
      if (!is_stored(p_, piece)) {
        named_barrier_sync(kHandedBarrier, kConsumers<Weight, kRows> + 32);
        if (lane_ == 0) store_tag(&p_.left[pieces.share()], p_.launch_tag);
      } else if (Weight::kOfCodes) {
        shared_.of_rows_empty.wait(of_rows ^ 1);
        ask_of_rows(row_of<kRows>(p_, piece.tile));
        of_rows ^= 1;
      }
    }
  }

 private:
  static constexpr uint32_t kBox = kBoxRows<kRows>;
  static constexpr int kHalves = Weight::kStep * sizeof(T) / kHalfBytes;
  // Of a stage.
  static constexpr int kTogether = kHalvesOfStage<Weight, kRows>;

  // A number that the compiler does not compute again where it is used: it takes the division that
  // the number is made by into the loop of requests otherwise.
  static __device__ __forceinline__ uint32_t once(uint32_t number) {
    asm volatile("" : "+r"(number));
    return number;
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
  __device__ __forceinline__ void ask_x(Ring<Shared::kX> &ring, uint32_t step, uint32_t row,
                                        uint32_t boxes) {
    for (int half = 0; half < kHalves; half += kTogether) {
      Mbarrier &full = shared_.x_full[ring.stage];
      shared_.x_empty[ring.stage].wait(ring.parity ^ 1);
      if (lane_ == 0) full.arrive_expect(boxes * kBox * kTogether * kHalfBytes);
      __syncwarp();
#pragma unroll 1
      for (uint32_t box = 0; box < boxes; box++) {
        const uint32_t to = shared_address(shared_.x[ring.stage]) + box * kBox * kHalfBytes;
        if (Weight::kOfCodes) {
          // Rows of codes are whole halves of steps.
          tma_load_4d(to, &p_.x, &full, kEvictLast, 0, row + box * kBox, step * kHalves + half, 0);
        } else {
          tma_load_4d(to, &p_.x, &full, kEvictLast, (step * kHalves + half) * kHalf,
                      row + box * kBox, 0, 0);
        }
      }
      ring.advance();
    }
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

  const LinearWideArguments &p_;
  Shared &shared_;
  const uint32_t lane_;
};

}  // namespace unsloth
