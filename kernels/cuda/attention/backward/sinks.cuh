// Gradients of sinks: -sum(exp(sink - lse) delta) over all queries of a head, whose statistics are
// in memory by then. A block for each head; threads and sequences are added in one order.
#pragma once

#include "common/math.cuh"
#include "work.cuh"

namespace unsloth {

constexpr int kSinkThreads = 512;
constexpr int kSinkBytes = kSinkThreads / 32 * sizeof(float);

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

__device__ __forceinline__ void sum_sinks(const AttentionGradientsArguments &p) {
  const int head = blockIdx.x;
  const float sink = p.sinks[head] * kLog2E;
  float sum = 0.0f;
  for (int batch = 0; batch < p.batch; ++batch) {
    const Sequence s = sequence_at(p, batch);
    const float *statistics = p.statistics + block_at(p, s, head, 0) * (2 * kBlockM);
    const int rows = ceil_div(s.seqlen_q, kBlockM) * kBlockM;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows; i += kSinkThreads) {
      const float *of = statistics + i / kBlockM * (2 * kBlockM) + i % kBlockM;
      // Rows that are not there, and those that see no key, have an infinite log-sum-exp.
      sum = fmaf(exp2_approx(sink - of[0]), of[kBlockM], sum);
    }
  }
  extern __shared__ uint8_t dynamic[];
  float *sums = reinterpret_cast<float *>(dynamic);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_sum(threadIdx.x < kSinkThreads / 32 ? sums[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) p.dsinks[head] = (p.accumulate != 0 ? p.dsinks[head] : 0.0f) - sum;
}

}  // namespace unsloth
