// Rounding to codes of 8 bits with a sign, by the greatest magnitude of a group.
#pragma once

#include <cstdint>

namespace unsloth {

// What the numbers of a group are divided by, and its inverse. Where all are zero, or one of them
// is NaN or infinite, they have no codes: zeros stand for these.
struct ScaleOfCodes {
  float scale, inverse;
  bool has_codes;

  // Of the bits of the greatest magnitude.
  explicit __device__ __forceinline__ ScaleOfCodes(uint32_t most)
      : scale(__uint_as_float(most) / 127),
        inverse(1 / scale),
        has_codes(isfinite(scale) && scale != 0) {}
};

// The integer nearest to a quotient, in the low byte.
__device__ __forceinline__ uint32_t divided_code(float number, float scale) {
  const float code = fminf(fmaxf(rintf(__fdiv_rn(number, scale)), -127), 127);
  return static_cast<uint32_t>(static_cast<int32_t>(code)) & 255;
}

// Of four, a byte each. It is a call, not inlined, because it is seldom needed.
static __device__ __noinline__ uint32_t divided_codes(float scale, float4 of) {
  return divided_code(of.x, scale) | divided_code(of.y, scale) << 8 |
         divided_code(of.z, scale) << 16 | divided_code(of.w, scale) << 24;
}

// The integers nearest to four or eight quotients by the scale, a byte each; no magnitude is above
// 127 scales. A product with the inverse is less than a ten-thousandth off the quotient and is
// nearest to the same integer, unless it is about as near to another: only then numbers are
// divided.
template <int kCount>
__device__ __forceinline__ uint2 nearest_codes(const ScaleOfCodes &by,
                                               const float (&numbers)[kCount]) {
  static_assert(kCount == 4 || kCount == 8, "words of codes");
  // The last bits of a sum with it are those of the nearest integer.
  constexpr float kShift = 12582912;
  uint32_t words[2] = {0, 0}, shifted[kCount];
  float off = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const float sum = __fmaf_rn(numbers[i], by.inverse, kShift);
    off = fmaxf(off, fabsf(__fmaf_rn(numbers[i], by.inverse, kShift - sum)));
    shifted[i] = __float_as_uint(sum);
  }
#pragma unroll
  for (int i = 0; i < kCount / 4; i++) {
    const uint32_t *four = shifted + 4 * i;
    words[i] = __byte_perm(__byte_perm(four[0], four[1], 0x40), __byte_perm(four[2], four[3], 0x40),
                           0x5410);
  }
  if (!by.has_codes) return {0, 0};
  // The inverse of the smallest scales is infinite.
  if (off < 0.4999f && by.inverse < INFINITY) return {words[0], words[1]};
#pragma unroll
  for (int i = 0; i < kCount / 4; i++) {
    const float *four = numbers + 4 * i;
    words[i] = divided_codes(by.scale, {four[0], four[1], four[2], four[3]});
  }
  return {words[0], words[1]};
}

// The sum of a word's codes, and another.
__device__ __forceinline__ int32_t sum_of_codes(uint32_t word, int32_t sum) {
  return __dp4a(static_cast<int32_t>(word), 0x01010101, sum);
}

}  // namespace unsloth
