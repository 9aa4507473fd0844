// Cosine and sine of an angle by which a pair of components turns. To the bit what
// `kernels/src/math.rs` computes.
#pragma once

#include <cstdint>

#include "contract.h"

namespace unsloth {

struct Turn {
  float cos, sin;
};

// To 1.6 units in the last place of the larger of the two, for angles up to 2^45.
__device__ __forceinline__ Turn turn_by(float angle) {
  // The reduction is in f64, where an f32 angle and the multiples of pi/2 near it leave bits to
  // spare.
  const double wide = angle;
  const double n = rint(wide * 0.63661977236758134308);
  const double high = fma(n, -1.57079632679489661923, wide);
  const float r = static_cast<float>(fma(n, -6.123233995736766e-17, high));
  const float s = r * r;
  float sine = fmaf(2.7182373e-6f, s, -1.9839327e-4f);
  sine = fmaf(sine, s, 8.333329e-3f);
  sine = fmaf(sine, s, -0.16666667f);
  sine = fmaf(r * s, sine, r);
  float cosine = fmaf(2.443773e-5f, s, -1.3887361e-3f);
  cosine = fmaf(cosine, s, 4.1666647e-2f);
  cosine = fmaf(s * s, cosine, fmaf(-0.5f, s, 1.0f));
  // Odd quadrants exchange the two, and the signs follow.
  const int64_t quadrant = static_cast<int64_t>(n);
  const bool odd = quadrant & 1;
  Turn turn = {odd ? sine : cosine, odd ? cosine : sine};
  if (quadrant & 2) turn.sin = -turn.sin;
  if ((quadrant + 1) & 2) turn.cos = -turn.cos;
  return turn;
}

// By what a pair turns at a position, as a rotation's arguments say; NaN outside a table.
template <class Arguments>
__device__ __forceinline__ Turn turn_of_pair(const Arguments &p, int64_t position, uint32_t pair,
                                             float frequency) {
  Turn turn = {__uint_as_float(0x7fc00000), __uint_as_float(0x7fc00000)};
  if (p.angle_kind == static_cast<uint32_t>(AngleKind::kTable)) {
    // A negative position is a great one without its sign.
    const uint64_t row = position;
    if (row < p.table_rows) {
      turn = {p.cos_table[row * p.cos_stride + pair], p.sin_table[row * p.sin_stride + pair]};
    }
  } else {
    turn = turn_by(static_cast<float>(position) * frequency);
    turn.cos *= p.scale;
    turn.sin *= p.scale;
  }
  turn.sin *= p.direction;
  return turn;
}

// The frequency of a pair.
template <class Arguments>
__device__ __forceinline__ float frequency_of(const Arguments &p, uint32_t pair) {
  const float frequency = p.frequencies[pair];
  return p.angle_kind == static_cast<uint32_t>(AngleKind::kFactors) ? frequency / p.factors[pair]
                                                                    : frequency;
}

// A pair turned: fused by hand, so that every kernel rounds alike.
__device__ __forceinline__ float2 turned(float a, float b, const Turn &by) {
  return {fmaf(a, by.cos, -(b * by.sin)), fmaf(b, by.cos, a * by.sin)};
}

}  // namespace unsloth
