// What comes before and after. Before: statistics of every query, and zeros: of the sums of dQ
// above 128 dimensions, else of those rows of dQ that see no key. After, above 128 dimensions: dQ
// from its sums.
//
// A block of either is a block of 64 queries of a head. The sums lie in the order in which threads
// of the main kernel hold them: see `sums_at`.
#pragma once

#include "common/math.cuh"
#include "work.cuh"

namespace unsloth {

// A warpgroup of the main kernel adds to half of a block's columns, a warp to 16 rows of them, one
// behind the other; each thread four numbers at once: two columns of a row and of the row eight
// further down.
template <int D>
__device__ __forceinline__ float *sums_at(const AttentionGradientsArguments &p, int64_t block) {
  return p.sums + block * (kBlockM * D);
}

// Eight elements.
template <class T>
struct Eight {
  float of[8];

  __device__ __forceinline__ explicit Eight(const T *from) {
    const uint4 bits = *reinterpret_cast<const uint4 *>(from);
    const T *elements = reinterpret_cast<const T *>(&bits);
#pragma unroll
    for (int i = 0; i < 8; ++i) of[i] = static_cast<float>(elements[i]);
  }
};

// Whether a block of keys has a part in the step of kM queries that block m belongs to: see
// work_at.
template <int kM>
__device__ __forceinline__ bool has_keys(const AttentionGradientsArguments &p, const Sequence &s,
                                         int m) {
  const int step = m * kBlockM / kM, diagonal = s.seqlen_k - s.seqlen_q;
  const int last = s.seqlen_k - 1 - diagonal + p.window_left;
  return s.seqlen_k > 0 && step >= max(-diagonal - p.window_right, 0) / kM && last >= 0 &&
         step <= last / kM;
}

template <class T>
__device__ __forceinline__ void clear_dq(const AttentionGradientsArguments &p, const Sequence &s,
                                         int head, int m) {
  const int units = p.head_dim / 8, rows = min(kBlockM, s.seqlen_q - m * kBlockM);
  T *dq = static_cast<T *>(p.dq) + (p.cu_seqlens_q != nullptr ? 0 : s.batch) * p.dq_batch_stride +
          static_cast<int64_t>(s.q_begin + m * kBlockM) * p.dq_sequence_stride +
          head * p.dq_head_stride;
  for (int i = threadIdx.x; i < rows * units; i += blockDim.x) {
    *reinterpret_cast<uint4 *>(dq + i / units * p.dq_sequence_stride + i % units * 8) = {};
  }
}

// A number as a sum of three of bf16, which leave out nothing of its 24 bits.
__device__ __forceinline__ void split(float x, __nv_bfloat16 (&parts)[8], int at) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[at + i] = __float2bfloat16_rn(x);
    x -= __bfloat162float(parts[at + i]);
  }
}

// What a product adds to a query's scores, in units of 1 / scale, and to its dP: eight elements of
// its own, the first three of which are the one when added up, and the next three the other
// (consumer.cuh). `lse` is in units of log2(e).
__device__ __forceinline__ void write_terms(const AttentionGradientsArguments &p, int64_t block,
                                            int row, float lse, float delta) {
  alignas(16) __nv_bfloat16 parts[8] = {};
  // Nothing is infinite: zero times infinity is NaN.
  split(lse == INFINITY ? -1e30f : -lse / p.scale_log2, parts, 0);
  split(-delta, parts, 3);
  static_cast<uint4 *>(p.terms)[block * kBlockM + row] = *reinterpret_cast<const uint4 *>(parts);
}

// delta = sum(dO O) - dLSE (Dao 2023, "FlashAttention-2", algorithm 2; a gradient of the
// log-sum-exp itself enters dS as P dLSE). Rows that the sequence does not have, and those that see
// no key, get an infinite log-sum-exp: their P is zero.
template <int D, class T>
__device__ __forceinline__ void prepare_rows(const AttentionGradientsArguments &p) {
  constexpr int kLanes = D > 128 ? 32 : D > 64 ? 16 : 8;  // of a row, a power of two
  const auto [s, head, m] = query_block_at(p);
  if (p.order != nullptr && threadIdx.x == 0) {
    // That of this block of the grid, whichever it is of.
#pragma unroll
    for (int i = 0; i < kOrders<D>; ++i) p.order[blockIdx.x * kOrders<D> + i] = 0;
    if (blockIdx.x == 0) p.order[gridDim.x * kOrders<D>] = 0;
  }
  // Statistics come in pairs of blocks, for steps of two.
  if (m / 2 * (2 * kBlockM) >= s.seqlen_q) return;
  const int64_t block = block_at(p, s, head, m);
  const int64_t batch = p.cu_seqlens_q != nullptr ? 0 : s.batch;
  for (int i = threadIdx.x; i < kBlockM * kLanes; i += blockDim.x) {
    const int row = i / kLanes, column = i % kLanes * 8;
    const int64_t position = m * kBlockM + row;
    const bool there = position < s.seqlen_q;
    const int64_t token = s.q_begin + position;
    float delta = 0.0f;
    if (there && column < p.head_dim_v) {
      const Eight<T> o(static_cast<const T *>(p.out) + batch * p.out_batch_stride +
                       token * p.out_sequence_stride + head * p.out_head_stride + column);
      const Eight<T> g(static_cast<const T *>(p.dout_pointer) + batch * p.dout_batch_stride +
                       token * p.dout_sequence_stride + head * p.dout_head_stride + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) delta = fmaf(o.of[j], g.of[j], delta);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, step);
    }
    if (column == 0) {
      float lse = there ? p.lse[batch * p.lse_batch_stride + head * p.lse_head_stride +
                                token * p.lse_sequence_stride]
                        : -INFINITY;
      if (lse == -INFINITY) {
        lse = INFINITY;
        delta = 0.0f;
      } else {
        lse *= kLog2E;
        if (p.dlse != nullptr) {
          delta -= p.dlse[batch * p.dlse_batch_stride + head * p.dlse_head_stride +
                          token * p.dlse_sequence_stride];
        }
      }
      float *statistics = p.statistics + block * (2 * kBlockM);
      const int at = statistic_at(row);
      statistics[at] = lse;
      statistics[kBlockM + at] = delta;
      if (D <= 128 && p.terms != nullptr) write_terms(p, block, row, lse, delta);
    }
  }
  if (p.sums == nullptr) return;
  if (D <= 128) {
    // Who adds first stores (sums.cuh), but nobody does where no key is seen.
    if (!has_keys<kStep<D>>(p, s, m)) clear_dq<T>(p, s, head, m);
    return;
  }
  float4 *sums = reinterpret_cast<float4 *>(sums_at<D>(p, block));
  for (int i = threadIdx.x; i < kBlockM * D / 4; i += blockDim.x) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Four numbers of each of four neighbouring lanes, transposed.
__device__ __forceinline__ void transpose_quads(uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    // The lane that has the bit gives away the lower of two, the other one the upper.
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t given = upper ? x[i] : x[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffff, given, step);
      (upper ? x[i] : x[i + step]) = got;
    }
  }
}

// Of a gradient of D columns that a warp holds as a product of 16 rows leaves it, from row `first`:
// what is below `rows` and `columns`. Lanes exchange what they hold until each has 16 bytes of one
// row.
template <int D, class T>
__device__ __forceinline__ void store_rows(const float (&g)[D / 2], float factor, T *to,
                                           int64_t stride, int first, int rows, int columns) {
  const int lane = threadIdx.x % 32, column = 8 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + lane / 4 + 8 * i;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      uint32_t four[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = 4 * (4 * j + c) + 2 * i;
        four[c] = pack<T>(g[at] * factor, g[at + 1] * factor);
      }
      transpose_quads(four);
      if (row >= rows || 32 * j + column >= columns) continue;
      *reinterpret_cast<uint4 *>(to + row * stride + 32 * j + column) = {four[0], four[1], four[2],
                                                                         four[3]};
    }
  }
}

// dQ = scale times the sums. A warp takes 16 rows by 32 columns at once: a thread has two numbers
// of a row, and two of the row eight further down, of each 8 columns, and exchanges them for 8 side
// by side.
template <int D, class T>
__device__ __forceinline__ void finish_rows(const AttentionGradientsArguments &p) {
  const auto [s, head, m] = query_block_at(p);
  if (m * kBlockM >= s.seqlen_q) return;
  const float4 *sums = reinterpret_cast<const float4 *>(sums_at<D>(p, block_at(p, s, head, m)));
  const int64_t batch = p.cu_seqlens_q != nullptr ? 0 : s.batch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kGroups = D / 64;  // of 32 columns, in each half
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 *from = sums + (half * 4 + warp) * (kBlockM * D / 32) + g * 128 + lane;
      uint32_t rows[2][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float4 four = from[t * 32];
        rows[0][t] = pack<T>(four.x * p.scale, four.y * p.scale);
        rows[1][t] = pack<T>(four.z * p.scale, four.w * p.scale);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        transpose_quads(rows[r]);
        const int position = m * kBlockM + 16 * warp + lane / 4 + 8 * r;
        const int column = half * (D / 2) + g * 32 + lane % 4 * 8;
        if (position >= s.seqlen_q || column >= p.head_dim) continue;
        T *to = static_cast<T *>(p.dq) + batch * p.dq_batch_stride +
                static_cast<int64_t>(s.q_begin + position) * p.dq_sequence_stride +
                head * p.dq_head_stride + column;
        *reinterpret_cast<uint4 *>(to) = {rows[r][0], rows[r][1], rows[r][2], rows[r][3]};
      }
    }
  }
}

}  // namespace unsloth
