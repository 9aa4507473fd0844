// The block's shared memory.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"
#include "work.cuh"

namespace unsloth {

// Operands in chunks of 64 columns with the 128-byte swizzle, dS in chunks of 64 keys. kRows:
// queries of a step. kNumbers: 32-bit numbers that come with each query.
template <int D, class T, int kRows, int kQs, int kNumbers>
struct alignas(1024) Shared {
  static constexpr int kQBuffers = kQs;
  static constexpr int kDoutBuffers = kStages;
  static constexpr int kM = kRows;

  T k[kBlockN * D];
  T v[kBlockN * D];
  T q[kQs][kM * D];
  T dout[kStages][kM * D];
  T ds[kStages][kM * kBlockN];
  // Statistics of queries or, in as many bytes as four numbers, terms (rows.cuh).
  static constexpr bool kTerms = kNumbers == 4;
  float statistics[kQs][kNumbers * kM];

  Mbarrier kv_full;
  Mbarrier q_full[kQs], q_empty[kQs];
  Mbarrier dout_full[kStages], dout_empty[kStages];
  Work work;

  // One thread; fence_mbarrier_init and a block barrier follow. Consumers arrive by warp: a warp's
  // wgmma_wait says nothing about the other three.
  __device__ __forceinline__ void init_barriers() {
    kv_full.init(1);
    for (int i = 0; i < kQs; ++i) {
      q_full[i].init(1);
      q_empty[i].init(8);
    }
    for (int i = 0; i < kStages; ++i) {
      dout_full[i].init(1);
      dout_empty[i].init(8);
    }
  }
};

// Of keys.cuh, which reads Q a step later.
template <int D, class T>
using KeysShared = Shared<D, T, kBlockM, kStages + 1, 2>;

// Whether this block is the first to come to a step's sums of dQ, the last, both or neither
// (sums.cuh).
enum : int { kFirst = 1, kLast = 2 };

struct Arrival {
  void *dq;  // of the step's first query
  int rows;  // of the sequence, from that one on
  int as;
};

// Of consumer.cuh.
template <int D, class T>
struct StepShared : Shared<D, T, kStep<D>, kStages, 4> {
  // What each warpgroup has of a step's dQ, in the order of the sums in memory (rows.cuh). From 16
  // bytes past a line of 128 the copy engine takes longer (LADDER.md, step 63).
  alignas(128) float dq[2][kStep<D> * D / 2];
  Mbarrier sums_full[2];  // what others have, where this block is the last to come
  Arrival arrivals[kStages];
  int ticket;

  __device__ __forceinline__ void init_barriers() {
    Shared<D, T, kStep<D>, kStages, 4>::init_barriers();
    for (Mbarrier &full : sums_full) full.init(1);
    // Nobody says another where blocks count nothing.
    for (Arrival &arrival : arrivals) arrival.as = 0;
  }
};

}  // namespace unsloth
