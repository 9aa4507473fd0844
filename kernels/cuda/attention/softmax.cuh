// Online softmax over score tiles held as wgmma accumulators: thread's row i in {0, 1} has scores
// s[4j + 2i + c]; a row is spread over the four lanes of a quad.
#pragma once

#include <cmath>

#include "../common/math.cuh"

namespace unsloth {

// exp(s - max) may exceed one: the reference value of a row is only raised, and what was summed under
// the old one only rescaled, when a score passes it by more than this many powers of two. Sums are
// f32 and the log-sum-exp uses the same reference, so nothing is lost, and after the first few
// blocks no row rescales.
constexpr float kMaxSlack = 8.0f;

struct SoftmaxRows {
  float max[2];  // reference value, in units of the scores
  float sum[2];  // this thread's part of the sum
};

template <int N>
__device__ __forceinline__ void quad_row_max(const float (&s)[N], float (&top)[2]) {
  // Two chains per row: fmaxf has latency, and the compiler keeps the order written.
  float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int j = 4; j < N; j += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = fmaxf(part[i], s[j + i]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = fmaxf(part[2 * i], part[2 * i + 1]);
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    top[i] = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  }
}

// Replaces scores by exp2(s * scale - reference) and adds them up. Rows whose every score so far is
// masked have reference -inf, for which 0 stands in.
template <int N>
__device__ __forceinline__ void exponentiate(float (&s)[N], SoftmaxRows &rows, float scale_log2) {
  float offset[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    offset[i] = rows.max[i] == -INFINITY ? 0.0f : -rows.max[i] * scale_log2;
  }
  float part[4] = {rows.sum[0], 0.0f, rows.sum[1], 0.0f};
#pragma unroll
  for (int j = 0; j < N; j += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[j + i] = exp2_approx(fmaf(s[j + i], scale_log2, offset[i / 2]));
      part[i] += s[j + i];
    }
  }
  rows.sum[0] = part[0] + part[1];
  rows.sum[1] = part[2] + part[3];
}

template <int N>
__device__ __forceinline__ void softmax_first(float (&s)[N], SoftmaxRows &rows, float scale_log2) {
  quad_row_max(s, rows.max);
  rows.sum[0] = rows.sum[1] = 0.0f;
  exponentiate(s, rows, scale_log2);
}

// Returns whether what was accumulated so far must be multiplied by alpha (the same answer in all
// lanes of the warp, so that the branch does not diverge).
template <int N>
__device__ __forceinline__ bool softmax_next(float (&s)[N], SoftmaxRows &rows, float scale_log2,
                                             float (&alpha)[2]) {
  float top[2];
  quad_row_max(s, top);
  const bool grew = (top[0] - rows.max[0]) * scale_log2 > kMaxSlack ||
                    (top[1] - rows.max[1]) * scale_log2 > kMaxSlack;
  const bool rescale = __any_sync(0xffffffff, grew);
  if (rescale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float raised = fmaxf(rows.max[i], top[i]);
      // Both -inf: nothing was accumulated, any factor does.
      alpha[i] = raised == -INFINITY ? 1.0f : exp2_approx((rows.max[i] - raised) * scale_log2);
      rows.max[i] = raised;
      rows.sum[i] *= alpha[i];
    }
  }
  exponentiate(s, rows, scale_log2);
  return rescale;
}

template <int N>
__device__ __forceinline__ void rescale_rows(float (&o)[N], const float (&alpha)[2]) {
#pragma unroll
  for (int j = 0; j < N; ++j) o[j] *= alpha[j / 2 % 2];
}

// Soft cap: cap * tanh(s * scale / cap), of which the cap is part of scale_log2.
template <int N>
__device__ __forceinline__ void soft_cap(float (&s)[N], float softcap_scale) {
#pragma unroll
  for (int j = 0; j < N; ++j) s[j] = tanh_approx(s[j] * softcap_scale);
}

}  // namespace unsloth
