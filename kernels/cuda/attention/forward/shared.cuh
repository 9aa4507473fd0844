// The block's shared memory.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"

namespace unsloth {

// A work item: one block of query rows of one head, and the keys it needs. `head` counts key heads
// when query heads are packed, query heads otherwise.
struct Tile {
  int row_block;  // -1: no more work
  int head, head_kv;
  int batch;
  int q_begin, seqlen_q;  // first token row of the sequence in q and o, and its length
  int k_begin, seqlen_k;
  int n_min, n_max;  // key blocks [n_min, n_max)
};

// Where the walk over the sequences of a ragged batch stands.
struct Walk {
  int group;         // the first of 32 sequences, of which those of the class come next
  int length_class;  // see schedule.cuh
  int tiles_before;
  int longest;  // keys of the longest sequence
};

template <TileConfig C, class T>
struct alignas(1024) Shared {
  static constexpr int kQElements = chunk_elements(kRowsPerWarpgroup, C.head_dim);
  static_assert(chunk_elements(kRowsPerWarpgroup, C.head_dim_v) <= kQElements,
                "O does not fit where Q was");

  T q[C.q_stages][C.warpgroups][kQElements];
  T k[C.stages][chunk_elements(C.block_n, C.head_dim)];
  T v[C.stages][chunk_elements(C.block_n, C.head_dim_v)];

  Mbarrier q_full[C.q_stages][C.warpgroups], q_empty[C.q_stages][C.warpgroups];
  Mbarrier k_full[C.stages], k_empty[C.stages];
  Mbarrier v_full[C.stages], v_empty[C.stages];
  Mbarrier tile_full[2], tile_empty[2];
  Tile tile[2];
  Walk walk;

  // One thread; fence_mbarrier_init and a block barrier follow. Consumers arrive by warp: a warp's
  // wgmma_wait says nothing about the other three.
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < C.q_stages; ++i) {
      for (int wg = 0; wg < C.warpgroups; ++wg) {
        q_full[i][wg].init(1);
        q_empty[i][wg].init(1);
      }
    }
    for (int i = 0; i < C.stages; ++i) {
      k_full[i].init(1);
      v_full[i].init(1);
      k_empty[i].init(4 * C.warpgroups);
      v_empty[i].init(4 * C.warpgroups);
    }
    for (int i = 0; i < 2; ++i) {
      tile_full[i].init(1);
      tile_empty[i].init(4 * C.warpgroups + 1);  // and the warp that loads V
    }
  }
};

// Dynamic shared memory, with room to align its start.
template <TileConfig C, class T>
consteval int shared_bytes() {
  return sizeof(Shared<C, T>) + 1024 - 16;
}

// Named barriers (0 is the block's).
enum : int { kBarrierTurn = 1, kBarrierConsumers = 4, kBarrierWarpgroup = 5 };

}  // namespace unsloth
