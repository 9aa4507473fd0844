// All gradients of heads above 128 by pairs of blocks, which are a cluster: each has 64 keys, and
// in it two warpgroups with a role each,
//   values: P = exp(scale K Q^T - lse), dV = P^T dO;
//   keys:   dP = V dO^T, dS = P (dP - delta), dK = scale dS^T Q.
// P goes from one role to the other through shared memory. dS goes to the other block, too, and
// each of the four warpgroups adds some columns of dQ += scale dS K, of all 128 keys, to the sums
// in memory: half of what blocks for themselves would add. Of 256 columns each takes 64; of 192 the
// roles of values take 64 and those of keys 32, as more wgmma's of fewer columns would read dS more
// often.
//
// A step's dQ is computed two steps later, when the other block's dS has long come, so that no
// block waits for the other's way through a step. Exponentials and dS run under dQ and the other
// role's products, additions to memory under dV and dK. Each block loads Q and dO for itself: loads
// that write to both blocks made the kernel take half as long again (LADDER.md, steps 49 and 54).
//
// Up to 192 there are registers to ask for a step's dV and dK before dQ is waited for, so that
// tensor cores have something to do while dQ is added (kEarly). dS then needs a third buffer: that
// of two steps before is still being read.
#pragma once

#include "common/cluster.cuh"
#include "pair_shared.cuh"
#include "role.cuh"

namespace unsloth {

// kInOrder: pairs add to a step's sums in the same order every time (keep_pairs_in_order).
template <int D, int DV, class T, bool kInOrder>
struct Pair : Role<D, DV, T, PairShared<D, DV, T>> {
  using Memory = PairShared<D, DV, T>;
  using Base = Role<D, DV, T, Memory>;
  using Base::kN, Base::kS, Base::p, Base::shared, Base::w, Base::turns, Base::warp, Base::lane;
  using Base::multiply_gradient, Base::exponentiate, Base::convert, Base::store_probabilities;
  using Base::multiply_probabilities, Base::write, Base::clear;
  using Base::parity_at, Base::fresh, Base::release;
  static constexpr int kPart = Memory::kPart, kParts = Memory::kParts;
  static constexpr int kDqChunks = Memory::kDqChunks;
  static constexpr bool kEarly = D <= 192;
  // Columns of dQ, of a block's half, that a role computes, and accumulators of these.
  template <RoleName kRole>
  static constexpr int kColumns = kRole == kValues ? kChunk : D / kPair - kChunk;
  template <RoleName kRole>
  static constexpr int kQ = kBlockM * kColumns<kRole> / 128;
  static_assert(D == 192 || D == 256);
  static_assert(!kEarly || (kParts == 1 && Memory::kDsBuffers == 3));

  const int rank;

  __device__ __forceinline__ Pair(const AttentionGradientsArguments &params, Memory &memory,
                                  int rank)
      : Base(params, memory), rank(rank) {}

  // One lane per warp arrives at the other block's barrier: products have read what that sent.
  __device__ __forceinline__ void release_in_other(Mbarrier &barrier) {
    __syncwarp();
    if (lane == 0) arrive_at_peer_after_reads(peer_address(&barrier, rank ^ 1));
  }

  __device__ __forceinline__ void wait_keys() {
    shared.kv_full.wait(0);
    if (p.cu_seqlens_k == nullptr) return;
    const int keys = w.sequence.seqlen_k - w.first_key, of_other = keys - (1 - 2 * rank) * kN;
    if (min(keys, of_other) >= kN) return;
    this->template clear_rows<D>(shared.k, max(keys, 0));
    this->template clear_rows<DV>(shared.v, max(keys, 0));
    this->template clear_rows<kDqChunks * kChunk>(shared.k_peer, max(of_other, 0));
    named_barrier_sync(kBarrierConsumers, 256);
  }

  // A part of dO of a step, in turn of the buffers.
  template <int kRole>
  __device__ __forceinline__ void wait_part(const Ring<Memory::kBuffers> &at, int m) {
    this->template wait_rows<kRole, kPart>(shared.dout_full[at.stage], shared.dout[at.stage],
                                           at.parity, m);
  }

  // y = V dO^T, as parts come.
  __device__ __forceinline__ void multiply_dp(float (&y)[kS], Ring<Memory::kBuffers> of, int m,
                                              int zero) {
    hold(y);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wait_part<kKeysRole>(of, m);
      wgmma_fence();
      const T *v = shared.v + part * (kN * kPart) + zero;
      const T *dout = shared.dout[__shfl_sync(0xffffffff, of.stage, 0)];
      if (part == 0) {
        this->template add_scores<kPart>(y, v, dout);
      } else {
        this->template add_scores<kPart, true>(y, v, dout);
      }
      of.advance();
    }
    wgmma_commit();
  }

  // A role's columns of dS K: of this block's keys and of the other's.
  template <RoleName kRole>
  __device__ __forceinline__ void multiply_dq(float (&dq)[kQ<kRole>], const T *ds) {
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int other = 0; other < kPair; ++other) {
      const T *k = other == 0 ? shared.k + chunk<kRole>() * (kN * kChunk)
                              : shared.k_peer + kRole * (kN * kChunk);
      if constexpr (D == 192) {
        // Of the other block's keys the first two chunks are here, or the last two.
        if (other != 0) k += (kRole == kValues ? rank : -rank) * (kN * kChunk);
        // The second block's half of the middle chunk.
        if (kRole != kValues) k += rank * (kChunk - kColumns<kRole>);
      }
      const uint64_t a = descriptor_k_major(shared_address(other == 0 ? ds : shared.ds_peer));
      const uint64_t b = descriptor_mn_major(shared_address(k), kN);
#pragma unroll
      for (int i = 0; i < kN / 16; ++i) {
        Wgmma<T, kColumns<kRole>>::template ss<1>(dq, a + i * 32 / 16, b + i * (16 * 128) / 16,
                                                  other + i != 0);
      }
    }
    wgmma_commit();
  }

  // The chunk that a role's columns of dQ are in. Of three the blocks share the middle one: its
  // first half is the first block's, its second half the second block's, both by the role of keys:
  // wgmma finds columns from the 64th byte on as it finds those from the first on, as addresses are
  // swizzled after all is added up.
  template <RoleName kRole>
  __device__ __forceinline__ int chunk() const {
    if constexpr (D == 192) return kRole == kValues ? 2 * rank : 1;
    return rank * kDqChunks + kRole;
  }

  // Where this thread adds its part of dQ, step by step, in the order of rows.cuh.
  template <RoleName kRole>
  struct Sums {
    const Pair &of;
    float *head;  // where its part of a head's step 0 is added
    int m;

    __device__ __forceinline__ explicit Sums(const Pair &of)
        : of(of),
          head(of.p.sums +
               block_at(of.p, of.w.sequence, of.w.head_kv * of.p.group, 0) * (kBlockM * D) +
               of.rank * (32 * D) + of.warp * (8 * D) + kRole * (16 * kChunk) + of.lane * 4),
          m(of.turns.first) {
      if constexpr (D == 192) {
        // The first block's half ends with 32 columns, the second one's begins with them.
        head += 16 * (kRole == kValues ? of.rank * (D / kPair - kChunk) : -of.rank * kChunk);
      }
    }

    // dQ of the next step, whose number is `step`.
    __device__ __forceinline__ void add(const float (&dq)[kQ<kRole>], int step) {
      if constexpr (kInOrder) of.shared.in_order[step & 1].wait(parity_at(step));
      if (kInOrder || of.p.sums != nullptr) {
        float *to = head + m * int64_t{kBlockM * D};
#pragma unroll
        for (int j = 0; j < kQ<kRole> / 4; ++j) {
          add_four(to + j * 128, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        }
      }
      if constexpr (kInOrder) of.release(of.shared.added[step & 1]);
      m = of.turns.after(m);
      if (m == of.turns.first) head += of.p.blocks_per_head * (kBlockM * D);
    }
  };

  // To shared memory as rows of queries, 16 queries by 16 keys at once.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kS / 2], T *ds) {
    const uint32_t row = lane / 16 * 8 + lane % 8, column = warp * 32 + lane / 8 % 2 * 16;
    const uint32_t to = shared_address(ds) + swizzle_128b(row * 128 + column);
#pragma unroll
    for (int j = 0; j < kS / 8; ++j) {
      store_matrix_x4_transposed(to + j * (16 * 128), packed[4 * j], packed[4 * j + 1],
                                 packed[4 * j + 2], packed[4 * j + 3]);
    }
  }

  // Asks for dQ of a step, once both blocks' dS is there.
  template <RoleName kRole>
  __device__ __forceinline__ void ask_dq(float (&dq)[kQ<kRole>], int step) {
    const int stage = __shfl_sync(0xffffffff, Memory::ds_stage(step), 0);
    shared.ds_full[stage].wait(Memory::ds_parity(step));
    shared.ds_peer_full.wait(step & 1);
    multiply_dq<kRole>(dq, shared.ds[stage]);
  }

  // dQ of a step has been computed.
  __device__ __forceinline__ void leave_ds(int step) {
    release(shared.ds_empty[kEarly ? Memory::ds_stage(step) : step & 1]);
    release_in_other(shared.ds_sent_empty);
  }

  // dQ of the last two steps, behind what else is in flight.
  template <RoleName kRole>
  __device__ __forceinline__ void finish_dq(float (&dq)[kQ<kRole>], Sums<kRole> &sums, int steps) {
    if (!kEarly && steps > 2) sums.add(dq, steps - 3);
    if (steps > 1) {
      ask_dq<kRole>(dq, steps - 2);
      wgmma_wait<0>();
      hold(dq);
      leave_ds(steps - 2);
      sums.add(dq, steps - 2);
    }
    ask_dq<kRole>(dq, steps - 1);
    wgmma_wait<0>();
    hold(dq);
    sums.add(dq, steps - 1);
  }

  // dV.
  __device__ __forceinline__ void compute_values(float (&dv)[kParts][kPart / 2]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    float x[kS], dq[kQ<kValues>];
    uint32_t packed[kS / 2];
    Sums<kValues> sums(*this);
    Ring<Memory::kBuffers> of;  // the buffers of a step's dO
    wait_keys();
    int m = turns.first;
    this->template wait_rows<kValues, D>(shared.q_full[0], shared.q[0], 0, m);
    this->template multiply_scores<D>(x, shared.k, shared.q[0]);
    wgmma_wait<0>();
    hold(x);
    leave_probabilities(x, packed, 0, m, 0);
    if constexpr (kEarly) ask_dv_early(dv, packed, of, m);
    if (steps > 1) values_of_step<false>(dv, dq, packed, of, sums, 1, m);
#pragma unroll 1
    for (int step = 2; step < steps; ++step) {
      values_of_step<true>(dv, dq, packed, of, sums, step, m);
    }
    if constexpr (!kEarly) ask_dv(dv, packed, of, m);
    finish_dq(dq, sums, steps);
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold(dv[part]);
    hold(packed);
  }

  // Probabilities of a step, dV of the one before, and with kDq dQ of the one before that, and what
  // the last call left of it to the sums. Early: dV of the step, behind that of the one before; dQ
  // goes to the sums at once.
  template <bool kDq>
  __device__ __forceinline__ void values_of_step(float (&dv)[kParts][kPart / 2],
                                                 float (&dq)[kQ<kValues>],
                                                 uint32_t (&packed)[kS / 2],
                                                 Ring<Memory::kBuffers> &of, Sums<kValues> &sums,
                                                 int step, int &m) {
    const int stage = __shfl_sync(0xffffffff, step & 1, 0);
    const int next = turns.after(m);
    const auto buffers = of;
    float x[kS];
    if constexpr (!kEarly) {
      ask_dv(dv, packed, of, m);
      if (kDq && step > 2) sums.add(dq, step - 3);
    }
    this->template wait_rows<kValues, D>(shared.q_full[stage], shared.q[stage], parity_at(step),
                                         next);
    this->template multiply_scores<D>(x, shared.k + fresh(stage), shared.q[stage]);
    leave_dout(dv, packed, buffers);
    if constexpr (kDq) ask_dq<kValues>(dq, step - 2);
    wgmma_wait<kDq>();
    hold(x);
    leave_probabilities(x, packed, stage, next, step);
    if constexpr (kEarly) {
      of.advance();
      ask_dv_early(dv, packed, of, next);
    }
    if constexpr (kDq) {
      wgmma_wait<kEarly>();
      hold(dq);
      leave_ds(step - 2);
      if constexpr (kEarly) sums.add(dq, step - 2);
    }
    m = next;
  }

  // Scores become probabilities, as operands and for the other role.
  __device__ __forceinline__ void leave_probabilities(float (&x)[kS], uint32_t (&packed)[kS / 2],
                                                      int stage, int m, int step) {
    exponentiate(x, stage, m, step);
    release(shared.q_empty[stage]);
    convert(x, packed);
    shared.probabilities_empty.wait((step & 1) ^ 1);
    store_probabilities(packed, 0);
    release(shared.probabilities_full);
  }

  __device__ __forceinline__ void ask_dv(float (&dv)[kParts][kPart / 2],
                                         const uint32_t (&packed)[kS / 2],
                                         Ring<Memory::kBuffers> &of, int m) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wait_part<kValues>(of, m);
      multiply_gradient(dv[part], packed, shared.dout[__shfl_sync(0xffffffff, of.stage, 0)]);
      of.advance();
    }
  }

  // The same where dO's buffer is still to be left in the next step.
  __device__ __forceinline__ void ask_dv_early(float (&dv)[kParts][kPart / 2],
                                               const uint32_t (&packed)[kS / 2],
                                               Ring<Memory::kBuffers> of, int m) {
    ask_dv(dv, packed, of, m);
  }

  // Waits for dV, behind which one product was asked for.
  __device__ __forceinline__ void leave_dout(float (&dv)[kParts][kPart / 2],
                                             uint32_t (&packed)[kS / 2],
                                             Ring<Memory::kBuffers> of) {
    if constexpr (kParts == 2) {
      wgmma_wait<2>();
      hold(dv[0]);
      release(shared.dout_empty[of.stage]);
      of.advance();
    }
    wgmma_wait<1>();
    hold(dv[kParts - 1]);
    hold(packed);
    release(shared.dout_empty[of.stage]);
  }

  // dK.
  __device__ __forceinline__ void compute_keys(float (&dk)[D / 2]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    float y[kS], dq[kQ<kKeysRole>];
    uint32_t packed[kS / 2];
    Sums<kKeysRole> sums(*this);
    Ring<Memory::kBuffers> of;
    wait_keys();
    int m = turns.first;
    multiply_dp(y, of, m, 0);
    wgmma_wait<0>();
    hold(y);
    leave_dout_of_dp(of);
    take_probabilities(y, packed, 0, 0);
    share_ds(packed, 0, 0);
    if constexpr (kEarly) multiply_gradient(dk, packed, shared.q[0]);
    if (steps > 1) keys_of_step<false>(dk, dq, packed, of, sums, 1, m);
#pragma unroll 1
    for (int step = 2; step < steps; ++step) {
      keys_of_step<true>(dk, dq, packed, of, sums, step, m);
    }
    if constexpr (!kEarly) multiply_gradient(dk, packed, shared.q[(steps - 1) & 1]);
    finish_dq(dq, sums, steps);
    hold(dk);
    hold(packed);
  }

  // dS of a step, dK and dQ as in the other role.
  template <bool kDq>
  __device__ __forceinline__ void keys_of_step(float (&dk)[D / 2], float (&dq)[kQ<kKeysRole>],
                                               uint32_t (&packed)[kS / 2],
                                               Ring<Memory::kBuffers> &of, Sums<kKeysRole> &sums,
                                               int step, int &m) {
    const int stage = __shfl_sync(0xffffffff, step & 1, 0), before = stage ^ 1;
    float y[kS];
    m = turns.after(m);
    if constexpr (!kEarly) {
      multiply_gradient(dk, packed, shared.q[before]);
      if (kDq && step > 2) sums.add(dq, step - 3);
    }
    multiply_dp(y, of, m, fresh(stage));
    wgmma_wait<1>();
    hold(dk);
    hold(packed);
    release(shared.q_empty[before]);
    if constexpr (kDq) ask_dq<kKeysRole>(dq, step - 2);
    wgmma_wait<kDq>();
    hold(y);
    leave_dout_of_dp(of);
    take_probabilities(y, packed, stage, step);
    if constexpr (kEarly) {
      share_ds(packed, __shfl_sync(0xffffffff, Memory::ds_stage(step), 0), step);
      multiply_gradient(dk, packed, shared.q[stage]);
    }
    if constexpr (kDq) {
      wgmma_wait<kEarly>();
      hold(dq);
      leave_ds(step - 2);
      if constexpr (kEarly) sums.add(dq, step - 2);
    }
    if constexpr (!kEarly) share_ds(packed, stage, step);
  }

  // dP has been computed.
  __device__ __forceinline__ void leave_dout_of_dp(Ring<Memory::kBuffers> &of) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      release(shared.dout_empty[of.stage]);
      of.advance();
    }
  }

  // dP becomes dS, as an operand.
  __device__ __forceinline__ void take_probabilities(float (&y)[kS], uint32_t (&packed)[kS / 2],
                                                     int stage, int step) {
    shared.q_full[stage].wait(parity_at(step));
    shared.probabilities_full.wait(step & 1);
    multiply_probabilities(y, stage, 0);
    release(shared.probabilities_empty);
    convert(y, packed);
  }

  // For both blocks' dQ.
  __device__ __forceinline__ void share_ds(const uint32_t (&packed)[kS / 2], int stage, int step) {
    shared.ds_empty[stage].wait(Memory::ds_parity(step) ^ 1);
    store_ds(packed, shared.ds[stage]);
    fence_async_proxy();
    release(shared.ds_full[stage]);
  }

  __device__ __forceinline__ void run(int role) {
    const bool any = turns.m_min < turns.m_max;
    if (role == kValues) {
      float dv[kParts][kPart / 2];
#pragma unroll
      for (int part = 0; part < kParts; ++part) clear(dv[part]);
      if (any) compute_values(dv);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        write(dv[part], 1.0f, p.dv, p.dv_batch_stride, p.dv_sequence_stride, p.dv_head_stride,
              p.head_dim_v, part * kPart);
      }
    } else {
      float dk[D / 2];
      clear(dk);
      if (any) compute_keys(dk);
      write(dk, p.scale, p.dk, p.dk_batch_stride, p.dk_sequence_stride, p.dk_head_stride,
            p.head_dim, 0);
    }
  }
};

}  // namespace unsloth
