// The block's shared memory.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"
#include "work.cuh"

namespace unsloth {

// Operands in chunks of 64 columns with the 128-byte swizzle, dS in chunks of 64 keys.
template <int D, class T>
struct alignas(1024) Shared {
  static constexpr int kQBuffers = kQStages;

  T k[kBlockN * D];
  T v[kBlockN * D];
  T q[kQStages][kBlockM * D];
  T dout[kStages][kBlockM * D];
  T ds[kStages][kBlockM * kBlockN];
  // Of each query log2(e) times its log-sum-exp, then its delta.
  float statistics[kQStages][2 * kBlockM];

  Mbarrier kv_full;
  Mbarrier q_full[kQStages], q_empty[kQStages];
  Mbarrier dout_full[kStages], dout_empty[kStages];
  Work work;

  // One thread; fence_mbarrier_init and a block barrier follow. Consumers arrive by warp: a warp's
  // wgmma_wait says nothing about the other three.
  __device__ __forceinline__ void init_barriers() {
    kv_full.init(1);
    for (int i = 0; i < kQStages; ++i) {
      q_full[i].init(1);
      q_empty[i].init(8);
    }
    for (int i = 0; i < kStages; ++i) {
      dout_full[i].init(1);
      dout_empty[i].init(8);
    }
  }
};

}  // namespace unsloth
