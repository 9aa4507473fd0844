// Single-instruction arithmetic, on the host.
#pragma once

#include "device.h"

namespace unsloth {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

inline float exp2_approx(float x) { return flush(exp2f(x)); }
inline float log2_approx(float x) { return log2f(flush(x)); }
inline float reciprocal_approx(float x) { return flush(1 / flush(x)); }
inline float tanh_approx(float x) { return tanhf(x); }

template <class T>
uint32_t pack(float low, float high) {
  return T(low).bits | uint32_t(T(high).bits) << 16;
}

// The two numbers of a pair.
template <class T>
float2 unpack(uint32_t pair) {
  T low, high;
  low.bits = pair & 0xffff;
  high.bits = pair >> 16;
  return {float(low), float(high)};
}

// Four codes of 8-bit floats as pairs of f16.
inline void halves_of_e4m3(uint32_t codes, uint32_t (&pairs)[2]) {
  pairs[0] = __e4m3x2_to_f16x2(codes & 0xffff);
  pairs[1] = __e4m3x2_to_f16x2(codes >> 16);
}

// a - b of pairs.
template <class T>
uint32_t subtract(uint32_t a, uint32_t b) {
  const float2 left = unpack<T>(a), right = unpack<T>(b);
  return pack<T>(left.x - right.x, left.y - right.y);
}

// a b of pairs.
template <class T>
uint32_t multiply(uint32_t a, uint32_t b) {
  const float2 left = unpack<T>(a), right = unpack<T>(b);
  return pack<T>(left.x * right.x, left.y * right.y);
}

// a b + c of pairs.
template <class T>
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  const float2 left = unpack<T>(a), right = unpack<T>(b), sum = unpack<T>(c);
  return pack<T>(fmaf(left.x, right.x, sum.x), fmaf(left.y, right.y, sum.y));
}

}  // namespace unsloth
