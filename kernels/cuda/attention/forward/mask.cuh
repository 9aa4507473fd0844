// Masking of score tiles: sequence end, causal, and sliding window.
#pragma once

#include <cmath>

#include "config.h"

namespace unsloth {

// The keys a thread's two rows may see: [left, right), less the thread's first column in the block,
// so that what an element is compared with is a compile-time constant.
struct RowLimits {
  int left[2], right[2];
};

template <Mask kMask>
__device__ __forceinline__ RowLimits row_limits(const int (&position)[2], int first_column,
                                                int seqlen_q, int seqlen_k, int window_left,
                                                int window_right) {
  RowLimits limits;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int diagonal = position[i] + seqlen_k - seqlen_q;
    int right = seqlen_k;
    if (kMask == Mask::kCausal) right = min(right, diagonal + 1);
    if (kMask == Mask::kWindow) right = min(right, diagonal + window_right + 1);
    limits.right[i] = right - first_column;
    limits.left[i] = kMask == Mask::kWindow ? diagonal - window_left - first_column : 0;
  }
  return limits;
}

template <Mask kMask, int N>
__device__ __forceinline__ void apply_mask(float (&s)[N], const RowLimits &limits) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int i = j / 2 % 2;
    const int at = 8 * (j / 4) + j % 2;
    bool seen = at < limits.right[i];
    if (kMask == Mask::kWindow) seen = seen && at >= limits.left[i];
    if (!seen) s[j] = -INFINITY;
  }
}

}  // namespace unsloth
