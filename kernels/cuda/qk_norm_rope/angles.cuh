// The angles of a token, which a warp computes together and each of its lanes then has for its own
// pairs. To the bit what `kernels/src/rotation.rs` computes.
#pragma once

#include "common/rows.cuh"
#include "common/turn.cuh"
#include "contract.h"
#include "qk_norm_rope/arguments.h"

namespace unsloth {

using Arguments = QkNormRopeRingArguments;

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
      frequency[j] = frequency_of(p, threadIdx.x % 32 + 32 * j);
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
      turns[j] = turn_of_pair(p, position, pair, frequency[j]);
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
