// From accumulators to memory: normalise, write the log-sum-exp, write O.
#pragma once

#include <cfloat>

#include "../common/math.cuh"
#include "params.h"
#include "shared.cuh"
#include "softmax.cuh"

namespace unsloth {

// x[b] of lane t becomes x[t] of lane b, over the four lanes of a quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b & step) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? x[b] : x[b + step], step);
      (upper ? x[b] : x[b + step]) = got;
    }
  }
}

// Where a row of a packed tile lies: `pack` heads by turns, then the next position.
struct PackedRow {
  int position, head;
};

__device__ __forceinline__ PackedRow packed_row(const AttentionForwardParams &p, const Tile &tile,
                                                int block_rows, int row) {
  const int pack = 1 << p.pack_log2;
  return {tile.row_block * (block_rows >> p.pack_log2) + (row >> p.pack_log2),
          tile.head * pack + (row & (pack - 1))};
}

__device__ __forceinline__ float *lse_address(const AttentionForwardParams &p, const Tile &tile,
                                              PackedRow at) {
  return p.lse + (p.cu_seqlens_q != nullptr ? 0 : tile.batch) * p.lse_batch_stride +
         at.head * p.lse_head_stride + tile.q_begin + at.position;
}

// Sums over the quad, joins the sink, writes the log-sum-exp and scales O to its final value. A row
// that sees no key gets O = 0 and log-sum-exp -inf.
template <TileConfig C, int N>
__device__ __forceinline__ void finish_rows(const AttentionForwardParams &p, const Tile &tile,
                                            int row, SoftmaxRows &rows, float (&o)[N]) {
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PackedRow at = packed_row(p, tile, block_m(C), row + 8 * i);
    float sum = rows.sum[i];
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    float reference = rows.max[i] * p.scale_log2;  // in powers of two
    factor[i] = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[at.head] * kLog2E;
      const float raised = fmaxf(fmaxf(reference, sink), -FLT_MAX);  // finite, if both are -inf
      factor[i] = exp2_approx(reference - raised);
      sum = sum * factor[i] + exp2_approx(sink - raised);
      reference = raised;
    }
    const bool empty = sum == 0.0f;
    factor[i] = empty ? 0.0f : factor[i] / sum;
    if (p.lse != nullptr && threadIdx.x % 4 == 0 && at.position < tile.seqlen_q) {
      *lse_address(p, tile, at) = empty ? -INFINITY : (reference + log2f(sum)) * kLn2;
    }
  }
  rescale_rows(o, factor);
}

// Writes the thread's two rows. A lane holds two columns of every eight; transposing four such blocks
// over the quad gives it eight columns of one, a 16-byte store, and the quad 64 contiguous bytes.
template <TileConfig C, class T, int N>
__device__ __forceinline__ void store_rows(const AttentionForwardParams &p, const Tile &tile, int row,
                                           const float (&o)[N]) {
  const int t = threadIdx.x % 4;
  T *to[2];
  bool exists[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PackedRow at = packed_row(p, tile, block_m(C), row + 8 * i);
    exists[i] = at.position < tile.seqlen_q;
    to[i] = static_cast<T *>(p.o) +
            (p.cu_seqlens_q != nullptr ? 0 : tile.batch) * p.o_batch_stride +
            static_cast<int64_t>(tile.q_begin + at.position) * p.o_sequence_stride +
            at.head * p.o_head_stride + 8 * t;
  }
#pragma unroll
  for (int j = 0; j < N / 4; j += 4) {  // four blocks of eight columns
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t block[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        block[b] = pack<T>(o[4 * (j + b) + 2 * i], o[4 * (j + b) + 2 * i + 1]);
      }
      transpose_quad(block);
      if (exists[i] && 8 * (j + t) < p.head_dim_v) {
        *reinterpret_cast<uint4 *>(to[i] + 8 * j) = {block[0], block[1], block[2], block[3]};
      }
    }
  }
}

}  // namespace unsloth
