// What a warpgroup with a role of its own does, for heads of more than 128: the pieces of roles.cuh
// and pair.cuh. Keys are rows, so that P^T and dS^T are operands as they stand in registers.
#pragma once

#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/wgmma.cuh"
#include "rows.cuh"
#include "scores.cuh"
#include "work.cuh"

namespace unsloth {

enum RoleName : int { kValues, kKeysRole };

template <int D, int DV, class T, class Memory>
struct Role {
  static constexpr int kN = kKeys<D>;     // keys, all of a warpgroup
  static constexpr int kS = kBlockM / 2;  // accumulators of a score tile, per thread
  static_assert(kN == 64 && D % 64 == 0 && DV % 64 == 0 && DV <= D);

  const AttentionGradientsArguments &p;
  Memory &shared;
  const Work &w;  // in shared memory: registers are full
  const Steps turns;
  const int warp, lane;

  __device__ __forceinline__ Role(const AttentionGradientsArguments &params, Memory &memory)
      : p(params),
        shared(memory),
        w(memory.work),
        turns(memory.work.steps),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  // The round of a buffer of two at a step.
  static __device__ __forceinline__ uint32_t parity_at(int step) { return step >> 1 & 1; }

  // Zero, as no compiler can tell of a stage: descriptors that depend on it are made anew in each
  // step. They would else be kept across steps, in registers, and moved before each product.
  static __device__ __forceinline__ int fresh(int stage) { return stage & 2; }

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // x = A B^T for all keys and a block of queries, of kColumns each; kMore: x += A B^T.
  template <int kColumns, bool kMore = false>
  __device__ __forceinline__ void add_scores(float (&x)[kS], const T *keys, const T *queries) {
    const uint64_t a = descriptor_k_major(shared_address(keys));
    const uint64_t b = descriptor_k_major(shared_address(queries));
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const int at = (i / 4 * (64 * 128) + i % 4 * 32) / 16;
      Wgmma<T, kBlockM>::template ss<0>(x, a + at, b + at, kMore || i != 0);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void multiply_scores(float (&x)[kS], const T *keys, const T *queries) {
    hold(x);
    wgmma_fence();
    add_scores<kColumns>(x, keys, queries);
    wgmma_commit();
  }

  // dV += P^T dO, dK += dS^T Q.
  template <int kG>
  __device__ __forceinline__ void multiply_gradient(float (&g)[kG], const uint32_t (&a)[kS / 2],
                                                    const T *queries) {
    const uint64_t b = descriptor_mn_major(shared_address(queries), kBlockM);
    hold(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      Wgmma<T, 2 * kG>::template rs<1>(g, a + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // Scores become probabilities. The thread's element 4j + 2i + c is of its key 8i and of the query
  // 8j + 2 (lane % 4) + c of block m.
  __device__ __forceinline__ void exponentiate(float (&x)[kS], int stage, int m, int step) {
    if (p.softcap_scale != 0.0f) {
#pragma unroll
      for (int i = 0; i < kS; ++i) x[i] = cap(x[i], p.softcap_scale);
    }
    if (p.alibi_slopes != nullptr) {
      const float slope = slope_of(step);
      const int at = distance_at(m);
#pragma unroll
      for (int i = 0; i < kS; ++i) x[i] = fmaf(-slope, distance(at, i), x[i]);
    }
    if (m < turns.mask_below || m >= turns.mask_from) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = w.first_key + 16 * warp + lane / 4 + 8 * i;
        const int from =
            key >= w.sequence.seqlen_k ? kBlockM : 8 * i - distance_at(m) - p.window_right;
        const int to = 8 * i - distance_at(m) + p.window_left;
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
    const float *lse = shared.statistics[stage] + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < kS / 4; ++j) {
      const float2 l = *reinterpret_cast<const float2 *>(lse + statistic_of(4 * j));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[4 * j + 2 * i] = exp2_approx(fmaf(x[4 * j + 2 * i], p.scale_log2, -l.x));
        x[4 * j + 2 * i + 1] = exp2_approx(fmaf(x[4 * j + 2 * i + 1], p.scale_log2, -l.y));
      }
    }
  }

  __device__ __forceinline__ float slope_of(int step) {
    return slope_at(p, w.sequence.batch, w.head_kv * p.group + step / (turns.m_max - turns.m_min));
  }

  // From the key to that of the query's diagonal, of the thread's element 0 and of another.
  __device__ __forceinline__ int distance_at(int m) {
    return m * kBlockM + 2 * (lane % 4) + w.sequence.seqlen_k - w.sequence.seqlen_q -
           (w.first_key + 16 * warp + lane / 4);
  }
  static __device__ __forceinline__ float distance(int at, int i) {
    return static_cast<float>(abs(at + i / 4 * 8 + i % 2 - i / 2 % 2 * 8));
  }

  // Probabilities times the derivative of the cap, which they tell again: where they are zero, so
  // is that.
  __device__ __forceinline__ void multiply_caps(float (&x)[kS], int stage, int m, int step) {
    const float inverse = 1.0f / p.scale_log2, slope = slope_of(step);
    const float *lse = shared.statistics[stage] + lane % 4 * 4;
    const int at = distance_at(m);
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      const float exponent = log2_approx(x[i]) + lse[statistic_of(i)];
      const float t = fmaf(slope, distance(at, i), exponent * inverse);
      x[i] = x[i] > 0.0f ? x[i] * fmaf(-t, t, 1.0f) : 0.0f;
    }
  }

  // Leaves to the other role what is to be multiplied by dP.
  __device__ __forceinline__ void pass_on(float (&x)[kS], const uint32_t (&packed)[kS / 2],
                                          int stage, int m, int step) {
    if (p.softcap_scale != 0.0f) {
      uint32_t capped[kS / 2];
      multiply_caps(x, stage, m, step);
      convert(x, capped);
      store_probabilities(capped, stage);
      return;
    }
    store_probabilities(packed, stage);
  }

  static __device__ __forceinline__ void convert(const float (&x)[kS], uint32_t (&packed)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) packed[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }

  // A thread of one role leaves its probabilities to the same thread of the other.
  __device__ __forceinline__ void store_probabilities(const uint32_t (&packed)[kS / 2], int stage) {
    uint4 *to = shared.probabilities[stage] + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
      to[i * 128] = {packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]};
    }
  }

  // dP becomes dS.
  __device__ __forceinline__ void multiply_probabilities(float (&y)[kS], int stage, int buffer) {
    const float *delta = shared.statistics[stage] + kBlockM + lane % 4 * 4;
    const uint4 *from = shared.probabilities[buffer] + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kS / 8; ++i) {
      const uint4 bits = from[i * 128];
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T *two = reinterpret_cast<const T *>(&pairs[j]);
        const float2 d =
            *reinterpret_cast<const float2 *>(delta + statistic_of(8 * i + 4 * (j / 2)));
        float *to = y + 8 * i + 2 * j;
        to[0] = static_cast<float>(two[0]) * (to[0] - d.x);
        to[1] = static_cast<float>(two[1]) * (to[1] - d.y);
      }
    }
  }

  // Rows behind the end of a packed sequence are its neighbour's, and 0 * NaN is NaN. (Behind the
  // end of a tensor TMA writes zeros.) All threads of a role take part.
  template <int kColumns>
  __device__ __forceinline__ void clear_rows(T *tile, int rows) {
    if (rows >= 64) return;
    uint4 *units = reinterpret_cast<uint4 *>(tile);
    // Whole 128-byte rows, so the swizzle within them does not matter.
    for (int i = threadIdx.x % 128; i < (64 - rows) * 8; i += 128) {
#pragma unroll
      for (int c = 0; c < kColumns / kChunk; ++c) units[(c * 64 + rows) * 8 + i] = {0, 0, 0, 0};
    }
    fence_async_proxy();
  }

  // Waits for a block of queries. Both roles clear what both wait for: they write the same zeros.
  template <int kRole, int kColumns>
  __device__ __forceinline__ void wait_rows(Mbarrier &full, T *tile, uint32_t parity, int m) {
    full.wait(parity);
    if (m != turns.partial) return;
    clear_rows<kColumns>(tile, w.sequence.seqlen_q - m * kBlockM);
    named_barrier_sync(kBarrierConsumers + kRole, 128);
  }

  __device__ __forceinline__ void wait_keys() {
    shared.kv_full.wait(0);
    const int keys = w.sequence.seqlen_k - w.first_key;
    if (p.cu_seqlens_k == nullptr || keys >= kN) return;
    clear_rows<D>(shared.k, keys);
    clear_rows<DV>(shared.v, keys);
    named_barrier_sync(kBarrierConsumers, 256);
  }

  // 64 rows of dK or dV, columns from `first` on.
  template <int kG>
  __device__ __forceinline__ void write(const float (&g)[kG], float factor, void *to,
                                        int64_t batch_stride, int64_t sequence_stride,
                                        int64_t head_stride, int columns, int first = 0) {
    if (to == nullptr) return;
    const Sequence &s = w.sequence;
    T *rows = static_cast<T *>(to) + (p.cu_seqlens_k != nullptr ? 0 : s.batch) * batch_stride +
              w.head_kv * head_stride + first;
    store_rows<2 * kG>(g, factor, rows + s.k_begin * sequence_stride, sequence_stride,
                       w.first_key + 16 * warp, s.seqlen_k, columns - first);
  }

  template <int kG>
  static __device__ __forceinline__ void clear(float (&g)[kG]) {
#pragma unroll
    for (int i = 0; i < kG; ++i) g[i] = 0.0f;
    hold(g);
  }
};

}  // namespace unsloth
