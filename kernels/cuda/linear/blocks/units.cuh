// Rows of a weight in blocks, and the way of their bytes to shared memory.
//
// 16 rows and some neighbouring blocks of each are a unit. A warp copies its bytes as they lie in
// memory, 16 at a time whatever a block's size.
#pragma once

#include "common/async_copy.cuh"
#include "common/blocks.cuh"
#include "linear/blocks/arguments.h"

namespace unsloth {

// Rows of the weight of a unit: columns of the output.
constexpr int kColumns = 16;

// A unit: blocks of 16 rows.
template <Blocks kBlocks>
struct Unit {
  using F = Format<kBlocks>;
  static constexpr bool kTernary =
      kBlocks == Blocks::kTq1_0 || kBlocks == Blocks::kTq2_0 || kBlocks == Blocks::kQ2_0;
  static constexpr int kWeights = kTernary ? 512 : 256;
  static constexpr int kCount = kWeights / F::kLength;
  static constexpr int kBytes = kCount * F::kBytes;
  // Lines of 16 bytes that a row's bytes touch, at least, and wherever they begin.
  static constexpr int kLeastLines = (kBytes + 15) / 16;
  static constexpr int kMostLines = (kBytes + 14 + 15) / 16;
  // Odd, so that the same word of eight rows lies in different banks.
  static constexpr int kPitch = kMostLines / 2 * 2 + 1;
  static constexpr int kSlotBytes = kColumns * kPitch * 16;
  // Whether units of rows in whole lines are whole lines.
  static constexpr bool kIsLines = kBytes % 16 == 0;
  // From row to row of such a unit in its slot.
  static constexpr int kLinePitch = kLeastLines / 2 * 2 + 1;
  // Of a lane, which copies every 32nd line of such a unit.
  static constexpr int kCopies = (kLeastLines * kColumns + 31) / 32;
};

// Where rows of the weight lie: anywhere; where words of its blocks may; in whole lines of 16
// bytes.
enum Aligned : uint32_t { kBytes, kWords, kLines };

// Some blocks of one row in shared memory, from `at` on. `kAlignment`: of `row` and of words in
// blocks; or of `row` alone, if that is four.
template <int kAlignment, bool kRowAligned>
struct Staged {
  const uint8_t *row;
  uint32_t at;

  __device__ __forceinline__ uint32_t byte(uint32_t i) const { return row[at + i]; }

  __device__ __forceinline__ uint32_t half(uint32_t i) const {
    return *reinterpret_cast<const uint16_t *>(row + at + i);
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t i) const {
    const auto word = [&](uint32_t byte) {
      return *reinterpret_cast<const uint32_t *>(row + byte);
    };
    const uint32_t from = at + i;
    if (kAlignment == 4) return word(from);
    // Known to the compiler.
    if (kRowAligned && from % 4 == 0) return word(from);
    if (kRowAligned) return __byte_perm(word(from - 2), word(from + 2), 0x5432);
    return half(i) | half(i + 2) << 16;
  }
};

// The weight, as a lane of a warp sees it.
template <Blocks kBlocks>
class Units {
 public:
  __device__ __forceinline__ Units(const LinearBlocksArguments &p, uint32_t lane)
      : p_(p),
        lane_(lane),
        row_bytes_(p.blocks * F::kBytes),
        columns_(p.gated != 0 ? kColumns / 2 : kColumns),
        turn_(p.gated != 0 ? p.up_offset - kColumns / 2 * p.weight_stride : 0) {}

  // Columns of the output that a tile has: of gated ones eight rows are the gate's, and eight are
  // of what it gates.
  __device__ __forceinline__ uint32_t columns() const { return columns_; }

  // Starts to copy the unit of rows from `columns` on, of which so many are there, in each half of
  // gated ones.
  __device__ __forceinline__ void copy(uint8_t *slot, uint32_t columns, uint32_t there,
                                       uint32_t step) const {
    const uint32_t first = step * U::kBytes;
    const uint32_t last = min(first + U::kBytes, row_bytes_);
    if (p_.aligned == kLines) {
      const uint32_t lines = (last + 15) / 16 - first / 16;
      const uint8_t *from = row_at(columns) + first / 16 * 16;
      if (there == columns_ && lines == U::kLeastLines) {
        copy_tile<U::kLeastLines>(slot, from);
      } else if (there == columns_ && U::kMostLines > U::kLeastLines && lines == U::kMostLines) {
        copy_tile<U::kMostLines>(slot, from);
      } else {
        const uint32_t row = lane_ / 2;
        from += row * p_.weight_stride + (row >= kColumns / 2 ? turn_ : 0);
        const bool is_there = (row & (columns_ - 1)) < there;
#pragma unroll 1
        for (uint32_t i = lane_ % 2; i < lines && is_there; i += 2) {
          start_copy(slot + (row * U::kPitch + i) * 16, from + i * 16);
        }
      }
    } else if (p_.aligned == kWords) {
      const uint32_t row = lane_ / 2;
      if (row < there) {
        copy_lines(p_, slot + row * U::kPitch * 16, row_at(columns + row), step);
      }
    } else {
      // A byte at a time, from wherever it is.
#pragma unroll 1
      for (uint32_t i = 0; i < there; i++) {
        const uint8_t *from = row_at(columns + i) + first;
#pragma unroll 1
        for (uint32_t byte = lane_; byte < last - first; byte += 32) {
          slot[i * U::kPitch * 16 + byte] = from[byte];
        }
      }
    }
  }

  // Whether offsets in the weight, and in what it gates, have 32 bits.
  __device__ __forceinline__ bool is_short() const {
    const int64_t up = p_.gated != 0 ? p_.up_offset : 0;
    return up >= 0 && up + p_.out_features * p_.weight_stride < 1ll << 32;
  }

  // Where a lane's lines of a tile of whole units begin, the tile's first row being that of
  // `columns`: copies of its units differ by the step alone.
  __device__ __forceinline__ void find_lines(uint32_t columns,
                                             uint32_t (&lines)[Unit<kBlocks>::kCopies]) const {
#pragma unroll
    for (uint32_t i = 0; i < U::kCopies; i++) {
      const uint32_t line = lane_ + 32 * i, row = line / U::kLeastLines;
      const int64_t at = (columns + row) * p_.weight_stride + (row >= kColumns / 2 ? turn_ : 0);
      lines[i] = static_cast<uint32_t>(at) + line % U::kLeastLines * 16;
    }
  }

  // Starts to copy such a unit.
  __device__ __forceinline__ void copy(uint8_t *slot,
                                       const uint32_t (&lines)[Unit<kBlocks>::kCopies],
                                       uint32_t step) const {
    constexpr uint32_t kLast = U::kLeastLines * kColumns - 32 * (U::kCopies - 1);
    const uint8_t *from = p_.weight + step * U::kBytes;
    slot += lane_ * 16;
#pragma unroll
    for (uint32_t i = 0; i < U::kCopies; i++) {
      const uint32_t row = (lane_ + 32 * i) / U::kLeastLines;
      if (i + 1 < U::kCopies || kLast == 32 || lane_ < kLast) {
        start_copy(slot + i * 512 + row * (U::kLinePitch - U::kLeastLines) * 16, from + lines[i]);
      }
    }
  }

  // Where row `row` of a unit begins in its slot; `columns` as above.
  __device__ __forceinline__ const uint8_t *row_of(const uint8_t *slot, uint32_t columns,
                                                   uint32_t row, uint32_t step) const {
    const uint8_t *bytes = slot + row * U::kPitch * 16;
    if (p_.aligned == kWords) {
      const auto from = row_at(columns + row);
      bytes += (static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) + step * U::kBytes) % 16;
    } else if (U::kBytes % 16 != 0 && p_.aligned == kLines) {
      bytes += step * U::kBytes % 16;
    }
    return bytes;
  }

  // Blocks of a row that a unit has.
  __device__ __forceinline__ uint32_t count(uint32_t step) const {
    return min(static_cast<uint32_t>(U::kCount), p_.blocks - step * U::kCount);
  }

  // Whether its rows begin at multiples of 16 bytes in their slot.
  __device__ __forceinline__ bool are_lines() const {
    return U::kBytes % 16 == 0 && p_.aligned == kLines;
  }

 private:
  using F = Format<kBlocks>;
  using U = Unit<kBlocks>;

  __device__ __forceinline__ const uint8_t *row_at(uint32_t column) const {
    return p_.weight + column * p_.weight_stride;
  }

  // Copies the lines of 16 rows, so that neighbouring lanes have neighbouring ones: as few
  // requests as can be, which are what bounds a multiprocessor's reading.
  template <uint32_t kOfRow>
  __device__ __forceinline__ void copy_tile(uint8_t *slot, const uint8_t *from) const {
    const int64_t gap = p_.weight_stride - kOfRow * 16;
    slot += lane_ * 16;
    from += lane_ * 16;
#pragma unroll
    for (uint32_t i = 0; i < kOfRow * kColumns; i += 32) {
      const uint32_t row = (lane_ + i) / kOfRow;
      if (i + 32 <= kOfRow * kColumns || row < kColumns) {
        start_copy(slot + row * (U::kPitch - kOfRow) * 16 + i * 16,
                   from + row * gap + i * 16 + (row >= kColumns / 2 ? turn_ : 0));
      }
    }
  }

  // Copies what a lane has of a row's blocks: lines of which all bytes are the weight's.
  static __device__ __noinline__ void copy_lines(const LinearBlocksArguments &p, uint8_t *to,
                                                 const uint8_t *row, uint32_t step) {
    const uint32_t row_bytes = p.blocks * F::kBytes, lane = threadIdx.x % 32;
    const uint32_t ahead = reinterpret_cast<uintptr_t>(row) % 16;
    const uint32_t first = ahead + step * U::kBytes;
    const uint32_t last = min(first + U::kBytes, ahead + row_bytes);
    const uint8_t *aligned = row - ahead;
    // Lines of 16 bytes, counted from there, that belong to the unit, and to the weight.
    const uint32_t begin = first / 16, end = (last + 15) / 16;
    const bool after = p.gapless && row > p.weight;
    const bool before = p.gapless && row + row_bytes < p.weight + p.weight_bytes;
    const uint32_t least = after ? 0 : (ahead + 15) / 16;
    const uint32_t most = (ahead + row_bytes + (before ? 15 : 0)) / 16;
    const uint32_t line = begin + lane % 2;
    const uint8_t *from = aligned + static_cast<uint64_t>(line) * 16;
    to += lane % 2 * 16;
#pragma unroll
    for (uint32_t i = 0; i < (U::kMostLines + 1) / 2; i++) {
      const uint32_t at = line + 2 * i;
      if (at >= least && at < min(end, most)) start_copy(to + i * 32, from + i * 32);
    }
    if (begin >= least && end <= most) return;
    // The first and the last line of the weight, or of a row if there are gaps: what is there of
    // them.
#pragma unroll 1
    for (uint32_t i = 0; i < (U::kMostLines + 1) / 2; i++) {
      const uint32_t at = line + 2 * i;
      if (at >= end || (at >= least && at < most)) continue;
#pragma unroll 1
      for (uint32_t byte = at * 16; byte < at * 16 + 16; byte += 2) {
        if (byte >= ahead && byte < ahead + row_bytes) {
          *reinterpret_cast<uint16_t *>(to + i * 32 + byte % 16) =
              *reinterpret_cast<const uint16_t *>(aligned + byte);
        }
      }
    }
  }

  const LinearBlocksArguments &p_;
  const uint32_t lane_, row_bytes_, columns_;
  // From where a tile's row 8 would be to where it is.
  const int64_t turn_;
};

}  // namespace unsloth
