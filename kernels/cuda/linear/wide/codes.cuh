// Codes of 8 or 2 bits, whose scales lie apart, as left-hand sides of products of integers. Rows of
// x are rounded to codes of 8 bits.
#pragma once

#include "contract.h"
#include "linear/wide/weight.cuh"

namespace unsloth {

// What weights of codes have in common.
struct OfCodes {
  static constexpr bool kHasScales = true, kOfCodes = true;
  using Sum = int32_t;
};

// What a lane has of half a step of one row: words, of which left-hand sides are made.
template <class Weight>
struct Words {
  uint32_t of[Weight::kWords];
};

// What a lane has of a step: of rows `h` and `h + 8`.
template <class Weight>
class LaneOfCodes {
 public:
  // `row`: of the lane's two rows of a step the first, of which it is the lane `t` of four.
  __device__ __forceinline__ LaneOfCodes(const uint8_t *row, uint32_t t)
      : row_(row + 4 * t), g_(threadIdx.x % 32 / 4) {}

  // Of the half step `half`, row `h` of the two.
  __device__ __forceinline__ Words<Weight> words(int half, int h) const {
    const uint8_t *row = row_ + h * 8 * Weight::kPitch;
    Words<Weight> words;
#pragma unroll
    for (int i = 0; i < Weight::kWords; i++) {
      words.of[i] = *reinterpret_cast<const uint32_t *>(row + Weight::line(half, i, g_));
    }
    return words;
  }

  // The same as left-hand sides.
  template <int kCount>
  __device__ __forceinline__ void widen(int half, int h, uint32_t (&to)[kCount]) const {
    const Words<Weight> row = words(half, h);
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
#pragma unroll
      for (int j = 0; j < 2; j++) to[4 * i + 2 * j + h] = Weight::codes(row, i, j);
    }
  }

 private:
  const uint8_t *row_;
  uint32_t g_;
};

// Codes of 8 bits. A step of a row is two boxes of the copy engine, which it swizzles.
struct I8 : OfCodes {
  static constexpr uint32_t kCode = kDtypeI8;
  static constexpr int kStep = 256, kBytes = kStep;
  static constexpr int kBoxes = 2, kPitch = kBytes / kBoxes;
  static constexpr int kWords = 2 * kChunks;
  // A code is its weight and so much more.
  static constexpr int32_t kMore = 0;

  template <class T>
  using Lane = LaneOfCodes<I8>;

  // Where the 16 bytes of word `i` lie, in row `g` of eight: the copy engine puts line `i` of a row
  // in place `i ^ row % 8`.
  static __device__ __forceinline__ uint32_t line(int half, int i, uint32_t g) {
    return half * kColumns * kPitch + (i ^ g) * 16;
  }
  // Of product `i`, of its first 16 codes or its last.
  static __device__ __forceinline__ uint32_t codes(const Words<I8> &row, int i, int j) {
    return row.of[2 * i + j];
  }
};

// Ternary weights w, as codes w + 1 of 2 bits: 128 are a block of 32 bytes, in which byte p has the
// codes of p, p + 32, p + 64 and p + 96. A word, shifted by 2 i and masked, is what a lane has of
// product i of the block.
struct Ternary : OfCodes {
  static constexpr uint32_t kCode = kDtypeTernary;
  static constexpr int kStep = 256, kBytes = kStep / 4;
  static constexpr int kBoxes = 1, kPitch = kBytes;
  static constexpr int kWords = 2;
  static constexpr int32_t kMore = 1;

  template <class T>
  using Lane = LaneOfCodes<Ternary>;

  // The copy engine puts 16 bytes `i` of a row in place `i ^ row / 2 % 4`.
  static __device__ __forceinline__ uint32_t line(int half, int i, uint32_t g) {
    return ((2 * half + i) ^ (g / 2)) * 16;
  }
  static __device__ __forceinline__ uint32_t codes(const Words<Ternary> &row, int i, int j) {
    static_assert(kChunks == 4, "as many as a byte has codes");
    return row.of[j] >> 2 * i & 0x03030303;
  }
};

}  // namespace unsloth
