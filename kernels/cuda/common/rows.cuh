// Rows of strided tensors: up to three row dimensions, of which the last two may be absent (size
// 1).
#pragma once

#include <cstdint>

namespace unsloth {

// Of one tensor, in bytes.
struct Strides {
  int64_t d0, d1, d2;
};

// n / size by multiplication, for n below 2^31 (Granlund and Montgomery, "Division by invariant
// integers using multiplication", 1994); the host computes multiplier and shift.
__device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t multiplier, uint32_t shift) {
  return (__umulhi(n, multiplier) + n) >> shift;
}

// Bytes from a tensor's first row to row `row`, counted in row-major order. `p` has the sizes of
// the last two dimensions as divisors.
template <class Arguments>
__device__ __forceinline__ int64_t row_start(uint32_t row, const Strides &by, const Arguments &p) {
  if (p.size_1 == 1) return row * by.d0;  // equally spaced
  const uint32_t outer = divide(row, p.size_2_multiplier, p.size_2_shift);
  const uint32_t i2 = row - outer * p.size_2;
  const uint32_t i0 = divide(outer, p.size_1_multiplier, p.size_1_shift);
  const uint32_t i1 = outer - i0 * p.size_1;
  return i0 * by.d0 + i1 * by.d1 + i2 * by.d2;
}

}  // namespace unsloth
