// The shared memory of a block whose warpgroups have roles.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"
#include "work.cuh"

namespace unsloth {

// Operands in chunks of 64 columns with the 128-byte swizzle.
template <int D, int DV, class T>
struct alignas(1024) RolesShared {
  static constexpr int kQBuffers = kStages;
  static constexpr int kDoutBuffers = kStages;
  static constexpr int kM = kBlockM;
  static constexpr bool kTerms = false;

  T k[kKeys<D> * D];
  T v[kKeys<D> * DV];
  T q[kStages][kBlockM * D];
  T dout[kStages][kBlockM * DV];
  // Of each thread the pairs that it holds.
  uint4 probabilities[kStages][kBlockM * kKeys<D> / 8];
  // Of each query log2(e) times its log-sum-exp, then its delta.
  float statistics[kStages][2 * kBlockM];

  Mbarrier kv_full;
  Mbarrier q_full[kStages], q_empty[kStages];
  Mbarrier dout_full[kStages], dout_empty[kStages];
  Mbarrier probabilities_full[kStages], probabilities_empty[kStages];
  Work work;

  // One thread; fence_mbarrier_init and a block barrier follow. Consumers arrive by warp: of one
  // role, or of both.
  __device__ __forceinline__ void init_barriers() {
    kv_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      q_full[i].init(1);
      dout_full[i].init(1);
      q_empty[i].init(8);
      dout_empty[i].init(8);
      probabilities_full[i].init(4);
      probabilities_empty[i].init(4);
    }
  }
};

}  // namespace unsloth
