// A weight like x.
#pragma once

#include "common/mma.cuh"
#include "common/vector.cuh"
#include "linear/few/arguments.h"
#include "linear/few/lines.cuh"

namespace unsloth {

// Elements of x and of the weight are multiplied in an order that both have in common: lane t of
// four has whole lines. Where blocks do not part rows, kernels that cannot take a hundredth less.
template <class T, bool kInParts>
struct Floats {
  static constexpr int32_t kDtype = static_cast<int32_t>(unsloth::kDtype<T>);
  // Elements that a warp multiplies at a time, and lines of 16 bytes of them.
  static constexpr uint32_t kStep = 64, kLines = 8, kStepBytes = kLines * 16;
  static constexpr float kSumFactor = 0;
  static constexpr bool kHasSums = false, kParts = kInParts, kTiles = false;

  static __device__ __forceinline__ uint32_t step_lines(const LinearFewArguments &) {
    return kLines;
  }
  static __device__ __forceinline__ uint32_t step_bytes(const LinearFewArguments &) {
    return kStepBytes;
  }
  static __device__ __forceinline__ uint32_t bytes_of_lines(uint32_t lines) { return lines * 16; }

  static __device__ __forceinline__ void store(uint4 *of_part, uint32_t row, uint32_t line,
                                               const uint4 &words) {
    of_part[line_of(row, line)] = words;
  }
  static __device__ __forceinline__ uint4 load(const uint4 *of_part, uint32_t row, uint32_t line) {
    return of_part[line_of(row, line)];
  }

  // The step of a tile that begins with line `first` of `end`; `rows`: of the step, `x`: the lane's
  // row.
  static __device__ __forceinline__ void multiply(const LinearFewArguments &p, const uint8_t *rows,
                                                  uint32_t first, uint32_t end, uint32_t row,
                                                  const uint4 *x, const float4 *, float (&acc)[4]) {
    // Of the last part a step may be wholly behind the row, where nothing was copied.
    const uint32_t lines = first < end ? end - first : 0;
    if (lines >= kLines) {
      multiply<true>(p.pitch, rows, lines, row, x + first, acc);
    } else {
      multiply<false>(p.pitch, rows, lines, row, x + first, acc);
    }
  }

 private:
  template <bool kWhole>
  static __device__ __forceinline__ void multiply(uint32_t pitch, const uint8_t *rows,
                                                  uint32_t lines, uint32_t row, const uint4 *of_x,
                                                  float (&acc)[4]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 *of_low = reinterpret_cast<const uint4 *>(rows + g * pitch);
    const uint4 *of_high = reinterpret_cast<const uint4 *>(rows + (g + 8) * pitch);
#pragma unroll
    for (uint32_t i = 0; i < kLines / 4; i++) {
      const uint32_t line = 4 * i + t;
      uint4 low = of_low[line], high = of_high[line];
      if (!kWhole && line >= lines) low = high = {0, 0, 0, 0};
      const uint4 x = of_x[line_of(row, line)];
      mma<T>({low.x, high.x, low.y, high.y}, {x.x, x.y}, acc);
      mma<T>({low.z, high.z, low.w, high.w}, {x.z, x.w}, acc);
    }
  }
};

}  // namespace unsloth
