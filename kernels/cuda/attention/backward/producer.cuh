// The producers: a warp that loads K and V once, then Q with its statistics and dO, block by block,
// of every query head that reads the key head; one that adds dQ to the sums in memory; and two that
// keep the order in which blocks of keys do.
#pragma once

#include "common/named_barrier.cuh"
#include "common/signal.cuh"
#include "common/tma.cuh"
#include "shared.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, int DV, class Memory>
__device__ __forceinline__ void produce(const AttentionGradientsArguments &p, Memory &shared) {
  constexpr int kM = Memory::kM;
  // Of a step: blocks of queries, and tiles of 64 of their columns.
  constexpr int kBlocks = kM / kBlockM, kTiles = kBlocks * (D / kChunk);
  constexpr int kDoutTiles = kBlocks * (DV / kChunk);
  constexpr int kTile = kBlockM * kChunk * 2;
  const Work w = shared.work;
  const bool leader = threadIdx.x == 0;
  const Sequence &s = w.sequence;
  const int batch_k = p.cu_seqlens_k != nullptr ? 0 : s.batch;
  const int batch_q = p.cu_seqlens_q != nullptr ? 0 : s.batch;
  if (w.steps.m_min >= w.steps.m_max) return;
  if (leader) shared.kv_full.arrive_expect(sizeof shared.k + sizeof shared.v);
  __syncwarp();
#pragma unroll
  for (int c = 0; c < D / kChunk; ++c) {
    const int offset = c * kKeys<D> * kChunk * 2;
    tma_load_4d(shared_address(shared.k) + offset, &p.k, &shared.kv_full, kEvictFirst, c * kChunk,
                s.k_begin + w.first_key, w.head_kv, batch_k);
    if (c >= DV / kChunk) continue;
    tma_load_4d(shared_address(shared.v) + offset, &p.v, &shared.kv_full, kEvictFirst, c * kChunk,
                s.k_begin + w.first_key, w.head_kv, batch_k);
  }
  Ring<Memory::kQBuffers> of_q;
  Ring<Memory::kDoutBuffers> of_dout;
#pragma unroll 1
  for (int g = 0; g < p.group; ++g) {
    const int head = w.head_kv * p.group + g;
#pragma unroll 1
    for (int m = w.steps.m_min; m < w.steps.m_max; ++m) {
      int stage = __shfl_sync(0xffffffff, of_q.stage, 0);
      const int row = s.q_begin + m * kM;
      Mbarrier *full = &shared.q_full[stage];
      shared.q_empty[stage].wait(of_q.parity ^ 1);
      if (leader) full->arrive_expect(sizeof shared.q[0] + sizeof shared.statistics[0]);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        tma_load_4d(shared_address(shared.q[stage]) + i * kTile, &p.q, full, kEvictLast,
                    i / kBlocks * kChunk, row + i % kBlocks * kBlockM, head, batch_q);
      }
      bulk_load(shared_address(shared.statistics[stage]),
                p.statistics + block_at(p, s, head, m * kBlocks) * (2 * kBlockM),
                sizeof shared.statistics[0], full);
      stage = __shfl_sync(0xffffffff, of_dout.stage, 0);
      full = &shared.dout_full[stage];
      shared.dout_empty[stage].wait(of_dout.parity ^ 1);
      if (leader) full->arrive_expect(sizeof shared.dout[0]);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kDoutTiles; ++i) {
        tma_load_4d(shared_address(shared.dout[stage]) + i * kTile, &p.dout, full, kEvictLast,
                    i / kBlocks * kChunk, row + i % kBlocks * kBlockM, head, batch_q);
      }
      of_q.advance();
      of_dout.advance();
    }
  }
}

// Adds what consumers leave in shared memory of each step's dQ to the sums in memory. Of a wide
// step one warpgroup leaves all of it, by turns, of others each a half.
//
// In order: a block adds to a step's sums once the next block of keys, where that has a part in
// them, has. One more warp waits for that, a step ahead, and another tells when this block's part
// is there: either takes as long as the way to memory and back.
template <int D, class Memory>
__device__ __forceinline__ void send_dq(const AttentionGradientsArguments &p, Memory &shared) {
  constexpr bool kTurns = Memory::kM > kBlockM;
  constexpr int kParts = kTurns ? 1 : 2, kPart = Memory::kM * D / kParts;
  const Work &w = shared.work;
  const Steps turns = w.steps;
  if (turns.m_min >= turns.m_max) return;
  const bool leader = threadIdx.x % 32 == 0;
  float *sums = p.sums + block_at(p, w.sequence, w.head_kv * p.group, 0) * (kBlockM * D);
  const bool order = p.order != nullptr;
  const int steps = (turns.m_max - turns.m_min) * p.group;
  int m = turns.m_min;
  for (int i = 0; i < kParts; ++i) named_barrier_arrive(kBarrierDqEmpty + i, kDqThreads);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (order) named_barrier_sync(kBarrierInOrder, 64);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      named_barrier_sync(kBarrierDqFull + (kTurns ? step % 2 : i), kDqThreads);
      if (leader && p.sums != nullptr) {
        bulk_add(sums + m * (kParts * kPart) + i * kPart, shared_address(shared.dq[i]),
                 kPart * sizeof(float));
        tma_store_commit();
      }
    }
    const bool last = step + 1 == steps;
    if (kTurns) {
      if (leader) tma_store_wait_read();
      __syncwarp();
      if (!last) named_barrier_arrive(kBarrierDqEmpty + 1 - step % 2, kDqThreads);
    } else {
      if (leader) tma_store_wait_read<1>();
      __syncwarp();
      if (!last) named_barrier_arrive(kBarrierDqEmpty, kDqThreads);
      if (leader) tma_store_wait_read();
      __syncwarp();
      if (!last) named_barrier_arrive(kBarrierDqEmpty + 1, kDqThreads);
    }
    if (order) {
      if (leader) tma_store_wait();
      __syncwarp();
      named_barrier_sync(kBarrierAdded, 64);
    }
    m = turns.after(m);
    if (m == turns.m_min) sums += p.blocks_per_head * (kBlockM * D);
  }
}

// What comes before a step's part is added in order, or behind it. Whom a block waits for has begun
// before it did (work_at).
template <int D, bool kBefore, class Memory>
__device__ __forceinline__ void keep_order(const AttentionGradientsArguments &p,
                                           const Memory &shared) {
  const Work &w = shared.work;
  const Steps turns = w.steps;
  if (turns.m_min >= turns.m_max || p.order == nullptr) return;
  int *order = p.order + block_at(p, w.sequence, w.head_kv * p.group, 0);
  const int block = w.first_key / kKeys<D>;
  const bool leader = threadIdx.x % 32 == 0;
#pragma unroll 1
  for (int g = 0; g < p.group; ++g) {
#pragma unroll 1
    for (int m = turns.m_min; m < turns.m_max; ++m) {
      // Which block added last, and one.
      int *added = order + m * (Memory::kM / kBlockM);
      if (kBefore && leader && m >= turns.after_others) await_value(added, block + 2);
      __syncwarp();
      named_barrier_sync(kBefore ? kBarrierInOrder : kBarrierAdded, 64);
      if (!kBefore && leader) publish_value(added, block + 1);
    }
    order += p.blocks_per_head;
  }
}

}  // namespace unsloth
