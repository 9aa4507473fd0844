// dQ alone: a block takes 128 queries of a head, 64 for each of two warpgroups, and walks over the
// keys that they see,
//   P = exp(scale Q K^T - lse),  dP = dO V^T,  dS = P (dP - delta),  dQ += scale dS K.
// It computes scores a second time, seven products for five, but needs neither sums in memory nor
// an order among blocks: the same inputs give the same bits. Rows are queries here, so that dS is
// an operand as it stands in registers.
//
// Each warpgroup queues the next scores before dQ of those that it has; its exponentials run under
// its dQ and under the other's products.
#pragma once

#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "config.h"
#include "scores.cuh"
#include "work.cuh"

namespace unsloth {

// What such a block computes.
struct QueryWork {
  Sequence sequence;
  int head, head_kv;
  int first;         // query
  int n_min, n_max;  // tiles of keys that one of the queries sees
};

template <int D, int DV, class T>
struct alignas(1024) QueryShared {
  static constexpr int kKStages = 2;
  static constexpr int kVStages = DV > 192 ? 1 : 2;  // as many as there is room for

  T q[2][kBlockM * D];
  T dout[2][kBlockM * DV];
  T k[kKStages][kKeys<D> * D];
  T v[kVStages][kKeys<D> * DV];

  Mbarrier q_full;
  Mbarrier k_full[kKStages], k_empty[kKStages];
  Mbarrier v_full[kVStages], v_empty[kVStages];
  QueryWork work;

  // One thread; fence_mbarrier_init and a block barrier follow.
  __device__ __forceinline__ void init_barriers() {
    q_full.init(1);
    for (int i = 0; i < kKStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(8);
    }
    for (int i = 0; i < kVStages; ++i) {
      v_full[i].init(1);
      v_empty[i].init(8);
    }
  }
};

template <int D>
__device__ __forceinline__ QueryWork query_work_at(const AttentionGradientsArguments &p) {
  QueryWork w;
  const bool packed = p.cu_seqlens_q != nullptr;
  Place at = {0, (p.row_blocks + 1) / 2, static_cast<int>(blockIdx.x)};
  if (packed) {
    const int numbers = static_cast<int>(p.blocks_per_head) / 2;
    at = place_in(p.cu_seqlens_q, p.batch, 2 * kBlockM, numbers, p.heads_q, blockIdx.x);
  }
  const int pair = at.index < 0 ? 0 : at.index / at.blocks;
  // Of a causal head the last block has the most work.
  const int block = at.index < 0 ? kNoBlock : at.blocks - 1 - (at.index - pair * at.blocks);
  w.first = block * (2 * kBlockM);
  w.head = pair % p.heads_q;
  w.head_kv = w.head / p.group;
  w.sequence = sequence_at(p, packed ? at.batch : pair / p.heads_q);
  const Sequence &s = w.sequence;
  // Query i sees keys from i + diagonal - window_left to i + diagonal + window_right.
  const int diagonal = s.seqlen_k - s.seqlen_q;
  const int first = w.first + diagonal;
  const int last = min(w.first + 2 * kBlockM, s.seqlen_q) - 1 + diagonal;
  const int from = first < p.window_left ? 0 : first - p.window_left;
  const int to = s.seqlen_k - 1 - last <= p.window_right ? s.seqlen_k : last + p.window_right + 1;
  w.n_min = from / kKeys<D>;
  w.n_max = to <= 0 ? 0 : ceil_div(to, kKeys<D>);
  return w;
}

template <int D, int DV, class T>
__device__ __forceinline__ void produce_keys(const AttentionGradientsArguments &p,
                                             QueryShared<D, DV, T> &shared) {
  using Memory = QueryShared<D, DV, T>;
  constexpr int kTile = kKeys<D> * kChunk * 2;  // bytes of a chunk
  const QueryWork w = shared.work;
  const Sequence &s = w.sequence;
  const bool leader = threadIdx.x == 0;
  const int batch_k = p.cu_seqlens_k != nullptr ? 0 : s.batch;
  const int batch_q = p.cu_seqlens_q != nullptr ? 0 : s.batch;
  if (w.n_min >= w.n_max) return;
  if (leader) shared.q_full.arrive_expect(sizeof shared.q + sizeof shared.dout);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 * (D / kChunk); ++i) {
    const int c = i / 2, half = i % 2, row = s.q_begin + w.first + half * kBlockM;
    tma_load_4d(shared_address(shared.q[half]) + c * kBlockM * kChunk * 2, &p.q, &shared.q_full,
                kEvictFirst, c * kChunk, row, w.head, batch_q);
    if (c >= DV / kChunk) continue;
    tma_load_4d(shared_address(shared.dout[half]) + c * kBlockM * kChunk * 2, &p.dout,
                &shared.q_full, kEvictFirst, c * kChunk, row, w.head, batch_q);
  }
  Ring<Memory::kKStages> of_k;
  Ring<Memory::kVStages> of_v;
#pragma unroll 1
  for (int n = w.n_min; n < w.n_max; ++n) {
    const int row = s.k_begin + n * kKeys<D>;
    const int k = __shfl_sync(0xffffffff, of_k.stage, 0),
              v = __shfl_sync(0xffffffff, of_v.stage, 0);
    shared.k_empty[k].wait(of_k.parity ^ 1);
    if (leader) shared.k_full[k].arrive_expect(sizeof shared.k[0]);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < D / kChunk; ++c) {
      tma_load_4d(shared_address(shared.k[k]) + c * kTile, &p.k, &shared.k_full[k], kEvictLast,
                  c * kChunk, row, w.head_kv, batch_k);
    }
    shared.v_empty[v].wait(of_v.parity ^ 1);
    if (leader) shared.v_full[v].arrive_expect(sizeof shared.v[0]);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < DV / kChunk; ++c) {
      tma_load_4d(shared_address(shared.v[v]) + c * kTile, &p.v, &shared.v_full[v], kEvictLast,
                  c * kChunk, row, w.head_kv, batch_k);
    }
    of_k.advance();
    of_v.advance();
  }
}

template <int D, int DV, class T>
struct QueryConsumer {
  using Memory = QueryShared<D, DV, T>;
  static constexpr int kN = 64;              // keys of a step
  static constexpr int kTile = kKeys<D>;     // of a tile
  static constexpr int kSteps = kTile / kN;  // of a tile
  static constexpr int kS = kN / 2;          // accumulators of scores, per thread
  static constexpr int kG = D / 2;           // of dQ

  const AttentionGradientsArguments &p;
  Memory &shared;
  const QueryWork &w;
  const int wg, warp, lane;

  __device__ __forceinline__ QueryConsumer(const AttentionGradientsArguments &params,
                                           Memory &memory, int warpgroup)
      : p(params),
        shared(memory),
        w(memory.work),
        wg(warpgroup),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  template <int kStages>
  static __device__ __forceinline__ Ring<kStages> ring_at(int tile) {
    return {tile % kStages, static_cast<uint32_t>(tile / kStages & 1)};
  }

  // x = A B^T of the warpgroup's queries and the step's keys, of kColumns each.
  template <int kColumns>
  __device__ __forceinline__ void multiply_scores(float (&x)[kS], const T *queries, const T *keys,
                                                  int half) {
    const uint64_t a = descriptor_k_major(shared_address(queries));
    const uint64_t b = descriptor_k_major(shared_address(keys) + half * (kN * 128));
    hold(x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      Wgmma<T, kN>::template ss<0>(x, a + (i / 4 * (kBlockM * 128) + i % 4 * 32) / 16,
                                   b + (i / 4 * (kTile * 128) + i % 4 * 32) / 16, i != 0);
    }
    wgmma_commit();
  }

  // dQ += dS K.
  __device__ __forceinline__ void multiply_dq(float (&dq)[kG], const uint32_t (&ds)[kS / 2],
                                              const T *keys, int half) {
    const uint64_t b = descriptor_mn_major(shared_address(keys) + half * (kN * 128), kTile);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      Wgmma<T, D>::template rs<1>(dq, ds + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // Scores become dS. The thread's element 4j + 2i + c is of its row 8i and of the key
  // 8j + 2 (lane % 4) + c of the step.
  __device__ __forceinline__ void combine(float (&x)[kS], float (&y)[kS], int step,
                                          const float (&lse)[2], const float (&delta)[2],
                                          float slope) {
    const Sequence &s = w.sequence;
    const int key = (w.n_min * kSteps + step) * kN;
    const int first = w.first + kBlockM * wg + s.seqlen_k - s.seqlen_q;  // key of the diagonal
#pragma unroll
    for (int j = 0; j < kS; ++j) y[j] -= delta[j / 2 % 2];
    if (p.softcap_scale != 0.0f) {
#pragma unroll
      for (int j = 0; j < kS; ++j) {
        x[j] = cap(x[j], p.softcap_scale);
        y[j] *= fmaf(-x[j], x[j], 1.0f);
      }
    }
    if (p.alibi_slopes != nullptr) {
      const int at = first + 16 * warp + lane / 4 - key - 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kS; ++j) {
        const int distance = at + j / 2 % 2 * 8 - j / 4 * 8 - j % 2;
        x[j] = fmaf(-slope, static_cast<float>(abs(distance)), x[j]);
      }
    }
    const bool ends = key + kN > s.seqlen_k;
    if (ends || key + kN - 1 - first > p.window_right ||
        first + kBlockM - 1 - key > p.window_left) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Keys of the step from `from` to `to`.
        const int at = first + 16 * warp + lane / 4 + 8 * i - key;
        const int from = at - p.window_left;
        const int to = min(at + min(p.window_right, 1 << 29), s.seqlen_k - 1 - key);
#pragma unroll
        for (int j = 0; j < kS / 4; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * j + 2 * (lane % 4) + c;
            if (column < from || column > to) x[4 * j + 2 * i + c] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kS / 2; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = j % 2, at = 2 * j + c;
        x[at] = exp2_approx(fmaf(x[at], p.scale_log2, -lse[i])) * y[at];
      }
    }
  }

  // Rows behind the end of a packed sequence are its neighbour's, and 0 * NaN is NaN. (Behind the
  // end of a tensor TMA writes zeros.) All consumers take part.
  template <int kColumns>
  __device__ __forceinline__ void wait_rows(Mbarrier &full, uint32_t parity, T *tile, int n) {
    full.wait(parity);
    const int rows = w.sequence.seqlen_k - n * kTile;
    if (p.cu_seqlens_k == nullptr || rows >= kTile) return;
    uint4 *units = reinterpret_cast<uint4 *>(tile);
    // Whole 128-byte rows, so the swizzle within them does not matter.
    for (int i = threadIdx.x - 128; i < (kTile - rows) * 8; i += 256) {
#pragma unroll
      for (int c = 0; c < kColumns / kChunk; ++c) units[(c * kTile + rows) * 8 + i] = {0, 0, 0, 0};
    }
    fence_async_proxy();
    named_barrier_sync(kBarrierConsumers, 256);
  }

  // Queues scores and dP of a step.
  __device__ __forceinline__ void multiply_both(float (&x)[kS], float (&y)[kS], int step) {
    const int tile = step / kSteps, half = __shfl_sync(0xffffffff, step % kSteps, 0);
    // Anew in each step: descriptors kept for all of them would fill the registers.
    const int of = __shfl_sync(0xffffffff, wg, 0);
    const auto of_k = ring_at<Memory::kKStages>(tile);
    const auto of_v = ring_at<Memory::kVStages>(tile);
    const int k = __shfl_sync(0xffffffff, of_k.stage, 0),
              v = __shfl_sync(0xffffffff, of_v.stage, 0);
    if (half == 0) wait_rows<D>(shared.k_full[k], of_k.parity, shared.k[k], w.n_min + tile);
    multiply_scores<D>(x, shared.q[of], shared.k[k], half);
    if (half == 0) wait_rows<DV>(shared.v_full[v], of_v.parity, shared.v[v], w.n_min + tile);
    multiply_scores<DV>(y, shared.dout[of], shared.v[v], half);
  }

  // Lets the producer have what is no longer read after a step.
  __device__ __forceinline__ void release_v(int step) {
    if (step % kSteps == kSteps - 1) {
      release(shared.v_empty[ring_at<Memory::kVStages>(step / kSteps).stage]);
    }
  }
  __device__ __forceinline__ void release_k(int step) {
    if (step >= 0 && step % kSteps == kSteps - 1) {
      release(shared.k_empty[ring_at<Memory::kKStages>(step / kSteps).stage]);
    }
  }

  __device__ __forceinline__ void compute(float (&dq)[kG]) {
    const int steps = (w.n_max - w.n_min) * kSteps;
    float x[kS], y[kS], lse[2], delta[2];
    uint32_t ds[kS / 2];
    const Sequence &s = w.sequence;
    const int block = w.first / kBlockM + wg;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lse[i] = INFINITY;
      delta[i] = 0.0f;
      if (block * kBlockM < s.seqlen_q) {
        // In the order of rows.cuh.
        const float *statistics = p.statistics + block_at(p, s, w.head, block) * (2 * kBlockM) +
                                  statistic_at(16 * warp + lane / 4 + 8 * i);
        lse[i] = statistics[0];
        delta[i] = statistics[kBlockM];
      }
    }
    const float slope = slope_at(p, s.batch, w.head);
    shared.q_full.wait(0);
    multiply_both(x, y, 0);
    wgmma_wait<0>();
    hold(x);
    hold(y);
    release_v(0);
#pragma unroll 1
    for (int step = 0; step + 1 < steps; ++step) {
      combine(x, y, step, lse, delta, slope);
      wgmma_wait<0>();
      hold(dq);
      hold(ds);
      release_k(step - 1);
#pragma unroll
      for (int i = 0; i < kS / 2; ++i) ds[i] = pack<T>(x[2 * i], x[2 * i + 1]);
      multiply_both(x, y, step + 1);
      const int stage = __shfl_sync(0xffffffff, ring_at<Memory::kKStages>(step / kSteps).stage, 0);
      multiply_dq(dq, ds, shared.k[stage], __shfl_sync(0xffffffff, step % kSteps, 0));
      wgmma_wait<1>();
      hold(x);
      hold(y);
      release_v(step + 1);
    }
    const int step = steps - 1;
    combine(x, y, step, lse, delta, slope);
    wgmma_wait<0>();
    hold(dq);
    hold(ds);
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) ds[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    multiply_dq(dq, ds, shared.k[ring_at<Memory::kKStages>(step / kSteps).stage], step % kSteps);
    wgmma_wait<0>();
    hold(dq);
    hold(ds);
  }

  __device__ __forceinline__ void run() {
    float dq[kG];
#pragma unroll
    for (int i = 0; i < kG; ++i) dq[i] = 0.0f;
    hold(dq);
    if (w.n_min < w.n_max) compute(dq);
    const Sequence &s = w.sequence;
    T *rows = static_cast<T *>(p.dq) +
              (p.cu_seqlens_q != nullptr ? 0 : s.batch) * p.dq_batch_stride +
              w.head * p.dq_head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = w.first + kBlockM * wg + 16 * warp + lane / 4 + 8 * i;
      if (query >= s.seqlen_q) continue;
      T *row =
          rows + static_cast<int64_t>(s.q_begin + query) * p.dq_sequence_stride + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kG / 4; ++j) {
        if (8 * j >= p.head_dim) continue;
        *reinterpret_cast<uint32_t *>(row + 8 * j) =
            pack<T>(dq[4 * j + 2 * i] * p.scale, dq[4 * j + 2 * i + 1] * p.scale);
      }
    }
  }
};

// Dynamic shared memory, with room to align its start.
template <int D, int DV, class T>
consteval int query_shared_bytes() {
  return sizeof(QueryShared<D, DV, T>) + 1024 - 16;
}

template <int D, int DV, class T>
__device__ __forceinline__ void attention_query_gradients(const AttentionGradientsArguments &p) {
  using Memory = QueryShared<D, DV, T>;
  extern __shared__ uint8_t dynamic[];
  Memory &shared =
      *reinterpret_cast<Memory *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
  const QueryWork work = query_work_at<D>(p);
  if (work.first >= work.sequence.seqlen_q) return;

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.dout);
    shared.work = work;
    shared.init_barriers();
    fence_mbarrier_init();
  }
  __syncthreads();

  // Uniform over the warp, which lets descriptors live in uniform registers.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    release_registers_to<kProducerRegisters>();
    if (warp == 0) produce_keys<D, DV, T>(p, shared);
  } else {
    acquire_registers_to<kConsumerRegisters>();
    QueryConsumer<D, DV, T>(p, shared, warp / 4 - 1).run();
  }
}

}  // namespace unsloth
