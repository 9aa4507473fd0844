// Online softmax over score tiles held as wgmma accumulators: thread's row i in {0, 1} has scores
// s[4j + 2i + c]; a row is spread over the four lanes of a quad.
#pragma once

#include <cmath>

#include "common/math.cuh"

namespace unsloth {

// exp(s - max) may exceed one: the reference value of a row is only raised, and what was summed
// under the old one only rescaled, when a score passes it by more than this many powers of two.
// Sums are f32 and the log-sum-exp uses the same reference, so nothing is lost, and after the first
// few blocks no row rescales.
constexpr float kMaxSlack = 8.0f;

struct SoftmaxRows {
  float max[2];  // reference value, in units of the scores
  float sum[2];  // this thread's part of the sum
};

template <int N>
__device__ __forceinline__ float quad_row_max(const float (&s)[N], int i) {
  // Two chains: fmaxf has latency, and the compiler keeps the order written.
  float even = s[2 * i], odd = s[2 * i + 1];
#pragma unroll
  for (int j = 4; j < N; j += 4) {
    even = fmaxf(even, s[j + 2 * i]);
    odd = fmaxf(odd, s[j + 2 * i + 1]);
  }
  float top = fmaxf(even, odd);
  top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
  return fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
}

// Replaces row i's scores by exp2(s * scale - reference) and adds them up. A row whose every score
// so far is masked has reference -inf, for which 0 stands in.
template <int N>
__device__ __forceinline__ void exponentiate_row(float (&s)[N], int i, SoftmaxRows &rows,
                                                 float scale_log2) {
  const float offset = rows.max[i] == -INFINITY ? 0.0f : -rows.max[i] * scale_log2;
  float even = rows.sum[i], odd = 0.0f;
#pragma unroll
  for (int j = 2 * i; j < N; j += 4) {
    s[j] = exp2_approx(fmaf(s[j], scale_log2, offset));
    s[j + 1] = exp2_approx(fmaf(s[j + 1], scale_log2, offset));
    even += s[j];
    odd += s[j + 1];
  }
  rows.sum[i] = even + odd;
}

template <int N>
__device__ __forceinline__ void softmax_first(float (&s)[N], SoftmaxRows &rows, float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.max[i] = quad_row_max(s, i);
    rows.sum[i] = 0.0f;
    exponentiate_row(s, i, rows, scale_log2);
  }
}

// Takes row i's new maximum into account; what was accumulated so far is to be multiplied by alpha.
// Returns whether that is not 1. There is no branch here, so that the maximum of one row can hide
// under the exponentials of the other.
template <int N>
__device__ __forceinline__ bool raise_reference(const float (&s)[N], int i, SoftmaxRows &rows,
                                                float scale_log2, float (&alpha)[2]) {
  const float top = quad_row_max(s, i);
  const float old = rows.max[i];
  const bool grows = (top - old) * scale_log2 > kMaxSlack;
  rows.max[i] = grows ? top : old;
  alpha[i] = grows ? exp2_approx((old - top) * scale_log2) : 1.0f;
  return grows;
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
