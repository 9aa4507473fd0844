// The consumers: two warpgroups that compute, for 64 keys each,
//   P = exp(scale K Q^T - lse),  dP = V dO^T,  dS = P (dP - delta),
//   dV = P^T dO,  dK = scale dS^T Q,  dQ += scale dS K
// (Dao 2023, "FlashAttention-2", algorithm 2), everything but dQ transposed: keys are rows, so P^T
// is an operand as it stands in registers. dS goes through shared memory, whence both products that
// read it take it: of dQ each warpgroup computes half of the columns, from all 128 keys.
//
// The loop is pipelined across steps: the scores of the next one are computed while gradients of
// this one are, dV may still run when the next turn begins, and dQ is a turn late. At head dim 64 a
// step has 128 queries, a warpgroup computes dQ of half of them instead, and what a step costs
// besides its products is paid half as often.
#pragma once

#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/wgmma.cuh"
#include "shared.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, class T, Mask kMask>
struct Consumer {
  using Memory = StepShared<D, T>;
  static constexpr int kM = kStep<D>;      // queries of a step
  static constexpr int kS = kM / 2;        // accumulators of a score tile, per thread
  static constexpr int kG = D / 2;         // of dK and dV
  static constexpr int kQ = kM * D / 256;  // of dQ
  static constexpr bool kWide = kM > kBlockM;
  static_assert(kQ <= kS);

  const AttentionGradientsArguments &p;
  Memory &shared;
  const Work &w;  // in shared memory: registers are full
  const int wg, warp, lane;

  __device__ __forceinline__ Consumer(const AttentionGradientsArguments &params, Memory &memory,
                                      int consumer_warp)
      : p(params),
        shared(memory),
        w(memory.work),
        wg(consumer_warp / 4),
        warp(consumer_warp % 4),
        lane(threadIdx.x % 32) {}

  // Asked for anew in each step: descriptors that depend on it would else be kept across steps, in
  // registers of which there are none left, and moved to uniform ones before each product.
  __device__ __forceinline__ int uniform_warpgroup() const {
    return __shfl_sync(0xffffffff, wg, 0);
  }

  // Zero, as no step `m` is negative; but what has it in its address comes behind all
  // exponentials. ptxas moves waits for products up, past the exponentials that are there to hide
  // them, but not past a barrier.
  template <int N>
  static __device__ __forceinline__ uint32_t zero_of(const uint32_t (&exponentials)[N], int m) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= exponentials[i];
    return (bits & static_cast<uint32_t>(m)) >> 31;
  }

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // x = A B^T for 64 rows of K or V and a block of queries. `of`: the warpgroup, uniformly.
  __device__ __forceinline__ void multiply_scores(float (&x)[kS], const T *keys, const T *queries,
                                                  int of) {
    const uint64_t a = descriptor_k_major(shared_address(keys) + of * 64 * 128);
    const uint64_t b = descriptor_k_major(shared_address(queries));
    hold(x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      Wgmma<T, kM>::template ss<0>(x, a + (i / 4 * (kBlockN * 128) + i % 4 * 32) / 16,
                                   b + (i / 4 * (kM * 128) + i % 4 * 32) / 16, i != 0);
    }
    wgmma_commit();
  }

  // dV += P^T dO.
  __device__ __forceinline__ void multiply_dv(float (&dv)[kG],
                                              const uint32_t (&probabilities)[kS / 2],
                                              const T *dout) {
    const uint64_t b = descriptor_mn_major(shared_address(dout), kM);
    hold(dv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      Wgmma<T, D>::template rs<1>(dv, probabilities + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // dK += dS^T Q, dS^T read down the rows of dS.
  __device__ __forceinline__ void multiply_dk(float (&dk)[kG], const T *ds, const T *q, int of) {
    const uint64_t a = descriptor_mn_major(shared_address(ds) + of * (kM * 128), kM);
    const uint64_t b = descriptor_mn_major(shared_address(q), kM);
    hold(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      Wgmma<T, D>::template ss<1, 1>(dk, a + i * (16 * 128) / 16, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // The warpgroup's columns of dS K; of a wide step its queries.
  __device__ __forceinline__ void multiply_dq(float (&dq)[kQ], const T *ds, int of) {
    const uint32_t rows = kWide ? of * (kBlockM * 128) : 0;
    const uint32_t columns = kWide ? 0 : of * (D / 2 / kChunk) * (kBlockN * 128);
    const uint64_t a = descriptor_k_major(shared_address(ds) + rows);
    const uint64_t b = descriptor_mn_major(shared_address(shared.k) + columns, kBlockN);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
      Wgmma<T, 2 * kQ>::template ss<1>(dq, a + (i / 4 * (kM * 128) + i % 4 * 32) / 16,
                                       b + i * (16 * 128) / 16, i != 0);
    }
    wgmma_commit();
  }

  // The thread's log-sum-exps of 16 queries, in the order of its accumulators j of four each, and
  // the deltas, which lie kBlockM numbers behind them.
  __device__ __forceinline__ float4 statistics_at(int stage, int j, int delta) const {
    const float *block = shared.statistics[stage] + j / 4 * (2 * kBlockM) + delta * kBlockM;
    return reinterpret_cast<const float4 *>(block)[j % 4 * 4 + lane % 4];
  }

  __device__ __forceinline__ void load_statistics(float4 (&to)[kS / 8], int stage,
                                                  int delta) const {
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) to[j] = statistics_at(stage, j, delta);
  }

  // Scores become probabilities. The thread's element 4j + 2i + c is of its key 8i and of the query
  // 8j + 2 (lane % 4) + c of block m.
  __device__ __forceinline__ void mask(float (&x)[kS], int m) {
    if (m < w.mask_below || m >= w.mask_from) {
      const Sequence &s = w.sequence;
      const int key = w.first_key + 64 * wg + 16 * warp + lane / 4;
      const int first = m * kM;
      const int diagonal = s.seqlen_k - s.seqlen_q;
      const int right = kMask == Mask::kCausal ? 0 : p.window_right;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_key = key + 8 * i, column = first + 2 * (lane % 4);
        int from = kMask == Mask::kNone ? 0 : of_key - diagonal - right - column;
        if (of_key >= s.seqlen_k) from = kM;
        const int to = kMask == Mask::kWindow ? of_key - diagonal + p.window_left - column : kM;
#pragma unroll
        for (int j = 0; j < kS / 4; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int at = 8 * j + c;
            if (at < from || (kMask == Mask::kWindow && at > to)) x[4 * j + 2 * i + c] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void exponentiate(float (&x)[kS], const float4 (&lse)[kS / 8], int m) {
    mask(x, m);
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      const float4 l = lse[j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float *of = x + 8 * j + 2 * i;
        of[0] = exp2_approx(fmaf(of[0], p.scale_log2, -l.x));
        of[1] = exp2_approx(fmaf(of[1], p.scale_log2, -l.y));
        of[4] = exp2_approx(fmaf(of[4], p.scale_log2, -l.z));
        of[5] = exp2_approx(fmaf(of[5], p.scale_log2, -l.w));
      }
    }
  }

  // dP becomes dS.
  __device__ __forceinline__ void gradients_of_scores(const float (&y)[kS],
                                                      const uint32_t (&probabilities)[kS / 2],
                                                      const float4 (&delta)[kS / 8],
                                                      uint32_t (&packed)[kS / 2]) {
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      const float4 d = delta[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * j + 2 * i;
        const float2 pair = unpack<T>(probabilities[4 * j + i]);
        packed[4 * j + i] = pack<T>(pair.x * (y[at] - (i < 2 ? d.x : d.z)),
                                    pair.y * (y[at + 1] - (i < 2 ? d.y : d.w)));
      }
    }
  }

  // To shared memory as rows of queries.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kS / 2], T *ds) {
    const uint32_t base = shared_address(ds) + wg * (kM * 128);
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {  // 16 queries: two blocks of 8, each of 16 keys
      const uint32_t to = (16 * j + lane % 16) * 128 + warp * 32 + lane / 16 * 16;
      store_matrix_x4_transposed(base + swizzle_128b(to), packed[4 * j], packed[4 * j + 2],
                                 packed[4 * j + 1], packed[4 * j + 3]);
    }
  }

  // The warp's part of dS is there for both warpgroups' products.
  __device__ __forceinline__ void publish_ds(int stage) {
    fence_async_proxy();
    release(shared.ds_full[wg][stage]);
  }

  // Rows behind the end of a packed sequence are its neighbour's, and 0 * NaN is NaN. (Behind the
  // end of a tensor TMA writes zeros.) All consumers take part.
  template <int kRows>
  __device__ __forceinline__ void clear_rows(T *tile, int rows) {
    if (rows >= kRows) return;
    uint4 *units = reinterpret_cast<uint4 *>(tile);
    // Whole 128-byte rows, so the swizzle within them does not matter.
    for (int i = threadIdx.x - 128; i < (kRows - rows) * 8; i += 256) {
#pragma unroll
      for (int c = 0; c < D / kChunk; ++c) units[(c * kRows + rows) * 8 + i] = {0, 0, 0, 0};
    }
    fence_async_proxy();
  }

  __device__ __forceinline__ void wait_q(const Ring<kQStages> &at, int m) {
    shared.q_full[at.stage].wait(at.parity);
    if (m != w.partial) return;
    clear_rows<kM>(shared.q[at.stage], w.sequence.seqlen_q - m * kM);
    named_barrier_sync(kBarrierConsumers, 256);
  }
  __device__ __forceinline__ void wait_dout(const Ring<Memory::kDoutBuffers> &at, int m) {
    shared.dout_full[at.stage].wait(at.parity);
    if (m != w.partial) return;
    clear_rows<kM>(shared.dout[at.stage], w.sequence.seqlen_q - m * kM);
    named_barrier_sync(kBarrierConsumers, 256);
  }

  // 64 rows of dK or dV.
  __device__ __forceinline__ void write(const float (&g)[kG], float factor, void *to,
                                        int64_t batch_stride, int64_t sequence_stride,
                                        int64_t head_stride) {
    if (to == nullptr) return;
    const Sequence &s = w.sequence;
    T *rows = static_cast<T *>(to) + (p.cu_seqlens_k != nullptr ? 0 : s.batch) * batch_stride +
              w.head_kv * head_stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = w.first_key + 64 * wg + 16 * warp + lane / 4 + 8 * i;
      if (key >= s.seqlen_k) continue;
      T *row = rows + (s.k_begin + key) * sequence_stride + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kG / 4; ++j) {
        if (8 * j >= p.head_dim) continue;
        *reinterpret_cast<uint32_t *>(row + 8 * j) =
            pack<T>(g[4 * j + 2 * i] * factor, g[4 * j + 2 * i + 1] * factor);
      }
    }
  }

  template <int N>
  static __device__ __forceinline__ void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = 0.0f;
    hold(x);
  }

  __device__ __forceinline__ void run() {
    float dk[kG], dv[kG];
    clear(dk);
    clear(dv);
    if (w.m_min < w.m_max) compute(dk, dv);
    write(dv, 1.0f, p.dv, p.dv_batch_stride, p.dv_sequence_stride, p.dv_head_stride);
    write(dk, p.scale, p.dk, p.dk_batch_stride, p.dk_sequence_stride, p.dk_head_stride);
  }

  // Where the loop stands: a step's queries `m`, and the buffers of what belongs to them.
  struct Place {
    int m;
    Ring<kQStages> of_q;
    Ring<Memory::kDoutBuffers> of_dout;
    Ring<kDsStages> of_ds;
    float *sums;  // of the first step whose dQ is not added yet
    int sums_m;   // its m
  };

  // Adds to the sums of dQ, in the order of rows.cuh, and moves on to the next step's.
  __device__ __forceinline__ void add_dq(const float (&dq)[kQ], Place &t) {
    float *sums = t.sums;
    const bool same_head = t.sums_m + 1 < w.m_max;
    t.sums += same_head ? kM * D : w.to_next_head;
    t.sums_m = same_head ? t.sums_m + 1 : w.m_min;
    if (p.sums == nullptr) return;
    // Of a wide step the halves of the columns lie apart.
    constexpr int kHalf = kWide ? kQ / 8 : kQ / 4;
#pragma unroll
    for (int i = 0; i < kQ / 4; ++i) {
      add_to_global(sums + i / kHalf * (kBlockM * D / 2) + i % kHalf * 128 + lane * 4, dq[4 * i],
                    dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
  }

  // With dP of the turn's step in y, its P in `probabilities`, and dV that may still run: dK of
  // this step, dQ of the one before, in x, and scores, dP and dV of the next one, in z. Warpgroups
  // need not meet: what one reads of the other's dS is a turn old, so they drift apart until one's
  // exponentials run under the other's products.
  //
  // Reductions are slow to take dQ from x, and a product into the same registers waits for them.
  // So at head dim 128 x is y, and the caller exchanges y and z after each turn; at head dim 64 z
  // is y, and dQ has registers of its own.
  template <bool kFirst, bool kLast>
  __device__ __forceinline__ void turn(float (&x)[kQ], float (&y)[kS], float (&z)[kS],
                                       uint32_t (&probabilities)[kS / 2], float4 (&delta)[kS / 8],
                                       float (&dk)[kG], float (&dv)[kG], Place &t) {
    // The compiler keeps descriptors in uniform registers as long as it can tell that the whole
    // warp has the same.
    const int of = uniform_warpgroup();
    const int q_stage = __shfl_sync(0xffffffff, t.of_q.stage, 0);
    const int dout_stage = __shfl_sync(0xffffffff, t.of_dout.stage, 0);
    const int ds_stage = __shfl_sync(0xffffffff, t.of_ds.stage, 0);
    const int before = ds_stage == 0 ? kDsStages - 1 : ds_stage - 1;
    uint32_t packed[kS / 2];
    if constexpr (kWide) load_statistics(delta, q_stage, 1);
    gradients_of_scores(y, probabilities, delta, packed);
    // Also says that the other warpgroup has read what the buffer had.
    if (!kFirst) {
      shared.ds_full[wg ^ 1][before].wait(ds_stage == 0 ? t.of_ds.parity ^ 1 : t.of_ds.parity);
    }
    store_ds(packed, shared.ds[ds_stage]);
    // The fence waits for all that the thread has written; of a wide step that is much.
    if constexpr (!kWide) publish_ds(ds_stage);
    const bool same_head = t.m + 1 < w.m_max;
    const int next_m = same_head ? t.m + 1 : w.m_min;
    t.of_q.advance();
    const int next_q = __shfl_sync(0xffffffff, t.of_q.stage, 0);
    float4 lse[kS / 8];
    if (!kLast) {
      wait_q(t.of_q, next_m);
      if constexpr (!kWide) load_statistics(lse, next_q, 0);
      multiply_scores(z, shared.k, shared.q[next_q], of);
    }
    if constexpr (kWide) publish_ds(ds_stage);
    if (!kFirst) multiply_dq(x, shared.ds[before], of);
    shared.ds_full[wg][ds_stage].wait(t.of_ds.parity);
    multiply_dk(dk, shared.ds[ds_stage], shared.q[q_stage], of);
    if (!kLast) {
      wgmma_wait<kFirst ? 2 : 3>();
      hold(dv);
      hold(probabilities);
      if constexpr (kWide) load_statistics(lse, next_q, 0);
      wgmma_wait<kFirst ? 1 : 2>();
      hold(z);
      exponentiate(z, lse, next_m);
      convert(z, probabilities);
      release((&shared.dout_empty[dout_stage])[zero_of(probabilities, next_m)]);
      if (!kFirst) {
        wgmma_wait<1>();
        hold(x);
        add_dq(x, t);
      }
      t.of_dout.advance();
      wait_dout(t.of_dout, next_m);
      const int next_dout = __shfl_sync(0xffffffff, t.of_dout.stage, 0);
      multiply_scores(z, shared.v, shared.dout[next_dout], of);
      multiply_dv(dv, probabilities, shared.dout[next_dout]);
      if constexpr (!kWide) load_statistics(delta, next_q, 1);
      wgmma_wait<2>();
      hold(dk);
      release(shared.q_empty[q_stage]);
      wgmma_wait<1>();
      hold(z);
      t.of_ds.advance();
      t.m = next_m;
    } else {
      wgmma_wait<0>();
      hold(dk);
      hold(dv);
      if (!kFirst) {
        hold(x);
        add_dq(x, t);
      }
      shared.ds_full[wg ^ 1][ds_stage].wait(t.of_ds.parity);
      multiply_dq(x, shared.ds[ds_stage], of);
      wgmma_wait<0>();
      hold(x);
      add_dq(x, t);
    }
  }

  __device__ __forceinline__ void compute(float (&dk)[kG], float (&dv)[kG]) {
    const int steps = (w.m_max - w.m_min) * p.group;
    float x[kQ], y[kS];
    uint32_t probabilities[kS / 2];
    float4 delta[kS / 8];
    shared.kv_full.wait(0);
    const int keys = w.sequence.seqlen_k - w.first_key;
    if (p.cu_seqlens_k != nullptr && keys < kBlockN) {
      clear_rows<kBlockN>(shared.k, keys);
      clear_rows<kBlockN>(shared.v, keys);
      named_barrier_sync(kBarrierConsumers, 256);
    }
    Place t;
    t.m = w.m_min;
    t.sums_m = t.m;
    t.sums = p.sums +
             block_at(p, w.sequence, w.head_kv * p.group, t.m * (kM / kBlockM)) * (kBlockM * D) +
             (kWide ? wg * (kBlockM * D) : wg * (kBlockM * D / 2)) + warp * (kBlockM * D / 8);
    const int of = uniform_warpgroup();
    wait_q(t.of_q, t.m);
    multiply_scores(y, shared.k, shared.q[0], of);
    load_statistics(delta, 0, 0);
    wgmma_wait<0>();
    hold(y);
    exponentiate(y, delta, t.m);
    convert(y, probabilities);
    wait_dout(t.of_dout, t.m);
    multiply_scores(y, shared.v, shared.dout[0], of);
    multiply_dv(dv, probabilities, shared.dout[0]);
    load_statistics(delta, 0, 1);
    wgmma_wait<1>();
    hold(y);
    if constexpr (kQ == kS) {
      if (steps == 1) {
        turn<true, true>(y, y, x, probabilities, delta, dk, dv, t);
        return;
      }
      turn<true, false>(y, y, x, probabilities, delta, dk, dv, t);
#pragma unroll 1
      for (int step = 3; step < steps; step += 2) {
        turn<false, false>(x, x, y, probabilities, delta, dk, dv, t);
        turn<false, false>(y, y, x, probabilities, delta, dk, dv, t);
      }
      if (steps % 2 != 0) {
        turn<false, false>(x, x, y, probabilities, delta, dk, dv, t);
        turn<false, true>(y, y, x, probabilities, delta, dk, dv, t);
      } else {
        turn<false, true>(x, x, y, probabilities, delta, dk, dv, t);
      }
    } else {
      if (steps == 1) {
        turn<true, true>(x, y, y, probabilities, delta, dk, dv, t);
        return;
      }
      turn<true, false>(x, y, y, probabilities, delta, dk, dv, t);
#pragma unroll 1
      for (int step = 2; step < steps; ++step) {
        turn<false, false>(x, y, y, probabilities, delta, dk, dv, t);
      }
      turn<false, true>(x, y, y, probabilities, delta, dk, dv, t);
    }
  }

  static __device__ __forceinline__ void convert(const float (&x)[kS],
                                                 uint32_t (&probabilities)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) probabilities[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
};

}  // namespace unsloth
