// What a score may have beyond its scale, of kernels that compute dQ apart from dK and dV: a cap
// and ALiBi. Scores are in units of 1 / scale_log2 until they become exponents; capped ones are in
// units of the cap, which scale_log2 then has in the place of the scale.
#pragma once

#include "attention/backward/arguments.h"
#include "common/math.cuh"

namespace unsloth {

// tanh(x scale) = 1 - 2 / (1 + e^(2 x scale)), which becomes x; its derivative is 1 - x^2.
__device__ __forceinline__ float cap(float x, float scale) {
  return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * kLog2E * scale * x)), 1.0f);
}

// Of a query head, what a key's distance takes from a score.
__device__ __forceinline__ float slope_at(const AttentionGradientsArguments &p, int batch,
                                          int head) {
  if (p.alibi_slopes == nullptr) return 0.0f;
  return p.alibi_slopes[batch * p.alibi_batch_stride + head] * p.alibi_factor;
}

}  // namespace unsloth
