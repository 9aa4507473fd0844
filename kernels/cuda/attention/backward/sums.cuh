// Where blocks of keys meet: the sums of dQ in memory. Every block has a part in the steps whose
// queries see its keys, and a warp that sends it there.
//
// The first to come to a step stores its part there, the others add theirs; the last instead finds
// what they have where its consumers would leave its part, and these write dQ. So sums need not be
// zero at first, and no other kernel has to make dQ of them. Who is first and last is settled as
// blocks come. Where bits must not depend on that (`p.ordered`) they come by their keys, of some
// heads the last keys first, of others the first. A step has a number in `p.order` by which blocks
// tell each other what they have done. A block only waits for what others do that came before it,
// so somebody can always go on.
//
// Two warps keep the numbers: one finds out what the block is to do, a step ahead, and one tells
// when it has been done. Either takes as long as the way to memory and back.
#pragma once

#include "common/named_barrier.cuh"
#include "common/signal.cuh"
#include "common/tma.cuh"
#include "shared.cuh"
#include "work.cuh"

namespace unsloth {

// In any order a step's number counts the blocks that have come in its lower half, and those that
// have added in its upper half.
constexpr int kOneCame = 1, kOneAdded = 1 << 16, kCame = kOneAdded - 1;

// Of how many blocks of keys some query of the step sees keys.
template <int kN, int kM>
__device__ __forceinline__ int blocks_of_step(const AttentionGradientsArguments &p,
                                              const Sequence &s, int m) {
  const int64_t first_query = m * kM + s.seqlen_k - s.seqlen_q;
  const int64_t first = max(first_query - p.window_left, int64_t{0});
  const int64_t last = min(first_query + kM - 1 + p.window_right, int64_t{s.seqlen_k - 1});
  return static_cast<int>(last / kN - first / kN + 1);
}

// The warp that finds out of each step whether this block is the first to come, the last or
// neither, and waits until the block may send its part.
template <int D, class T, class Memory>
__device__ __forceinline__ void await_others(const AttentionGradientsArguments &p, Memory &shared) {
  const Work &w = shared.work;
  const Steps turns = w.steps;
  if (p.order == nullptr) return;
  int *order = p.order + block_at(p, w.sequence, w.head_kv * p.group, 0);
  const Sequence &s = w.sequence;
  T *dq = static_cast<T *>(p.dq) + (p.cu_seqlens_q != nullptr ? 0 : s.batch) * p.dq_batch_stride +
          s.q_begin * p.dq_sequence_stride + w.head_kv * p.group * p.dq_head_stride;
  const int block = w.first_key / kKeys<D>;
  const bool leader = threadIdx.x % 32 == 0;
  const int steps = (turns.m_max - turns.m_min) * p.group;
  int m = turns.first;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int *of_step = order + m * (Memory::kM / kBlockM);
    int as = 0;
    if (leader && p.ordered) {
      const bool later = turns.has_later(m), earlier = turns.has_earlier(m);
      if (!(turns.by > 0 ? later : earlier)) as |= kFirst;
      if (!(turns.by > 0 ? earlier : later)) as |= kLast;
      // Which block added last, and one.
      if (!(as & kFirst)) await_value(of_step, block + turns.by + 1);
    } else if (leader) {
      const int others = blocks_of_step<kKeys<D>, Memory::kM>(p, s, m) - 1;
      const int found = claim(of_step, kOneCame), came = found & kCame;
      if (came == 0) as |= kFirst;
      if (came == others) as |= kLast;
      const int awaited = came == 0 ? 0 : came == others ? others : 1;
      if (found < awaited * kOneAdded) await_at_least(of_step, awaited * kOneAdded);
    }
    if (leader) {
      const int row = m * Memory::kM;
      shared.arrivals[step % kStages] = {dq + row * p.dq_sequence_stride, s.seqlen_q - row, as};
    }
    __syncwarp();
    named_barrier_sync(kBarrierArrival, 64);
    m = turns.after(m);
    if (m == turns.first) {
      order += p.blocks_per_head;
      dq += p.dq_head_stride;
    }
  }
}

// The warp that tells other blocks once this one's part of a step is in memory.
template <int D, class Memory>
__device__ __forceinline__ void tell_others(const AttentionGradientsArguments &p,
                                            const Memory &shared) {
  const Work &w = shared.work;
  const Steps turns = w.steps;
  if (p.order == nullptr) return;
  int *order = p.order + block_at(p, w.sequence, w.head_kv * p.group, 0);
  const int block = w.first_key / kKeys<D>;
  const bool leader = threadIdx.x % 32 == 0;
  const int steps = (turns.m_max - turns.m_min) * p.group;
  int m = turns.first;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int *of_step = order + m * (Memory::kM / kBlockM);
    named_barrier_sync(kBarrierAdded, 64);
    if (leader) {
      if (p.ordered) {
        publish_value(of_step, block + 1);
      } else {
        publish_more(of_step, kOneAdded);
      }
    }
    m = turns.after(m);
    if (m == turns.first) order += p.blocks_per_head;
  }
}

// Adds what consumers leave in shared memory of each step's dQ to the sums in memory. Of a wide
// step one warpgroup leaves all of it, by turns, of others each a half.
template <int D, class Memory>
__device__ __forceinline__ void send_dq(const AttentionGradientsArguments &p, Memory &shared) {
  constexpr bool kTurns = Memory::kM > kBlockM;
  constexpr int kParts = kTurns ? 1 : 2, kPart = Memory::kM * D / kParts;
  const Work &w = shared.work;
  const Steps turns = w.steps;
  const bool leader = threadIdx.x % 32 == 0;
  float *sums = p.sums + block_at(p, w.sequence, w.head_kv * p.group, 0) * (kBlockM * D);
  const bool order = p.order != nullptr;
  const int steps = (turns.m_max - turns.m_min) * p.group;
  int m = turns.first, as = 0;
  uint32_t parity = 0;
  // Brings what others have, if they have all come.
  const auto load_sums = [&]() {
    if (as != kLast) return;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (leader) shared.sums_full[i].arrive_expect(kPart * sizeof(float));
      __syncwarp();
      bulk_load(shared_address(shared.dq[i]), sums + m * (kParts * kPart) + i * kPart,
                kPart * sizeof(float), &shared.sums_full[i]);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) shared.sums_full[i].wait(parity);
    parity ^= 1;
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (order) {
      named_barrier_sync(kBarrierArrival, 64);
      as = shared.arrivals[step % kStages].as;
    }
    // What the copy engine has read may be written to. (No part has been sent before the first.)
    if (!kTurns && as != kLast) {
      if (leader) tma_store_wait_read<1>();
      __syncwarp();
      named_barrier_arrive(kBarrierDqEmpty, kDqThreads);
    }
    if (leader) tma_store_wait_read();
    __syncwarp();
    load_sums();
    if (kTurns) {
      named_barrier_arrive(kBarrierDqEmpty + step % 2, kDqThreads);
    } else {
      if (as == kLast) named_barrier_arrive(kBarrierDqEmpty, kDqThreads);
      named_barrier_arrive(kBarrierDqEmpty + 1, kDqThreads);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      named_barrier_sync(kBarrierDqFull + (kTurns ? step % 2 : i), kDqThreads);
      if (leader && p.sums != nullptr && !(as & kLast)) {
        float *to = sums + m * (kParts * kPart) + i * kPart;
        const uint32_t from = shared_address(shared.dq[i]);
        if (as & kFirst) {
          bulk_store(to, from, kPart * sizeof(float));
        } else {
          bulk_add(to, from, kPart * sizeof(float));
        }
        tma_store_commit();
      }
    }
    if (order) {
      if (leader) tma_store_wait();
      __syncwarp();
      named_barrier_sync(kBarrierAdded, 64);
    }
    m = turns.after(m);
    if (m == turns.first) sums += p.blocks_per_head * (kBlockM * D);
  }
  // Shared memory is the copy engine's until it has been read.
  if (leader) tma_store_wait_read();
}

}  // namespace unsloth
