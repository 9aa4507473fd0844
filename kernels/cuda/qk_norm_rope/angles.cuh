// The angles of a token, which a warp computes together and each of its lanes then has for its own
// pairs. To the bit what `kernels/src/rotation.rs` computes.
#pragma once

#include "common/rows.cuh"
#include "contract.h"
#include "qk_norm_rope/arguments.h"

namespace unsloth {

using Arguments = QkNormRopeRingArguments;

struct Turn {
  float cos, sin;
};

// Cosine and sine to 1.6 units in the last place of the larger of the two, for angles up to 2^45.
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

// Of heads with so many pairs, of which a lane turns kPart in a row.
template <int kPairs, int kPart>
struct Angles {
  // Pairs whose angles a lane computes for all.
  static constexpr int kOwn = kPairs / 32;

  const Arguments &p;
  float *shared;  // cosines, then sines
  float frequency[kOwn];
  // Of this lane's pairs.
  float cos[kPart], sin[kPart];

  __device__ __forceinline__ Angles(const Arguments &p, float *shared) : p(p), shared(shared) {
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
      const uint32_t pair = threadIdx.x % 32 + 32 * j;
      frequency[j] = p.frequencies[pair];
      if (p.angle_kind == static_cast<uint32_t>(AngleKind::kFactors)) {
        frequency[j] /= p.factors[pair];
      }
    }
  }

  // Where a token stands.
  __device__ __forceinline__ int64_t position_of(uint32_t token) const {
    const uint32_t batch = divide(token, p.tokens_per_batch_multiplier, p.tokens_per_batch_shift);
    const uint32_t in_batch = token - batch * p.tokens_per_batch;
    if (p.position_kind == static_cast<uint32_t>(PositionKind::kFrom)) {
      return p.position_first + in_batch;
    }
    const uint64_t at = batch * p.position_batch + in_batch * p.position_token;
    if (p.position_kind == static_cast<uint32_t>(PositionKind::kI32)) {
      return static_cast<const int32_t *>(p.positions)[at];
    }
    return static_cast<const int64_t *>(p.positions)[at];
  }

  // Those of a position, of which the lane's first pair is `first`. By all of a warp.
  __device__ __forceinline__ void turn_to(int64_t position, uint32_t first) {
    Turn turns[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
      const uint32_t pair = threadIdx.x % 32 + 32 * j;
      if (p.angle_kind == static_cast<uint32_t>(AngleKind::kTable)) {
        // A negative position is a great one without its sign; NaN outside the table.
        const uint64_t row = position;
        turns[j] = {__uint_as_float(0x7fc00000), __uint_as_float(0x7fc00000)};
        if (row < p.table_rows) {
          turns[j] = {p.cos_table[row * p.cos_stride + pair],
                      p.sin_table[row * p.sin_stride + pair]};
        }
      } else {
        turns[j] = turn_by(static_cast<float>(position) * frequency[j]);
        turns[j].cos *= p.scale;
        turns[j].sin *= p.scale;
      }
      turns[j].sin *= p.direction;
    }
    // The angles of the token before have been read.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
      const uint32_t pair = threadIdx.x % 32 + 32 * j;
      shared[pair] = turns[j].cos;
      shared[kPairs + pair] = turns[j].sin;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
      const float4 c = *reinterpret_cast<const float4 *>(shared + first + i);
      const float4 s = *reinterpret_cast<const float4 *>(shared + kPairs + first + i);
      cos[i] = c.x, cos[i + 1] = c.y, cos[i + 2] = c.z, cos[i + 3] = c.w;
      sin[i] = s.x, sin[i + 1] = s.y, sin[i + 2] = s.z, sin[i + 3] = s.w;
    }
  }
};

}  // namespace unsloth
