// The block's shared memory.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "config.h"

namespace unsloth {

// A piece of work: the query rows of a pair of a sequence and a key head, or as many heads as are
// read together, and those tiles of its keys that are this block's.
struct Item {
  int rows;           // of a head; -1: no more work
  int batch, head;    // of heads that are read together, the first
  int q_begin, q, k;  // first token of the sequence in q, queries, keys
  int first;          // the first key that any row sees
  int tile_begin, tile_end;
  int part, parts;  // which of the pair's parts this is
  int first_block;  // that of the pair's first part
};

// Tiles of some sequences.
struct Tiles {
  int all, least, most;  // of all together, and of one
};

template <DecodeConfig C, class T>
struct alignas(1024) Shared {
  // K and V by turns: box after box, of a box head after head, and of a head swizzled chunks of
  // columns.
  uint8_t ring[C.entries][C.heads * C.tile * row_bytes(C)];
  T q[kItems][C.heads][kRows][q_pitch(C)];
  // What the warps have summed up; then the weights of a pair's parts.
  float o[C.heads][warps_of_head(C)][kRows][o_pitch(C)];
  float2 sums[C.heads][warps_of_head(C)][kRows];  // reference and sum of the exponentials

  Mbarrier full[C.entries], empty[C.entries];
  Mbarrier item_full[kItems], item_empty[kItems];
  Item item[kItems];
  Tiles tiles[kWalkParts];  // of a part of the batch, of one head
  int joins;                // whether the block joins the parts of its pair

  // One thread; fence_mbarrier_init and a block barrier follow.
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < C.entries; ++i) {
      full[i].init(1);
      empty[i].init(C.warps);
    }
    for (int i = 0; i < kItems; ++i) {
      item_full[i].init(1);
      item_empty[i].init(C.warps);
    }
  }
};

// Dynamic shared memory, with room to align its start.
template <DecodeConfig C, class T>
consteval int shared_bytes() {
  return sizeof(Shared<C, T>) + 1024 - 16;
}

// Named barriers (0 is the block's).
enum : int { kBarrierConsumers = 1 };

}  // namespace unsloth
