// The consumers: two warpgroups that compute, for 64 keys each,
//   P = exp(scale K Q^T - lse),  dP = V dO^T,  dS = P (dP - delta),
//   dV = P^T dO,  dK = scale dS^T Q,  dQ += scale dS K
// (Dao 2023, "FlashAttention-2", algorithm 2), everything but dQ transposed: keys are rows, so P^T
// and dS^T are operands as they stand in registers. For dQ, dS goes through shared memory: each
// warpgroup computes half of the columns from all 128 keys, and asks for dV before it waits for dP.
// At head dim 64 a step has 128 queries, so that what it costs besides its products is paid half as
// often. There the warpgroups take turns with dQ, and only one of them waits for the other's dS;
// for most of dV before dP there are no registers. At head dim 96 rows lie in memory as those of
// 128 do, and products, but for that of dQ, are of 96 columns.
//
// -lse and -delta are added by the products themselves, as three more columns of Q and dO where K
// and V have ones. Read from shared memory by every thread they took a tenth of the time: a warp
// has as many of them as a score tile has columns.
//
// Products of one step alone are in flight: under a warpgroup's exponentials run the other's
// products. Loops that had the next step's scores under way were slower (LADDER.md).
#pragma once

#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/wgmma.cuh"
#include "rows.cuh"
#include "shared.cuh"
#include "sums.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, class T, Mask kMask>
struct Consumer {
  static constexpr int kP = kPadded<D>;
  using Memory = StepShared<kP, T>;
  static constexpr int kM = kStep<D>;       // queries of a step
  static constexpr int kS = kM / 2;         // accumulators of a score tile, per thread
  static constexpr int kG = D / 2;          // of dK and dV
  static constexpr int kQ = kM * kP / 256;  // of dQ
  static constexpr bool kWide = kM > kBlockM;
  static_assert(kQ <= kS);

  const AttentionGradientsArguments &p;
  Memory &shared;
  const Work &w;  // in shared memory: registers are full
  const Steps turns;
  const int wg, warp, lane;

  __device__ __forceinline__ Consumer(const AttentionGradientsArguments &params, Memory &memory,
                                      int consumer_warp)
      : p(params),
        shared(memory),
        w(memory.work),
        turns(memory.work.steps),
        wg(consumer_warp / 4),
        warp(consumer_warp % 4),
        lane(threadIdx.x % 32) {}

  // Asked for anew in each step: descriptors that depend on it would else be kept across steps, in
  // registers of which there are none left, and moved to uniform ones before each product.
  __device__ __forceinline__ int uniform_warpgroup() const {
    return __shfl_sync(0xffffffff, wg, 0);
  }

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  // x = A B^T for 64 rows of K or V and a block of queries, and what the queries' terms add. `of`:
  // the warpgroup, uniformly.
  __device__ __forceinline__ void multiply_scores(float (&x)[kS], const T *keys, const T *queries,
                                                  const uint32_t (&chosen)[4], int stage, int of) {
    const uint64_t a = descriptor_k_major(shared_address(keys) + of * 64 * 128);
    const uint64_t b = descriptor_k_major(shared_address(queries));
    hold(x);
    wgmma_fence();
    Wgmma<__nv_bfloat16, kM>::template rs<0>(
        x, chosen, descriptor_of_eights(shared_address(shared.statistics[stage])), 0);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      Wgmma<T, kM>::template ss<0>(x, a + (i / 4 * (kBlockN * 128) + i % 4 * 32) / 16,
                                   b + (i / 4 * (kM * 128) + i % 4 * 32) / 16, 1);
    }
    wgmma_commit();
  }

  // dV += P^T dO, dK += dS^T Q, of 16 queries each: from `kFrom` on those before `kTo`.
  template <int kFrom = 0, int kTo = kM / 16>
  __device__ __forceinline__ void multiply_gradient(float (&g)[kG], const uint32_t (&a)[kS / 2],
                                                    const T *queries) {
    const uint64_t b = descriptor_mn_major(shared_address(queries), kM);
    hold(g);
    wgmma_fence();
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      Wgmma<T, D>::template rs<1>(g, a + 4 * i, b + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  // A half of the columns of dS K; of a wide step a half of the queries.
  __device__ __forceinline__ void multiply_dq(float (&dq)[kQ], const T *ds, int of) {
    const uint32_t rows = kWide ? of * (kBlockM * 128) : 0;
    const uint32_t columns = kWide ? 0 : of * (kP / 2 / kChunk) * (kBlockN * 128);
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

  // The operand that adds up three of the eight elements that a query has, from the first or from
  // the fourth on: ones in three columns of every row.
  __device__ __forceinline__ void choose(uint32_t (&chosen)[4], int from) const {
    const uint32_t one = 0x3F80;  // in bf16
    const int column = 2 * (lane % 4);
    const auto in = [&](int c) { return c >= from && c < from + 3 ? one : 0; };
    chosen[0] = chosen[1] = in(column) | in(column + 1) << 16;
    chosen[2] = chosen[3] = 0;
  }

  // Scores become probabilities. The thread's element 4j + 2i + c is of its key 8i and of the query
  // 8j + 2 (lane % 4) + c of block m.
  __device__ __forceinline__ void mask(float (&x)[kS], int m) {
    if (m < turns.mask_below || m >= turns.mask_from) {
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

  __device__ __forceinline__ void exponentiate(float (&x)[kS], int m) {
    mask(x, m);
#pragma unroll
    for (int i = 0; i < kS; ++i) x[i] = exp2_approx(x[i] * p.scale_log2);
  }

  // P as an operand, of 16 queries each: from `kFrom` on those before `kTo`.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void pack_probabilities(const float (&x)[kS],
                                                     uint32_t (&probabilities)[kS / 2]) {
#pragma unroll
    for (int i = 4 * kFrom; i < 4 * kTo; ++i) probabilities[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }

  // dS as an operand, of P and dP - delta.
  __device__ __forceinline__ void pack_ds(const float (&x)[kS], const float (&y)[kS],
                                          uint32_t (&ds)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) {
      ds[i] = pack<T>(x[2 * i] * y[2 * i], x[2 * i + 1] * y[2 * i + 1]);
    }
  }

  // To shared memory as rows of queries, 16 queries by 16 keys at once. The matrices go in the
  // order of their registers, which have to be side by side: in another one each would be moved
  // first.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kS / 2], T *ds) {
    const uint32_t row = lane / 16 * 8 + lane % 8, column = warp * 32 + lane / 8 % 2 * 16;
    const uint32_t to = shared_address(ds) + wg * (kM * 128) + swizzle_128b(row * 128 + column);
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      store_matrix_x4_transposed(to + j * (16 * 128), packed[4 * j], packed[4 * j + 1],
                                 packed[4 * j + 2], packed[4 * j + 3]);
    }
  }

  // Rows behind the end of a packed sequence are its neighbour's, and 0 * NaN is NaN. (Behind the
  // end of a tensor TMA writes zeros.) All consumers take part.
  template <int kRows>
  __device__ __forceinline__ void clear_rows(T *tile, int rows) {
    if (rows >= kRows) return;
    uint4 *units = reinterpret_cast<uint4 *>(tile);
    // Whole 128-byte rows, so the swizzle within them does not matter. Rarely run, so kept short.
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < (kRows - rows) * 8; i += 256) {
#pragma unroll
      for (int c = 0; c < kP / kChunk; ++c) units[(c * kRows + rows) * 8 + i] = {0, 0, 0, 0};
    }
    fence_async_proxy();
  }

  // Of a partial step waits for dO as well.
  __device__ __forceinline__ void wait_q(const Ring<kStages> &at, int m) {
    shared.q_full[at.stage].wait(at.parity);
    if (m != turns.partial) return;
    shared.dout_full[at.stage].wait(at.parity);
    const int rows = w.sequence.seqlen_q - m * kM;
    clear_rows<kM>(shared.q[at.stage], rows);
    clear_rows<kM>(shared.dout[at.stage], rows);
    // Not that of turns, at which a warpgroup may have arrived already.
    named_barrier_sync(kBarrierRowsCleared, 256);
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
    if (turns.m_min < turns.m_max) compute(dk, dv);
    write(dv, 1.0f, p.dv, p.dv_batch_stride, p.dv_sequence_stride, p.dv_head_stride, p.head_dim_v);
    write(dk, p.scale, p.dk, p.dk_batch_stride, p.dk_sequence_stride, p.dk_head_stride, p.head_dim);
  }

  // Where numbers 4 i to 4 i + 3 of a half of dQ go, in the order of rows.cuh.
  __device__ __forceinline__ float4 &dq_at(int half, int i) {
    // Of a wide step the halves of the columns lie apart.
    constexpr int kHalf = kWide ? kQ / 8 : kQ / 4;
    float *of_thread = shared.dq[half] + warp * (kBlockM * kP / 8) + lane * 4;
    return *reinterpret_cast<float4 *>(of_thread + i / kHalf * (kBlockM * kP / 2) +
                                       i % kHalf * 128);
  }

  // Leaves a half of dQ where the warp that sends it finds it.
  __device__ __forceinline__ void leave_dq(const float (&dq)[kQ], int half) {
#pragma unroll
    for (int i = 0; i < kQ / 4; ++i) {
      dq_at(half, i) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
  }

  // Writes a half of dQ of a step to which this block comes last, with what others have of it.
  __device__ __forceinline__ void finish_dq(float (&dq)[kQ], int half, const Arrival &arrival) {
    if (!(arrival.as & kFirst)) {
#pragma unroll
      for (int i = 0; i < kQ / 4; ++i) {
        const float4 others = dq_at(half, i);
        dq[4 * i] += others.x;
        dq[4 * i + 1] += others.y;
        dq[4 * i + 2] += others.z;
        dq[4 * i + 3] += others.w;
      }
    }
    const int column = kWide ? 0 : half * (kP / 2), row = kWide ? half * kBlockM : 0;
    store_rows<2 * kQ>(dq, p.scale, static_cast<T *>(arrival.dq) + column, p.dq_sequence_stride,
                       row + 16 * warp, arrival.rows, p.head_dim - column);
  }

  // dV has been computed.
  __device__ __forceinline__ void leave_dout(float (&dv)[kG], uint32_t (&probabilities)[kS / 2],
                                             int stage) {
    hold(dv);
    hold(probabilities);
    release(shared.dout_empty[stage]);
  }

  // dK has been computed.
  __device__ __forceinline__ void leave_q(float (&dk)[kG], uint32_t (&ds)[kS / 2], int stage) {
    hold(dk);
    hold(ds);
    release(shared.q_empty[stage]);
  }

  // dQ and dK of a step of which dV has been asked for: each warpgroup half of dQ. That reads both
  // warpgroups' dS. What lay there two steps ago has been read: each waited for its dQ before it
  // came here in the step between.
  __device__ __forceinline__ void finish_together(float (&dk)[kG], float (&dv)[kG],
                                                  uint32_t (&probabilities)[kS / 2],
                                                  uint32_t (&ds)[kS / 2], int stage, int group) {
    named_barrier_sync(kBarrierConsumers, 256);
    float dq[kQ];
    multiply_dq(dq, shared.ds[stage], group);
    wgmma_wait<1>();
    leave_dout(dv, probabilities, stage);
    multiply_gradient(dk, ds, shared.q[stage]);
    named_barrier_sync(kBarrierDqEmpty + wg, kDqThreads);
    const Arrival &arrival = shared.arrivals[stage];
    const bool last = arrival.as & kLast;
    wgmma_wait<1>();
    hold(dq);
    if (__builtin_expect(last, false)) {
      finish_dq(dq, wg, arrival);
    } else {
      leave_dq(dq, wg);
    }
    fence_async_proxy();
    named_barrier_arrive(kBarrierDqFull + wg, kDqThreads);
    wgmma_wait<0>();
    leave_q(dk, ds, stage);
  }

  // The same, but the warpgroup whose turn it is computes all of dQ, and the other one only leaves
  // its dS. Step n writes dS where that of step n - 2 was. The warpgroup whose turn that was has
  // read it: it waited for its dQ within the step. The other one knows so, too: in step n - 1,
  // which was its turn, it waited until the first had come there.
  __device__ __forceinline__ void finish_by_turns(float (&dk)[kG], float (&dv)[kG],
                                                  uint32_t (&probabilities)[kS / 2],
                                                  uint32_t (&ds)[kS / 2], int stage, int group,
                                                  int turn) {
    const int barrier = turn == 0 ? kBarrierConsumers : kBarrierOtherTurn;
    if (group != turn) {
      named_barrier_arrive(barrier, 256);
      wgmma_wait<0>();
      leave_dout(dv, probabilities, stage);
      multiply_gradient(dk, ds, shared.q[stage]);
      wgmma_wait<0>();
      leave_q(dk, ds, stage);
      return;
    }
    wgmma_wait<0>();
    leave_dout(dv, probabilities, stage);
    multiply_gradient(dk, ds, shared.q[stage]);
    named_barrier_sync(barrier, 256);
    float first[kQ], second[kQ];
    multiply_dq(first, shared.ds[stage], 0);
    wgmma_wait<1>();
    leave_q(dk, ds, stage);
    multiply_dq(second, shared.ds[stage], 1);
    named_barrier_sync(kBarrierDqEmpty + wg, kDqThreads);
    const Arrival &arrival = shared.arrivals[stage];
    if (__builtin_expect(arrival.as & kLast, false)) {
      wgmma_wait<0>();
      hold(first);
      hold(second);
      finish_dq(first, 0, arrival);
      finish_dq(second, 1, arrival);
    } else {
      wgmma_wait<1>();
      hold(first);
      leave_dq(first, 0);
      wgmma_wait<0>();
      hold(second);
      leave_dq(second, 1);
    }
    fence_async_proxy();
    named_barrier_arrive(kBarrierDqFull + wg, kDqThreads);
  }

  __device__ __forceinline__ void compute(float (&dk)[kG], float (&dv)[kG]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    shared.kv_full.wait(0);
    const int keys = w.sequence.seqlen_k - w.first_key;
    if (p.cu_seqlens_k != nullptr && keys < kBlockN) {
      clear_rows<kBlockN>(shared.k, keys);
      clear_rows<kBlockN>(shared.v, keys);
      named_barrier_sync(kBarrierRowsCleared, 256);
    }
    float x[kS], y[kS];
    uint32_t probabilities[kS / 2], ds[kS / 2];
    uint32_t of_scores[4], of_dp[4];
    choose(of_scores, 0);
    choose(of_dp, 3);
    Ring<kStages> of;  // the buffers of a step's Q, dO and dS
    int m = turns.first;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      // The compiler keeps descriptors in uniform registers as long as it can tell that the whole
      // warp has the same.
      const int group = uniform_warpgroup();
      const int stage = __shfl_sync(0xffffffff, of.stage, 0);
      const T *q = shared.q[stage], *dout = shared.dout[stage];
      wait_q(of, m);
      multiply_scores(x, shared.k, q, of_scores, stage, group);
      shared.dout_full[of.stage].wait(of.parity);
      multiply_scores(y, shared.v, dout, of_dp, stage, group);
      wgmma_wait<1>();
      hold(x);
      exponentiate(x, m);
      // dV begins before the wait for dP, so that some exponentials run under dP: the compiler
      // would leave them all for later.
      constexpr int kBegun = 2, kAll = kM / 16;
      pack_probabilities<0, kBegun>(x, probabilities);
      multiply_gradient<0, kBegun>(dv, probabilities, dout);
      if constexpr (kWide) {
        wgmma_wait<1>();
        hold(y);
        pack_ds(x, y, ds);
        pack_probabilities<kBegun, kAll>(x, probabilities);
        store_ds(ds, shared.ds[stage]);
        multiply_gradient<kBegun, kAll>(dv, probabilities, dout);
        fence_async_proxy();
        finish_by_turns(dk, dv, probabilities, ds, stage, group, step % 2);
      } else {
        pack_probabilities<kBegun, kAll>(x, probabilities);
        multiply_gradient<kBegun, kAll>(dv, probabilities, dout);
        wgmma_wait<2>();
        hold(y);
        pack_ds(x, y, ds);
        store_ds(ds, shared.ds[stage]);
        fence_async_proxy();
        finish_together(dk, dv, probabilities, ds, stage, group);
      }
      of.advance();
      m = turns.after(m);
    }
  }
};

}  // namespace unsloth
