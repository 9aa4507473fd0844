// 8-bit floats (e4m3) as left-hand sides of wgmma.
#pragma once

#include "common/e4m3.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

// Weights of a row that are copied at a time; bytes of a row in shared memory, which the copy
// engine swizzles.
struct E4m3 {
  static constexpr uint32_t kCode = 0;
  static constexpr int kStep = 128;
  static constexpr int kBytes = kStep, kPitch = kStep;
  static constexpr bool kHasScales = true;
  using Sum = float;
  static constexpr bool kOfCodes = false;
  static constexpr int kBoxes = 1;
  template <class T>
  static constexpr float kUnit = kUnitOfE4m3<T>;

  // A lane's two rows of a step, eight apart, from `row` on.
  template <class T>
  struct Lane {
    const uint8_t *row;
    uint32_t g;

    __device__ __forceinline__ Lane(const uint8_t *first, uint32_t t)
        : row(first + 2 * t), g(threadIdx.x % 32 / 4) {}

    // Of the half step `half`, which the compiler knows, as left-hand sides: row `h` of the two.
    __device__ __forceinline__ void widen(int half, int h, uint32_t (&to)[kLeft]) const {
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        // The copy engine puts line `i` of a row in place `i ^ row % 8`.
        const uint8_t *line = row + h * 8 * kPitch + ((half * kChunks + i) ^ g) * 16;
        uint32_t pairs[2];
        pairs_of_e4m3<T>(four_of_sixteen(line), pairs);
        to[4 * i + h] = pairs[0], to[4 * i + 2 + h] = pairs[1];
      }
    }
  };
};

}  // namespace unsloth
