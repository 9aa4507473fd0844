// dK and dV alone, of heads up to 128: two warpgroups compute, for 64 keys each,
//   P = exp(scale K Q^T - lse),  dP = V dO^T,  dS = P (dP - delta),  dV = P^T dO,
//   dK = scale dS^T Q.
// Keys are rows, so P^T and dS^T are operands as they stand in registers, and the warpgroups have
// nothing to tell each other. At head dim 128 there is no register left for dS^T, which goes
// through shared memory. The producer is that of all gradients.
#pragma once

#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/wgmma.cuh"
#include "rows.cuh"
#include "scores.cuh"
#include "shared.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, class T>
struct KeyConsumer {
  using Memory = KeysShared<D, T>;
  static constexpr int kS = kBlockM / 2;   // accumulators of a score tile, per thread
  static constexpr int kG = D / 2;         // of dK and dV
  static constexpr bool kStored = D > 64;  // whether dS^T goes through shared memory

  const AttentionGradientsArguments &p;
  Memory &shared;
  const Work &w;  // in shared memory: registers are full
  const Steps turns;
  const int wg, warp, lane;

  __device__ __forceinline__ KeyConsumer(const AttentionGradientsArguments &params, Memory &memory,
                                         int warpgroup)
      : p(params),
        shared(memory),
        w(memory.work),
        turns(memory.work.steps),
        wg(warpgroup),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // x = A B^T for 64 rows of K or V and a block of queries.
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

  // dV += P^T dO, dK += dS^T Q.
  __device__ __forceinline__ void multiply_gradient(float (&g)[kG], const uint32_t (&a)[kS / 2],
                                                    const T *queries) {
    const uint64_t b = descriptor_mn_major(shared_address(queries), kBlockM);
    hold(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      Wgmma<T, D>::template rs<1>(g, a + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // The same of dS^T in shared memory.
  __device__ __forceinline__ void multiply_dk(float (&dk)[kG], const T *ds, const T *q) {
    const uint64_t a = descriptor_k_major(shared_address(ds));
    const uint64_t b = descriptor_mn_major(shared_address(q), kBlockM);
    hold(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      Wgmma<T, D>::template ss<1>(dk, a + i * 32 / 16, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // dS^T as rows of keys, 64 queries each.
  __device__ __forceinline__ void store_ds(const float (&y)[kS], T *ds) {
    const uint32_t row = shared_address(ds) + (16 * warp + lane % 16) * 128;
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      const float *of = y + 8 * j;
      const uint32_t unit = 2 * j + lane / 16;
      store_matrix_x4(row + (unit ^ lane % 8) * 16, pack<T>(of[0], of[1]), pack<T>(of[2], of[3]),
                      pack<T>(of[4], of[5]), pack<T>(of[6], of[7]));
    }
    fence_async_proxy();
    named_barrier_sync(kBarrierConsumers + 1 + wg, 128);
  }

  // Scores become probabilities, and dP becomes dS. The thread's element 4j + 2i + c is of its key
  // 8i and of the query 8j + 2 (lane % 4) + c of block m.
  __device__ __forceinline__ void combine(float (&x)[kS], float (&y)[kS], int step, int m) {
    const Sequence &s = w.sequence;
    // In the order of rows.cuh.
    const float *statistics = shared.statistics[step % Memory::kQBuffers] + lane % 4 * 4;
    const int key = w.first_key + 64 * wg + 16 * warp + lane / 4;
    const int query =
        m * kBlockM + 2 * (lane % 4) + s.seqlen_k - s.seqlen_q;  // key of its diagonal
#pragma unroll
    for (int i = 0; i < kS; ++i) y[i] -= statistics[kBlockM + statistic_of(i)];
    if (p.softcap_scale != 0.0f) {
#pragma unroll
      for (int i = 0; i < kS; ++i) {
        x[i] = cap(x[i], p.softcap_scale);
        y[i] *= fmaf(-x[i], x[i], 1.0f);
      }
    }
    if (p.alibi_slopes != nullptr) {
      const float slope =
          slope_at(p, s.batch, w.head_kv * p.group + step / (turns.m_max - turns.m_min));
#pragma unroll
      for (int i = 0; i < kS; ++i) {
        const int distance = query - key + i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
        x[i] = fmaf(-slope, static_cast<float>(abs(distance)), x[i]);
      }
    }
    if (m < turns.mask_below || m >= turns.mask_from) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int distance = key + 8 * i - query;
        const int from = key + 8 * i >= s.seqlen_k ? kBlockM : distance - p.window_right;
        const int to = distance + p.window_left;
#pragma unroll
        for (int j = 0; j < kS / 4; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int at = 8 * j + c;
            if (at < from || at > to) x[4 * j + 2 * i + c] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      x[i] = exp2_approx(fmaf(x[i], p.scale_log2, -statistics[statistic_of(i)]));
      y[i] *= x[i];
    }
  }

  static __device__ __forceinline__ void convert(const float (&x)[kS], uint32_t (&packed)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) packed[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }

  // Rows behind the end of a packed sequence are its neighbour's, and 0 * NaN is NaN. (Behind the
  // end of a tensor TMA writes zeros.) All consumers take part.
  template <int kRows>
  __device__ __forceinline__ void clear_rows(T *tile, int rows) {
    uint4 *units = reinterpret_cast<uint4 *>(tile);
    // Whole 128-byte rows, so the swizzle within them does not matter.
    for (int i = threadIdx.x - 128; i < (kRows - rows) * 8; i += 256) {
#pragma unroll
      for (int c = 0; c < D / kChunk; ++c) units[(c * kRows + rows) * 8 + i] = {0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void wait_keys() {
    shared.kv_full.wait(0);
    const int keys = w.sequence.seqlen_k - w.first_key;
    if (p.cu_seqlens_k == nullptr || keys >= kBlockN) return;
    clear_rows<kBlockN>(shared.k, keys);
    clear_rows<kBlockN>(shared.v, keys);
    fence_async_proxy();
    named_barrier_sync(kBarrierConsumers, 256);
  }

  // Queues scores and dP of a step.
  __device__ __forceinline__ void multiply_both(float (&x)[kS], float (&y)[kS], int step, int m) {
    const int stage = __shfl_sync(0xffffffff, step & 1, 0), of = __shfl_sync(0xffffffff, wg, 0);
    const int q_stage = __shfl_sync(0xffffffff, step % Memory::kQBuffers, 0);
    shared.q_full[q_stage].wait(step / Memory::kQBuffers & 1);
    shared.dout_full[stage].wait(step >> 1 & 1);
    if (m == turns.partial) {
      const int rows = w.sequence.seqlen_q - m * kBlockM;
      clear_rows<kBlockM>(shared.q[q_stage], rows);
      clear_rows<kBlockM>(shared.dout[stage], rows);
      fence_async_proxy();
      named_barrier_sync(kBarrierConsumers, 256);
    }
    multiply_scores(x, shared.k, shared.q[q_stage], of);
    multiply_scores(y, shared.v, shared.dout[stage], of);
  }

  __device__ __forceinline__ void compute(float (&dk)[kG], float (&dv)[kG]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    float x[kS], y[kS];
    uint32_t probabilities[kS / 2], ds[kStored ? 1 : kS / 2];
    wait_keys();
    int m = turns.m_min;
    multiply_both(x, y, 0, m);
    wgmma_wait<0>();
    hold(x);
    hold(y);
#pragma unroll 1
    for (int step = 0; step + 1 < steps; ++step) {
      const int stage = __shfl_sync(0xffffffff, step & 1, 0);
      const int q_stage = __shfl_sync(0xffffffff, step % Memory::kQBuffers, 0);
      combine(x, y, step, m);
      wgmma_wait<0>();
      hold(dv);
      hold(dk);
      hold(probabilities);
      hold(ds);
      if (step > 0) {
        release(shared.dout_empty[stage ^ 1]);
        release(shared.q_empty[(step - 1) % Memory::kQBuffers]);
      }
      convert(x, probabilities);
      T *stored = shared.ds[stage] + __shfl_sync(0xffffffff, wg, 0) * (64 * 64);
      if constexpr (kStored) {
        store_ds(y, stored);
      } else {
        convert(y, ds);
      }
      m = turns.after(m);
      multiply_gradient(dv, probabilities, shared.dout[stage]);
      multiply_both(x, y, step + 1, m);
      if constexpr (kStored) {
        multiply_dk(dk, stored, shared.q[q_stage]);
      } else {
        multiply_gradient(dk, ds, shared.q[q_stage]);
      }
      wgmma_wait<1>();
      hold(x);
      hold(y);
      hold(dv);
    }
    const int stage = steps - 1 & 1, q_stage = (steps - 1) % Memory::kQBuffers;
    combine(x, y, steps - 1, m);
    wgmma_wait<0>();
    hold(dk);
    hold(ds);
    convert(x, probabilities);
    multiply_gradient(dv, probabilities, shared.dout[stage]);
    if constexpr (kStored) {
      T *stored = shared.ds[stage] + wg * (64 * 64);
      store_ds(y, stored);
      multiply_dk(dk, stored, shared.q[q_stage]);
    } else {
      convert(y, ds);
      multiply_gradient(dk, ds, shared.q[q_stage]);
    }
    wgmma_wait<0>();
    hold(dv);
    hold(dk);
    hold(probabilities);
    hold(ds);
  }

  // 64 rows of dK or dV.
  __device__ __forceinline__ void write(const float (&g)[kG], float factor, void *to,
                                        int64_t batch_stride, int64_t sequence_stride,
                                        int64_t head_stride, int columns) {
    if (to == nullptr) return;
    const Sequence &s = w.sequence;
    T *rows = static_cast<T *>(to) + (p.cu_seqlens_k != nullptr ? 0 : s.batch) * batch_stride +
              w.head_kv * head_stride;
    store_rows<D>(g, factor, rows + s.k_begin * sequence_stride, sequence_stride,
                  w.first_key + 64 * wg + 16 * warp, s.seqlen_k, columns);
  }

  __device__ __forceinline__ void run() {
    float dk[kG], dv[kG];
#pragma unroll
    for (int i = 0; i < kG; ++i) dk[i] = dv[i] = 0.0f;
    hold(dk);
    hold(dv);
    if (turns.m_min < turns.m_max) compute(dk, dv);
    write(dv, 1.0f, p.dv, p.dv_batch_stride, p.dv_sequence_stride, p.dv_head_stride, p.head_dim_v);
    write(dk, p.scale, p.dk, p.dk_batch_stride, p.dk_sequence_stride, p.dk_head_stride, p.head_dim);
  }
};

}  // namespace unsloth
