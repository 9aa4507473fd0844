// From accumulators to memory: normalise, write the log-sum-exp, stage O and store it.
#pragma once

#include <cfloat>

#include "attention/forward/arguments.h"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/tma.cuh"
#include "shared.cuh"
#include "softmax.cuh"

namespace unsloth {

// Where a row of a packed tile lies: `pack` heads by turns, then the next position.
struct PackedRow {
  int position, head;
};

__device__ __forceinline__ PackedRow packed_row(const AttentionForwardArguments &p,
                                                const Tile &tile, int block_rows, int row) {
  const int pack = 1 << p.pack_log2;
  return {tile.row_block * (block_rows >> p.pack_log2) + (row >> p.pack_log2),
          tile.head * pack + (row & (pack - 1))};
}

__device__ __forceinline__ float *lse_address(const AttentionForwardArguments &p, const Tile &tile,
                                              PackedRow at) {
  return p.lse + (p.cu_seqlens_q != nullptr ? 0 : tile.batch) * p.lse_batch_stride +
         at.head * p.lse_head_stride + (tile.q_begin + at.position) * p.lse_sequence_stride;
}

// Sums over the quad, joins the sink, writes the log-sum-exp, and gives what O is to be multiplied
// by. A row that sees no key gets O = 0 and log-sum-exp -inf.
template <TileConfig C>
__device__ __forceinline__ void finish_rows(const AttentionForwardArguments &p, const Tile &tile,
                                            int row, const SoftmaxRows &rows, float (&factor)[2]) {
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
    factor[i] = empty ? 0.0f : factor[i] * reciprocal_approx(sum);
    if (p.lse != nullptr && threadIdx.x % 4 == 0 && at.position < tile.seqlen_q) {
      *lse_address(p, tile, at) = empty ? -INFINITY : (reference + log2_approx(sum)) * kLn2;
    }
  }
}

// Writes the warpgroup's 64 rows to `staging`, in 64-column chunks with the 128-byte swizzle.
template <class T, int N>
__device__ __forceinline__ void stage_output(const float (&o)[N], T *staging) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = 16 * warp + lane % 16;
  const uint32_t base = shared_address(staging) + row * 128;
#pragma unroll
  for (int j = 0; j < N / 4; j += 2) {  // a pair of 8-column blocks
    const uint32_t unit = (j % 8 + lane / 16) ^ (row % 8);
    store_matrix_x4(base + j / 8 * (kRowsPerWarpgroup * 128) + unit * 16,
                    pack<T>(o[4 * j], o[4 * j + 1]), pack<T>(o[4 * j + 2], o[4 * j + 3]),
                    pack<T>(o[4 * j + 4], o[4 * j + 5]), pack<T>(o[4 * j + 6], o[4 * j + 7]));
  }
}

// Copies the staged rows that exist, 16 bytes at a time: for tiles that end inside a packed batch,
// where a TMA store would run into the next sequence. Null staging stands for zeros.
template <TileConfig C, class T>
__device__ __forceinline__ void copy_output(const AttentionForwardArguments &p, const Tile &tile,
                                            int first_row, const T *staging) {
  constexpr int kUnits = C.head_dim_v / 8;
  for (int i = threadIdx.x % 128; i < kRowsPerWarpgroup * kUnits; i += 128) {
    const int row = i / kUnits, unit = i - row * kUnits;
    const PackedRow at = packed_row(p, tile, block_m(C), first_row + row);
    if (at.position >= tile.seqlen_q || unit * 8 >= p.head_dim_v) continue;
    uint4 value = {0, 0, 0, 0};
    if (staging != nullptr) {
      const uint32_t offset =
          swizzle_128b(unit / 8 * (kRowsPerWarpgroup * 128) + row * 128 + unit % 8 * 16);
      value = *reinterpret_cast<const uint4 *>(reinterpret_cast<const char *>(staging) + offset);
    }
    T *to = static_cast<T *>(p.o_pointer) +
            (p.cu_seqlens_q != nullptr ? 0 : tile.batch) * p.o_batch_stride +
            static_cast<int64_t>(tile.q_begin + at.position) * p.o_sequence_stride +
            at.head * p.o_head_stride + unit * 8;
    *reinterpret_cast<uint4 *>(to) = value;
  }
}

// Sends the warpgroup's finished rows out. The staging memory may be written again once thread 0 of
// the warpgroup has passed tma_store_wait_read.
template <TileConfig C, class T, int N>
__device__ __forceinline__ void store_output(const AttentionForwardArguments &p, const Tile &tile,
                                             int wg, const float (&o)[N], T *staging) {
  stage_output(o, staging);
  fence_async_proxy();
  named_barrier_sync(kBarrierWarpgroup + wg, 128);
  const int first_row = wg * kRowsPerWarpgroup;
  const int position = packed_row(p, tile, block_m(C), first_row).position;
  const bool partial =
      p.cu_seqlens_q != nullptr && position + (kRowsPerWarpgroup >> p.pack_log2) > tile.seqlen_q;
  if (partial) {
    copy_output<C>(p, tile, first_row, staging);
    named_barrier_sync(kBarrierWarpgroup + wg, 128);
  } else if (threadIdx.x % 128 == 0) {
    const int batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
#pragma unroll
    for (int c = 0; c < chunks(C.head_dim_v); ++c) {
      tma_store_5d(&p.o, shared_address(staging) + c * kRowsPerWarpgroup * 128, c * kChunk, 0,
                   tile.q_begin + position, tile.head, batch);
    }
    tma_store_commit();
  }
}

}  // namespace unsloth
