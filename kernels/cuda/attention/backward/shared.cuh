// The block's shared memory.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"
#include "work.cuh"

namespace unsloth {

// Operands in chunks of 64 columns with the 128-byte swizzle, dS in chunks of 64 keys. kRows:
// queries of a step; of dO there are as many buffers as there is room for.
template <int D, class T, int kRows, int kDouts>
struct alignas(1024) Shared {
  static constexpr int kQBuffers = kQStages;
  static constexpr int kDoutBuffers = kDouts;
  static constexpr int kM = kRows;

  T k[kBlockN * D];
  T v[kBlockN * D];
  T q[kQStages][kM * D];
  T dout[kDouts][kM * D];
  T ds[kDsStages][kM * kBlockN];
  // Of each query log2(e) times its log-sum-exp, then its delta.
  float statistics[kQStages][2 * kM];

  Mbarrier kv_full;
  Mbarrier q_full[kQStages], q_empty[kQStages];
  Mbarrier dout_full[kDouts], dout_empty[kDouts];
  Mbarrier ds_full[2][kDsStages];  // of each warpgroup's half
  Work work;

  // One thread; fence_mbarrier_init and a block barrier follow. Consumers arrive by warp: a warp's
  // wgmma_wait says nothing about the other three.
  __device__ __forceinline__ void init_barriers() {
    kv_full.init(1);
    for (int i = 0; i < kQStages; ++i) {
      q_full[i].init(1);
      q_empty[i].init(8);
    }
    for (int i = 0; i < kDouts; ++i) {
      dout_full[i].init(1);
      dout_empty[i].init(8);
    }
    for (int i = 0; i < 2 * kDsStages; ++i) ds_full[i / kDsStages][i % kDsStages].init(4);
  }
};

// Of consumer.cuh, and of keys.cuh.
template <int D, class T>
using StepShared = Shared<D, T, kStep<D>, kStep<D> == kBlockM ? 3 : 2>;
template <int D, class T>
using KeysShared = Shared<D, T, kBlockM, kStages>;

}  // namespace unsloth
