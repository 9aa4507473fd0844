// The producers of a block of a pair: a warp that loads K and V once, then Q with its statistics
// and dO, block by block; one that sends the other block this one's dS; and two that keep the order
// in which pairs add to sums.
#pragma once

#include "common/cluster.cuh"
#include "common/signal.cuh"
#include "common/tma.cuh"
#include "pair_shared.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, int DV, class T>
__device__ __forceinline__ void produce_pair(const AttentionGradientsArguments &p,
                                             PairShared<D, DV, T> &shared, int rank) {
  using Memory = PairShared<D, DV, T>;
  constexpr int kTile = 64 * kChunk * 2;  // bytes, of keys as of queries
  constexpr int kPartChunks = Memory::kPart / kChunk;
  const Work w = shared.work;
  const bool leader = threadIdx.x == 0;
  const Sequence &s = w.sequence;
  const int batch_k = p.cu_seqlens_k != nullptr ? 0 : s.batch;
  const int batch_q = p.cu_seqlens_q != nullptr ? 0 : s.batch;
  if (w.steps.m_min >= w.steps.m_max) return;
  if (leader) {
    shared.kv_full.arrive_expect(sizeof shared.k + sizeof shared.v + sizeof shared.k_peer);
  }
  __syncwarp();
  const int row = s.k_begin + w.first_key, row_of_other = row + (1 - 2 * rank) * kKeys<D>;
#pragma unroll
  for (int c = 0; c < D / kChunk; ++c) {
    tma_load_4d(shared_address(shared.k) + c * kTile, &p.k, &shared.kv_full, kEvictFirst,
                c * kChunk, row, w.head_kv, batch_k);
  }
#pragma unroll
  for (int c = 0; c < DV / kChunk; ++c) {
    tma_load_4d(shared_address(shared.v) + c * kTile, &p.v, &shared.kv_full, kEvictFirst,
                c * kChunk, row, w.head_kv, batch_k);
  }
#pragma unroll
  for (int c = 0; c < Memory::kDqChunks; ++c) {
    tma_load_4d(shared_address(shared.k_peer) + c * kTile, &p.k, &shared.kv_full, kEvictFirst,
                (Memory::first_chunk(rank) + c) * kChunk, row_of_other, w.head_kv, batch_k);
  }
  Ring<kStages> of_q;
  Ring<Memory::kBuffers> of_dout;
  int m = w.steps.first;
#pragma unroll 1
  for (int g = 0; g < p.group; ++g) {
    const int head = w.head_kv * p.group + g;
#pragma unroll 1
    do {
      int stage = __shfl_sync(0xffffffff, of_q.stage, 0);
      const int query = s.q_begin + m * kBlockM;
      Mbarrier *full = &shared.q_full[stage];
      shared.q_empty[stage].wait(of_q.parity ^ 1);
      if (leader) full->arrive_expect(sizeof shared.q[0] + sizeof shared.statistics[0]);
      __syncwarp();
#pragma unroll
      for (int c = 0; c < D / kChunk; ++c) {
        tma_load_4d(shared_address(shared.q[stage]) + c * kTile, &p.q, full, kEvictLast, c * kChunk,
                    query, head, batch_q);
      }
      bulk_load(shared_address(shared.statistics[stage]),
                p.statistics + block_at(p, s, head, m) * (2 * kBlockM), sizeof shared.statistics[0],
                full);
      of_q.advance();
#pragma unroll
      for (int part = 0; part < Memory::kParts; ++part) {
        stage = __shfl_sync(0xffffffff, of_dout.stage, 0);
        full = &shared.dout_full[stage];
        shared.dout_empty[stage].wait(of_dout.parity ^ 1);
        if (leader) full->arrive_expect(sizeof shared.dout[0]);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPartChunks; ++i) {
          const int c = part * kPartChunks + i;
          tma_load_4d(shared_address(shared.dout[stage]) + i * kTile, &p.dout, full, kEvictLast,
                      c * kChunk, query, head, batch_q);
        }
        of_dout.advance();
      }
      m = w.steps.after(m);
    } while (m != w.steps.first);
  }
}

// Each step's dS of this block's keys to the other block.
template <int D, int DV, class T>
__device__ __forceinline__ void exchange(const AttentionGradientsArguments &p,
                                         PairShared<D, DV, T> &shared, int rank) {
  using Memory = PairShared<D, DV, T>;
  const Steps turns = shared.work.steps;
  const bool leader = threadIdx.x % 32 == 0;
  const int steps = (turns.m_max - turns.m_min) * p.group;
  const uint32_t to = peer_address(shared.ds_peer, rank ^ 1);
  const uint32_t barrier = peer_address(&shared.ds_peer_full, rank ^ 1);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = Memory::ds_stage(step);
    const uint32_t parity = step & 1;
    // A phase begins with this arrival, so the one before has to be over.
    if (leader) shared.ds_peer_full.arrive_expect(sizeof shared.ds_peer);
    shared.ds_full[stage].wait(Memory::ds_parity(step));
    shared.ds_sent_empty.wait(parity ^ 1);
    // All lanes have seen these phases, before the copy lets others end.
    __syncwarp();
    if (leader) {
      bulk_copy_to_peer(to, shared_address(shared.ds[stage]), sizeof shared.ds_peer, barrier);
    }
    __syncwarp();
    // What has come was read there, which nothing else would tell the other block.
    shared.ds_peer_full.wait(parity);
    if (leader) arrive_at_peer_after_reads(peer_address(&shared.ds_empty[stage], rank ^ 1));
    __syncwarp();
  }
}

// What comes before a step's dQ is added in order, or behind it, as in sums.cuh: the block adds
// its columns once the same block of the pair behind, where that has a part in the step, has added
// them. Consumers do not wait for memory: one warp looks there for up to two steps that are to
// come; the other's store lets nobody see it before what all consumers have added, which they tell
// this warp as soon as they have asked for it.
template <bool kBefore, int D, int DV, class T>
__device__ __forceinline__ void keep_pairs_in_order(const AttentionGradientsArguments &p,
                                                    PairShared<D, DV, T> &shared, int rank) {
  static_assert(kOrders<D> == kPair);
  const Work &w = shared.work;
  const Steps turns = w.steps;
  if (turns.m_min >= turns.m_max) return;
  int *order = p.order + block_at(p, w.sequence, w.head_kv * p.group, 0) * kPair + rank;
  const int pair = w.first_key / (kPair * kKeys<D>);
  const bool leader = threadIdx.x % 32 == 0;
  // Both warps let a step be added, this one once it has seen that the one before the last was: a
  // phase that it has not seen would be taken for the next but one.
  if (!kBefore && leader) {
    for (int i = 0; i < kStages; ++i) shared.in_order[i].arrive();
  }
  int step = 0, m = turns.first;
#pragma unroll 1
  for (int g = 0; g < p.group; ++g) {
#pragma unroll 1
    do {
      // Which pair added last, and one.
      int *last = order + m * kPair;
      const int stage = step & 1;
      const uint32_t parity = step >> 1 & 1;
      if (kBefore) {
        if (leader && (turns.by > 0 ? turns.has_later(m) : turns.has_earlier(m))) {
          const int ahead = step == 0 ? turns.lead((turns.m_max - turns.m_min) * p.group) : 0;
          await_value(last + ahead * turns.by * kPair, pair + turns.by + 1);
        }
        shared.in_order[stage].wait(parity ^ 1);
      } else {
        shared.added[stage].wait(parity);
      }
      // All lanes have seen this phase, before what follows lets another end.
      __syncwarp();
      if (leader) {
        shared.in_order[stage].arrive();
        if (!kBefore) publish_value(last, pair + 1);
      }
      ++step;
      m = turns.after(m);
    } while (m != turns.first);
    order += p.blocks_per_head * kPair;
  }
}

}  // namespace unsloth
