// The shared memory of a block of a pair.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"
#include "work.cuh"

namespace unsloth {

constexpr int kPair = 2;  // blocks of a cluster

// Operands in chunks of 64 columns with the 128-byte swizzle.
template <int D, int DV, class T>
struct alignas(1024) PairShared {
  static constexpr int kM = kBlockM;
  // dO comes and goes in halves of its columns where there is no room for two whole.
  static constexpr int kParts = DV > 192 ? 2 : 1, kPart = DV / kParts, kBuffers = 3;
  // Chunks with the columns of dQ that a block computes, of three one in part.
  static constexpr int kDqChunks = (D / kChunk + 1) / kPair;
  static constexpr int kDsBuffers = D > 192 ? 2 : 3;

  T k[kKeys<D> * D];
  T v[kKeys<D> * DV];
  T k_peer[kKeys<D> * kDqChunks * kChunk];  // the other block's keys
  T q[kStages][kBlockM * D];
  T dout[kBuffers][kBlockM * kPart];
  T ds[kDsBuffers][kBlockM * kKeys<D>];
  T ds_peer[kBlockM * kKeys<D>];
  // Of each thread the pairs that it holds.
  uint4 probabilities[1][kBlockM * kKeys<D> / 8];
  // Of each query log2(e) times its log-sum-exp, then its delta.
  float statistics[kStages][2 * kBlockM];

  Mbarrier kv_full;
  Mbarrier q_full[kStages], q_empty[kStages];
  Mbarrier dout_full[kBuffers], dout_empty[kBuffers];
  Mbarrier probabilities_full, probabilities_empty;
  Mbarrier ds_full[kDsBuffers], ds_empty[kDsBuffers];
  // What the other block has sent; and whether the other has done with what was sent to it.
  Mbarrier ds_peer_full, ds_sent_empty;
  Work work;
  // Of blocks in order: whether a step's part of dQ may be added, and whether it has been.
  Mbarrier in_order[kStages], added[kStages];
  int ticket;

  // The first of these chunks.
  static __device__ __forceinline__ int first_chunk(int rank) {
    return rank * (D / kChunk - kDqChunks);
  }

  // The buffer of a step's dS, and its round.
  static __device__ __forceinline__ int ds_stage(int step) {
    if constexpr (kDsBuffers == 2) return step & 1;
    return static_cast<uint32_t>(step) % kDsBuffers;
  }
  static __device__ __forceinline__ uint32_t ds_parity(int step) {
    if constexpr (kDsBuffers == 2) return step >> 1 & 1;
    return static_cast<uint32_t>(step) / kDsBuffers & 1;
  }

  // One thread; fence_mbarrier_init and a barrier of the cluster follow. Consumers arrive by warp:
  // of one role, or of both.
  __device__ __forceinline__ void init_barriers() {
    kv_full.init(1);
    for (int i = 0; i < kDsBuffers; ++i) {
      if (i < kStages) {
        q_full[i].init(1);
        q_empty[i].init(8);
      }
      ds_full[i].init(4);
      ds_empty[i].init(8 + 1);
    }
    for (int i = 0; i < kBuffers; ++i) {
      dout_full[i].init(1);
      dout_empty[i].init(8);
    }
    probabilities_full.init(4);
    probabilities_empty.init(4);
    ds_peer_full.init(1);
    ds_sent_empty.init(8);
  }
  __device__ __forceinline__ void init_order() {
    for (int i = 0; i < kStages; ++i) {
      in_order[i].init(2);
      added[i].init(8);
    }
  }
};

}  // namespace unsloth
