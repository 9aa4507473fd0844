// The producer: a warp that loads K and V once, then Q with its statistics and dO, block by block,
// of every query head that reads the key head.
#pragma once

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
  // Of a block of queries.
  constexpr int kNumbers = sizeof shared.statistics[0] / sizeof(float) / kBlocks;
  const float *statistics = Memory::kTerms ? static_cast<const float *>(p.terms) : p.statistics;
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
    for (int n = w.steps.m_min, m = w.steps.first; n < w.steps.m_max; ++n, m = w.steps.after(m)) {
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
                statistics + block_at(p, s, head, m * kBlocks) * kNumbers,
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

}  // namespace unsloth
