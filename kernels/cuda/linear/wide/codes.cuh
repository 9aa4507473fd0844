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

// Codes of 8 bits. A step of a row is two boxes of the copy engine, which it swizzles.
struct I8 : OfCodes {
  static constexpr uint32_t kCode = kDtypeI8;
  static constexpr int kStep = 256, kBytes = kStep;
  static constexpr int kBoxes = 2, kPitch = kBytes / kBoxes;
  // A code is its weight and so much more.
  static constexpr int32_t kMore = 0;

  template <class T>
  class Lane {
   public:
    // `row`: of the lane's two rows of a step the first, of which it is the lane `t` of four.
    __device__ __forceinline__ Lane(const uint8_t *row, uint32_t t)
        : row_(row + 4 * t), g_(threadIdx.x % 32 / 4) {}

    // Of the half step `half` as left-hand sides: row `h` of the two.
    __device__ __forceinline__ void widen(int half, int h, uint32_t (&to)[kLeft]) const {
      const uint8_t *row = row_ + half * kColumns * kPitch + h * 8 * kPitch;
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        // The copy engine puts line `i` of a row in place `i ^ row % 8`.
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint8_t *line = row + ((2 * i + j) ^ g_) * 16;
          to[4 * i + 2 * j + h] = *reinterpret_cast<const uint32_t *>(line);
        }
      }
    }

   private:
    const uint8_t *row_;
    uint32_t g_;
  };
};

// Ternary weights w, as codes w + 1 of 2 bits: 128 are a block of 32 bytes, in which byte p has the
// codes of p, p + 32, p + 64 and p + 96. A word, shifted by 2 i and masked, is what a lane has of
// product i of the block.
struct Ternary : OfCodes {
  static constexpr uint32_t kCode = kDtypeTernary;
  static constexpr int kStep = 256, kBytes = kStep / 4;
  static constexpr int kBoxes = 1, kPitch = kBytes;
  static constexpr int32_t kMore = 1;

  template <class T>
  class Lane {
   public:
    __device__ __forceinline__ Lane(const uint8_t *row, uint32_t t)
        : row_(row + 4 * t), g_(threadIdx.x % 32 / 4) {}

    __device__ __forceinline__ void widen(int half, int h, uint32_t (&to)[kLeft]) const {
      static_assert(kChunks == 4, "as many as a byte has codes");
      const uint8_t *row = row_ + h * 8 * kPitch;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        // The copy engine puts 16 bytes `i` of a row in place `i ^ row / 2 % 4`.
        const uint8_t *line = row + ((2 * half + j) ^ (g_ / 2)) * 16;
        const uint32_t word = *reinterpret_cast<const uint32_t *>(line);
#pragma unroll
        for (int i = 0; i < kChunks; i++) to[4 * i + 2 * j + h] = word >> 2 * i & 0x03030303;
      }
    }

   private:
    const uint8_t *row_;
    uint32_t g_;
  };
};

}  // namespace unsloth
