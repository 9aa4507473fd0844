// From what the warps have summed up to memory: the output, or a part of it that the last of the
// pair's blocks to come joins with the others. Parts are added in the order of their keys, whoever
// comes last.
#pragma once

#include <cfloat>

#include "attention/decode/arguments.h"
#include "attention/forward/softmax.cuh"
#include "common/claims.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "schedule.cuh"

namespace unsloth {

// Of the pair whose first part is a block's: no other pair that begins there has more than one.
__device__ __forceinline__ unsigned long long *counter_of(const AttentionDecodingArguments &p,
                                                          int first_block) {
  return p.counters + 2 * first_block;
}

// Where a part is left. A block has at most one that ends what another began, and one that another
// ends.
__device__ __forceinline__ int64_t slot_of(const Item &item, int part) {
  return 2 * static_cast<int64_t>(item.first_block + part) + (part == 0);
}

// Greatest reference of some rows, finite even if there is none.
__device__ __forceinline__ float raised(float a, float b) { return fmaxf(fmaxf(a, b), -FLT_MAX); }

// Rows are counted through the heads that are read together.
struct Row {
  int token, head;
};

template <DecodeConfig C>
__device__ __forceinline__ Row row_at(const AttentionDecodingArguments &p, const Item &item,
                                      int row) {
  const int which = C.heads == 1 ? 0 : row / item.rows, of_head = row - which * item.rows;
  const int token = of_head / p.group;
  return {token, (item.head + which) * p.group + of_head - token * p.group};
}

// Joins the sink, writes the log-sum-exp if `writes`, and gives what the row's sums are to be
// multiplied by. A row that sees no key gets O = 0 and log-sum-exp -inf.
template <DecodeConfig C>
__device__ __forceinline__ float finish_row(const AttentionDecodingArguments &p, const Item &item,
                                            int row, float reference, float sum, bool writes) {
  const Row at = row_at<C>(p, item, row);
  float factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[at.head] * kLog2E;
    const float top = raised(reference, sink);
    factor = exp2_approx(reference - top);
    sum = sum * factor + exp2_approx(sink - top);
    reference = top;
  }
  // Not `> 0`: a NaN is to come through.
  const bool empty = sum == 0.0f;
  if (p.lse != nullptr && writes) {
    float *to = p.lse + (p.cu_seqlens_q != nullptr ? 0 : item.batch) * p.lse_batch_stride +
                (item.q_begin + at.token) * p.lse_sequence_stride + at.head * p.lse_head_stride;
    *to = empty ? -INFINITY : (reference + log2_approx(sum)) * kLn2;
  }
  return empty ? 0.0f : factor * reciprocal_approx(sum);
}

template <DecodeConfig C, class T>
__device__ __forceinline__ void store_four(const AttentionDecodingArguments &p, const Item &item,
                                           int row, int column, const float4 &o, float factor) {
  const Row at = row_at<C>(p, item, row);
  T *to = static_cast<T *>(p.o) + (p.cu_seqlens_q != nullptr ? 0 : item.batch) * p.o_batch_stride +
          (item.q_begin + at.token) * p.o_sequence_stride + at.head * p.o_head_stride + column;
  *reinterpret_cast<uint2 *>(to) = {pack<T>(o.x * factor, o.y * factor),
                                    pack<T>(o.z * factor, o.w * factor)};
}

__device__ __forceinline__ void add(float4 &sum, const float4 &x, float weight) {
  sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
  sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
}

// Leaves a warp's sums where the others find them.
template <DecodeConfig C, class T, int N>
__device__ __forceinline__ void leave(Shared<C, T> &shared, const Item &item,
                                      const SoftmaxRows &rows, float scale_log2,
                                      const float (&o)[N]) {
  constexpr int kWarps = warps_of_head(C);
  const int head = threadIdx.x / 32 / kWarps, warp = threadIdx.x / 32 % kWarps;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = rows.sum[i];
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    const int row = g + 8 * i;
    if (row >= item.rows) continue;
    if (t == 0) shared.sums[head][warp][row] = {rows.max[i] * scale_log2, sum};
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      *reinterpret_cast<float2 *>(&shared.o[head][warp][row][8 * j + 2 * t]) = {
          o[4 * j + 2 * i], o[4 * j + 2 * i + 1]};
    }
  }
}

// Weights of the parts of every row, into the place of O.
template <DecodeConfig C, class T>
__device__ __forceinline__ void weigh_parts(const AttentionDecodingArguments &p,
                                            Shared<C, T> &shared, const Item &item) {
  const int lane = threadIdx.x % 32;
  float *weights = &shared.o[0][0][0][0];
  for (int row = threadIdx.x / 32; row < C.heads * item.rows; row += C.warps) {
    const auto sums_of = [&](int part) {
      if (part >= item.parts) return float2{-INFINITY, 0.0f};
      return __ldcg(p.partial_sums + slot_of(item, part) * (C.heads * p.rows) + row);
    };
    const float2 mine = sums_of(lane);
    float top = mine.x;
    for (int part = lane + 32; part < item.parts; part += 32) top = fmaxf(top, sums_of(part).x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    }
    top = fmaxf(top, -FLT_MAX);
    float sum = 0.0f;
    for (int part = lane; part < item.parts; part += 32) {
      const float2 sums = part == lane ? mine : sums_of(part);
      const float weight = exp2_approx(sums.x - top);
      sum = fmaf(sums.y, weight, sum);
      weights[row * item.parts + part] = weight;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    const float factor = finish_row<C>(p, item, row, top, sum, lane == 0);
    for (int part = lane; part < item.parts; part += 32) {
      weights[row * item.parts + part] *= factor;
    }
  }
}

// By all that compute, once they have left their sums.
template <DecodeConfig C, class T>
__device__ __forceinline__ void join_parts(const AttentionDecodingArguments &p,
                                           Shared<C, T> &shared, const Item &item) {
  constexpr int kThreads = C.warps * 32, kQuads = C.head_dim / 4;
  weigh_parts(p, shared, item);
  named_barrier_sync(kBarrierConsumers, kThreads);
  const int64_t apart = static_cast<int64_t>(C.heads * p.rows) * C.head_dim;
  for (int i = threadIdx.x; i < C.heads * item.rows * kQuads; i += kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const float *weights = &shared.o[0][0][0][0] + row * item.parts;
    const float *from = p.partial + row * C.head_dim + column;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int part = 0; part < item.parts; ++part) {
      add(o, __ldcg(reinterpret_cast<const float4 *>(from + slot_of(item, part) * apart)),
          weights[part]);
    }
    store_four<C, T>(p, item, row, column, o, 1.0f);
  }
}

// All that compute come here with what they have of a piece of work.
template <DecodeConfig C, class T, int N>
__device__ __forceinline__ void finish(const AttentionDecodingArguments &p, Shared<C, T> &shared,
                                       const Item &item, const SoftmaxRows &rows,
                                       const float (&o)[N]) {
  constexpr int kThreads = C.warps * 32, kQuads = C.head_dim / 4;
  // The piece before has been read by all.
  named_barrier_sync(kBarrierConsumers, kThreads);
  leave(shared, item, rows, p.scale_log2, o);
  named_barrier_sync(kBarrierConsumers, kThreads);
  constexpr int kWarps = warps_of_head(C);
  const int64_t slot = slot_of(item, item.part);
  for (int i = threadIdx.x; i < C.heads * item.rows * kQuads; i += kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const int head = C.heads == 1 ? 0 : row / item.rows, of_head = row - head * item.rows;
    const float2(&sums)[kWarps][kRows] = shared.sums[head];
    const float (&values)[kWarps][kRows][o_pitch(C)] = shared.o[head];
    float top = -FLT_MAX, sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) top = fmaxf(top, sums[warp][of_head].x);
    float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float weight = exp2_approx(sums[warp][of_head].x - top);
      sum = fmaf(sums[warp][of_head].y, weight, sum);
      add(all, *reinterpret_cast<const float4 *>(&values[warp][of_head][column]), weight);
    }
    if (item.parts == 1) {
      const float factor = finish_row<C>(p, item, row, top, sum, column == 0);
      store_four<C, T>(p, item, row, column, all, factor);
    } else {
      const int64_t at = slot * (C.heads * p.rows) + row;
      *reinterpret_cast<float4 *>(p.partial + at * C.head_dim + column) = all;
      if (column == 0) p.partial_sums[at] = {top, sum};
    }
  }
  if (item.parts == 1) return;

  // What this block has left is seen by whoever sees its claim.
  __threadfence();
  named_barrier_sync(kBarrierConsumers, kThreads);
  if (threadIdx.x == 0) {
    unsigned long long *counter = counter_of(p, item.first_block);
    shared.joins = claim(counter) + 1 == static_cast<uint32_t>(item.parts);
    if (shared.joins) end_claims(counter, p.launch_tag);
    __threadfence();
  }
  named_barrier_sync(kBarrierConsumers, kThreads);
  if (shared.joins) join_parts(p, shared, item);
}

}  // namespace unsloth
