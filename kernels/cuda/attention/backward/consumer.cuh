// The consumers: two warpgroups that compute, for 64 keys each,
//   P = exp(scale K Q^T - lse),  dP = V dO^T,  dS = P (dP - delta),
//   dV = P^T dO,  dK = scale dS^T Q,  dQ += scale dS K
// (Dao 2023, "FlashAttention-2", algorithm 2), everything but dQ transposed: keys are rows, so P^T
// is an operand as it stands in registers. dS goes through shared memory, whence both products that
// read it take it: of dQ each warpgroup computes half of the columns, from all 128 keys.
//
// The loop is pipelined across blocks of queries: the scores of the next one are computed while
// gradients of this one are, and dV may still run when the next turn begins.
#pragma once

#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/wgmma.cuh"
#include "shared.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, class T, Mask kMask>
struct Consumer {
  static constexpr int kS = kBlockM / 2;  // accumulators of a score tile, per thread
  static constexpr int kG = D / 2;        // of dK and dV
  static constexpr int kQ = D / 4;        // of dQ, at most in the place of dP
  static_assert(kQ <= kS);

  const AttentionGradientsArguments &p;
  Shared<D, T> &shared;
  const Work &w;  // in shared memory: registers are full
  const int wg, warp, lane;

  __device__ __forceinline__ Consumer(const AttentionGradientsArguments &params,
                                      Shared<D, T> &memory, int consumer_warp)
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

  // Zero, as no block of queries `m` is negative; but what has it in its address comes behind all
  // exponentials. ptxas moves waits for products up, past the exponentials that are there to hide
  // them, but not past a barrier.
  static __device__ __forceinline__ uint32_t zero_of(const float (&exponentials)[kS], int m) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kS; ++i) bits |= __float_as_uint(exponentials[i]);
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
      Wgmma<T, kBlockM>::template ss<0>(x, a + (i / 4 * (kBlockN * 128) + i % 4 * 32) / 16,
                                        b + (i / 4 * (kBlockM * 128) + i % 4 * 32) / 16, i != 0);
    }
    wgmma_commit();
  }

  // dV += P^T dO.
  __device__ __forceinline__ void multiply_dv(float (&dv)[kG],
                                              const uint32_t (&probabilities)[kS / 2],
                                              const T *dout) {
    const uint64_t b = descriptor_mn_major(shared_address(dout), kBlockM);
    hold(dv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      Wgmma<T, D>::template rs<1>(dv, probabilities + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // dK += dS^T Q, dS^T read down the rows of dS.
  __device__ __forceinline__ void multiply_dk(float (&dk)[kG], const T *ds, const T *q, int of) {
    const uint64_t a = descriptor_mn_major(shared_address(ds) + of * (kBlockM * 128), kBlockM);
    const uint64_t b = descriptor_mn_major(shared_address(q), kBlockM);
    hold(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      Wgmma<T, D>::template ss<1, 1>(dk, a + i * (16 * 128) / 16, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // The warpgroup's columns of dS K.
  __device__ __forceinline__ void multiply_dq(float (&dq)[kQ], const T *ds, int of) {
    // At head dim 64 the two halves share a chunk: 32 columns are 64 bytes of its rows.
    const uint32_t half = D == 64 ? of * 64 : of * (D / 2 / kChunk) * (kBlockN * 128);
    const uint64_t a = descriptor_k_major(shared_address(ds));
    const uint64_t b = descriptor_mn_major(shared_address(shared.k) + half, kBlockN);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
      Wgmma<T, D / 2>::template ss<1>(dq, a + (i / 4 * (kBlockM * 128) + i % 4 * 32) / 16,
                                      b + i * (16 * 128) / 16, i != 0);
    }
    wgmma_commit();
  }

  // The thread's 16 of the log-sum-exps of a block of queries, in the order of its accumulators;
  // its deltas lie kBlockM numbers behind them.
  __device__ __forceinline__ const float4 *statistics_of(int stage) const {
    return reinterpret_cast<const float4 *>(shared.statistics[stage] + lane % 4 * (kBlockM / 4));
  }

  // Scores become probabilities. The thread's element 4j + 2i + c is of its key 8i and of the query
  // 8j + 2 (lane % 4) + c of block m.
  __device__ __forceinline__ void exponentiate(float (&x)[kS], int stage, int m) {
    if (m < w.mask_below || m >= w.mask_from) {
      const Sequence &s = w.sequence;
      const int key = w.first_key + 64 * wg + 16 * warp + lane / 4;
      const int first = m * kBlockM;
      const int diagonal = s.seqlen_k - s.seqlen_q;
      const int right = kMask == Mask::kCausal ? 0 : p.window_right;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_key = key + 8 * i, column = first + 2 * (lane % 4);
        int from = kMask == Mask::kNone ? 0 : of_key - diagonal - right - column;
        if (of_key >= s.seqlen_k) from = kBlockM;
        const int to =
            kMask == Mask::kWindow ? of_key - diagonal + p.window_left - column : kBlockM;
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
    const float4 *lse = statistics_of(stage);
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

  // dP becomes dS, which goes to shared memory as rows of queries.
  __device__ __forceinline__ void store_ds(float (&y)[kS], const float (&probabilities)[kS],
                                           int stage, T *ds) {
    const float4 *delta = statistics_of(stage) + kBlockM / 4;
    uint32_t packed[kS / 2];
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      const float4 d = delta[j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 8 * j + 2 * i;
        packed[4 * j + i] =
            pack<T>(probabilities[at] * (y[at] - d.x), probabilities[at + 1] * (y[at + 1] - d.y));
        packed[4 * j + 2 + i] = pack<T>(probabilities[at + 4] * (y[at + 4] - d.z),
                                        probabilities[at + 5] * (y[at + 5] - d.w));
      }
    }
    const uint32_t base = shared_address(ds) + wg * (kBlockM * 128);
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {  // 16 queries: two blocks of 8, each of 16 keys
      const uint32_t to = (16 * j + lane % 16) * 128 + warp * 32 + lane / 16 * 16;
      store_matrix_x4_transposed(base + swizzle_128b(to), packed[4 * j], packed[4 * j + 2],
                                 packed[4 * j + 1], packed[4 * j + 3]);
    }
    fence_async_proxy();
  }

  // Adds to the sums of dQ, in the order of rows.cuh.
  __device__ __forceinline__ void add_dq(const float (&dq)[kQ], float *sums) {
    if (p.sums == nullptr) return;
#pragma unroll
    for (int i = 0; i < kQ / 4; ++i) {
      add_to_global(sums + i * 128 + lane * 4, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                    dq[4 * i + 3]);
    }
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
    clear_rows<kBlockM>(shared.q[at.stage], w.sequence.seqlen_q - m * kBlockM);
    named_barrier_sync(kBarrierConsumers, 256);
  }
  __device__ __forceinline__ void wait_dout(const Ring<kStages> &at, int m) {
    shared.dout_full[at.stage].wait(at.parity);
    if (m != w.partial) return;
    clear_rows<kBlockM>(shared.dout[at.stage], w.sequence.seqlen_q - m * kBlockM);
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

  __device__ __forceinline__ void compute(float (&dk)[kG], float (&dv)[kG]) {
    const int steps = (w.m_max - w.m_min) * p.group;
    float x[kS], y[kS];
    uint32_t probabilities[kS / 2];
    // Where there is room dQ has registers of its own, for ptxas will not share half an operand's.
    float apart[kQ];
    float (&dq)[kQ] = *reinterpret_cast<float (*)[kQ]>(kQ < kS ? apart : y);
    shared.kv_full.wait(0);
    const int keys = w.sequence.seqlen_k - w.first_key;
    if (p.cu_seqlens_k != nullptr && keys < kBlockN) {
      clear_rows<kBlockN>(shared.k, keys);
      clear_rows<kBlockN>(shared.v, keys);
      named_barrier_sync(kBarrierConsumers, 256);
    }
    int m = w.m_min;
    float *sums = p.sums + block_at(p, w.sequence, w.head_kv * p.group, m) * (kBlockM * D) +
                  (4 * wg + warp) * (kBlockM * D / 8);
    Ring<kQStages> of_q;
    int of = uniform_warpgroup();
    wait_q(of_q, m);
    multiply_scores(x, shared.k, shared.q[0], of);
    wgmma_wait<0>();
    hold(x);
    exponentiate(x, 0, m);
    convert(x, probabilities);
    wait_dout({0, 0}, m);
    multiply_scores(y, shared.v, shared.dout[0], of);
    multiply_dv(dv, probabilities, shared.dout[0]);
    wgmma_wait<1>();
    hold(y);
#pragma unroll 1
    for (int step = 0; step + 1 < steps; ++step) {
      // The compiler keeps descriptors in uniform registers as long as it can tell that the whole
      // warp has the same.
      of = uniform_warpgroup();
      const int q_stage = __shfl_sync(0xffffffff, of_q.stage, 0);
      const int stage = __shfl_sync(0xffffffff, step & 1, 0);
      of_q.advance();
      const int next_q = __shfl_sync(0xffffffff, of_q.stage, 0), next = stage ^ 1;
      store_ds(y, x, q_stage, shared.ds[stage]);
      const bool same_head = m + 1 < w.m_max;
      const int next_m = same_head ? m + 1 : w.m_min;
      wait_q(of_q, next_m);
      multiply_scores(x, shared.k, shared.q[next_q], of);
      wgmma_wait<1>();
      hold(dv);
      hold(probabilities);
      named_barrier_sync(kBarrierConsumers, 256);
      multiply_dq(dq, shared.ds[stage], of);
      multiply_dk(dk, shared.ds[stage], shared.q[q_stage], of);
      wgmma_wait<2>();
      hold(x);
      exponentiate(x, next_q, next_m);
      release((&shared.dout_empty[stage])[zero_of(x, next_m)]);
      wgmma_wait<1>();
      hold(dq);
      add_dq(dq, sums);
      hold(x);
      convert(x, probabilities);
      wait_dout({next, step + 1 >> 1 & 1u}, next_m);
      multiply_scores(y, shared.v, shared.dout[next], of);
      multiply_dv(dv, probabilities, shared.dout[next]);
      wgmma_wait<2>();
      hold(dk);
      release(shared.q_empty[q_stage]);
      wgmma_wait<1>();
      hold(y);
      sums += same_head ? kBlockM * D : w.to_next_head;
      m = next_m;
    }
    const int stage = steps - 1 & 1;
    store_ds(y, x, of_q.stage, shared.ds[stage]);
    wgmma_wait<0>();
    hold(dv);
    hold(probabilities);
    named_barrier_sync(kBarrierConsumers, 256);
    multiply_dq(dq, shared.ds[stage], of);
    multiply_dk(dk, shared.ds[stage], shared.q[of_q.stage], of);
    wgmma_wait<1>();
    hold(dq);
    add_dq(dq, sums);
    wgmma_wait<0>();
    hold(dk);
  }

  static __device__ __forceinline__ void convert(const float (&x)[kS],
                                                 uint32_t (&probabilities)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) probabilities[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
};

}  // namespace unsloth
