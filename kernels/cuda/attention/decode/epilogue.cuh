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

// Counts the parts that are left of the pair whose first part is the block's: no other pair that
// begins there has more than one. Or those of a group, which names a block of its own.
__device__ __forceinline__ unsigned long long *counter_of(const AttentionDecodingArguments &p,
                                                          int block) {
  return p.counters + 2 * block;
}

// Where a part is left. A block has at most one that ends what another began, and one that another
// ends.
__device__ __forceinline__ int64_t slot_of(const Item &item, int part) {
  return 2 * static_cast<int64_t>(item.first_block + part) + (part == 0);
}

// A pair of more than kMostParts parts is joined twice: the last block of each group of kGroup
// parts makes one part of these, and the last of the groups makes the output. A single block would
// take long to read them all.
constexpr int kGroup = 16, kMostParts = 2 * kGroup;

// A group of a pair's parts. The last one has up to twice as many.
struct Group {
  int begin, count;

  // The group's second block has nothing but this pair's keys, so neither its counter nor its
  // second slot is another's.
  __device__ __forceinline__ int block(const Item &item) const {
    return item.first_block + begin + 1;
  }
  __device__ __forceinline__ int64_t slot(const Item &item) const {
    return 2 * static_cast<int64_t>(block(item)) + 1;
  }
};

__device__ __forceinline__ int groups_of(const Item &item) { return item.parts / kGroup; }

__device__ __forceinline__ Group group_at(const Item &item, int index) {
  const int begin = index * kGroup;
  return {begin, index + 1 == groups_of(item) ? item.parts - begin : kGroup};
}

__device__ __forceinline__ Group group_of(const Item &item) {
  return group_at(item, min(item.part / kGroup, groups_of(item) - 1));
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
    float (&to)[o_pitch(C)] = shared.o[head][warp][row];
    if constexpr (C.codes) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        // Those of even dimensions lie before those of odd ones.
        const float *even = &o[8 * j + 2 * i], *odd = even + 4;
        *reinterpret_cast<float4 *>(&to[16 * j + 4 * t]) = {even[0], odd[0], even[1], odd[1]};
      }
    } else {
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        *reinterpret_cast<float2 *>(&to[8 * j + 2 * t]) = {o[4 * j + 2 * i], o[4 * j + 2 * i + 1]};
      }
    }
  }
}

// A row's sums relative to a reference.
struct Sums {
  float top = -FLT_MAX, sum = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  // Makes them relative to another, which is not less.
  __device__ __forceinline__ void raise(float to) {
    const float factor = exp2_approx(top - to);
    top = to;
    sum *= factor;
    o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
  }
};

// By all that compute: some parts of the pair become the output or, with `is_output` false, one
// part in `to_slot`. Sums and values of a few are asked for together: either takes as long as the
// way to memory. Where there are threads to spare, two or four neighbours divide the parts of one
// quad among them.
template <DecodeConfig C, class T, class SlotOf>
__device__ __forceinline__ void join_parts(const AttentionDecodingArguments &p, const Item &item,
                                           int parts, SlotOf slot_at, bool is_output,
                                           int64_t to_slot) {
  constexpr int kThreads = C.warps * 32, kQuads = C.head_dim / 4, kTogether = 8, kMostWays = 4;
  const auto values_at = [&](int64_t row, int column) {
    return reinterpret_cast<float4 *>(p.partial + row * C.head_dim + column);
  };
  const int quads = C.heads * item.rows * kQuads;
  int ways = 1;
  while (ways < kMostWays && 2 * ways * quads <= kThreads) ways *= 2;
  const int way = threadIdx.x % ways;
  // All threads take as many turns of the loop: lanes exchange what they have.
  for (int base = 0; base < quads; base += kThreads / ways) {
    const int i = base + threadIdx.x / ways;
    const int row = min(i, quads - 1) / kQuads, column = i % kQuads * 4;
    Sums all;
#pragma unroll 1
    for (int first = way; first < parts; first += kTogether * ways) {
      float2 sums[kTogether];
      float4 values[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        sums[k] = {-INFINITY, 0.0f};
        values[k] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + k * ways >= parts) continue;
        const int64_t at = slot_at(first + k * ways) * (C.heads * p.rows) + row;
        sums[k] = __ldcg(p.partial_sums + at);
        values[k] = __ldcg(values_at(at, column));
      }
      float greatest = all.top;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) greatest = fmaxf(greatest, sums[k].x);
      all.raise(greatest);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const float weight = exp2_approx(sums[k].x - all.top);
        all.sum = fmaf(sums[k].y, weight, all.sum);
        add(all.o, values[k], weight);
      }
    }
    for (int step = 1; step < ways; step *= 2) {
      const auto others = [&](float x) { return __shfl_xor_sync(0xffffffff, x, step); };
      all.raise(fmaxf(all.top, others(all.top)));
      all.sum += others(all.sum);
      all.o.x += others(all.o.x), all.o.y += others(all.o.y);
      all.o.z += others(all.o.z), all.o.w += others(all.o.w);
    }
    if (i >= quads || way != 0) continue;
    if (is_output) {
      const float factor = finish_row<C>(p, item, row, all.top, all.sum, column == 0);
      store_four<C, T>(p, item, row, column, all.o, factor);
    } else {
      const int64_t at = to_slot * (C.heads * p.rows) + row;
      *values_at(at, column) = all.o;
      if (column == 0) p.partial_sums[at] = {all.top, all.sum};
    }
  }
}

// By all that compute, once they have left something: whether the block is the last of so many.
template <DecodeConfig C, class T>
__device__ __forceinline__ bool is_last(const AttentionDecodingArguments &p, Shared<C, T> &shared,
                                        int block, int count) {
  named_barrier_sync(kBarrierConsumers, C.warps * 32);
  if (threadIdx.x == 0) {
    // What the block has left is seen by whoever sees its claim.
    __threadfence();
    unsigned long long *counter = counter_of(p, block);
    shared.joins = claim(counter) + 1 == static_cast<uint32_t>(count);
    if (shared.joins) end_claims(counter, p.launch_tag);
    __threadfence();
  }
  named_barrier_sync(kBarrierConsumers, C.warps * 32);
  return shared.joins;
}

// Before the block's first claims.
__device__ __forceinline__ void begin_joins(const AttentionDecodingArguments &p, const Item &item) {
  if (item.parts == 1) return;
  begin_claims(counter_of(p, item.first_block), p.launch_tag);
  if (item.parts > kMostParts) {
    begin_claims(counter_of(p, group_of(item).block(item)), p.launch_tag);
  }
}

// By all that compute, once they have left the block's part.
template <DecodeConfig C, class T>
__device__ __forceinline__ void join(const AttentionDecodingArguments &p, Shared<C, T> &shared,
                                     const Item &item) {
  if (item.parts <= kMostParts) {
    if (!is_last(p, shared, item.first_block, item.parts)) return;
    const auto slot_at = [&](int i) { return slot_of(item, i); };
    join_parts<C, T>(p, item, item.parts, slot_at, true, 0);
    return;
  }
  const Group group = group_of(item);
  if (!is_last(p, shared, group.block(item), group.count)) return;
  const auto in_group = [&](int i) { return slot_of(item, group.begin + i); };
  join_parts<C, T>(p, item, group.count, in_group, false, group.slot(item));
  if (!is_last(p, shared, item.first_block, groups_of(item))) return;
  const auto of_group = [&](int i) { return group_at(item, i).slot(item); };
  join_parts<C, T>(p, item, groups_of(item), of_group, true, 0);
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
  if (item.parts > 1) join(p, shared, item);
}

}  // namespace unsloth
