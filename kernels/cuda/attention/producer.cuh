// The producer: one thread that keeps Q, K and V coming.
//
// K and V come by turns, V one block behind, since the consumers compute P V one step behind Q K^T,
// also from one tile to the next. The key blocks of a tile run downwards: the masked ones come first.
//
// The thread has the few registers that the consumers leave it: the tile stays in shared memory and one
// copy of the loading code serves K and V.
#pragma once

#include "../common/tma.cuh"
#include "../common/trace.cuh"
#include "schedule.cuh"

namespace unsloth {

// Loads key block n of K or V: chunk by chunk of 64 columns and, with pages, row box by row box.
// Boxes wholly past the end of the sequence are left out: their pages may not exist.
template <TileConfig C>
__device__ __forceinline__ void load_kv(const AttentionForwardParams &p, const CUtensorMap *map,
                                        const Tile &tile, int n, int columns, uint32_t stage,
                                        Mbarrier *full) {
  const int row = n * C.block_n;
  if (p.block_table == nullptr) {
    const int batch = p.cu_seqlens_k != nullptr ? 0 : tile.batch;
    full->arrive_expect(columns * (C.block_n * 2));
#pragma unroll 1
    for (int c = 0; c < columns; c += kChunk) {
      tma_load_4d(stage, map, full, kEvictLast, c, tile.k_begin + row, tile.head_kv, batch);
      stage += C.block_n * kChunk * 2;
    }
    return;
  }
  const int rows = min(C.block_n, tile.seqlen_k - row);
  const int boxes = ceil_div(rows, p.kv_box_rows);
  full->arrive_expect(boxes * p.kv_box_rows * columns * 2);
#pragma unroll 1
  for (int b = 0; b < boxes; ++b) {
    const int at = row + b * p.kv_box_rows;
    const int page = at / p.page_size;
    const int index = p.block_table[tile.batch * static_cast<int64_t>(p.block_table_stride) + page];
#pragma unroll 1
    for (int c = 0; c < columns; c += kChunk) {
      tma_load_4d(stage + c * (C.block_n * 2) + b * p.kv_box_rows * (kChunk * 2), map, full,
                  kEvictLast, c, at - page * p.page_size, tile.head_kv, index);
    }
  }
}

template <TileConfig C, class T>
__device__ __forceinline__ void load_q(const AttentionForwardParams &p, Shared<C, T> &shared,
                                       const Tile &tile, uint32_t parity) {
#pragma unroll 1
  for (int wg = 0; wg < C.warpgroups; ++wg) {
    const int position =
        (tile.row_block * C.warpgroups + wg) * (kRowsPerWarpgroup >> p.pack_log2);
    Mbarrier *full = &shared.q_full[wg];
    shared.q_empty[wg].wait(parity ^ 1);
    full->arrive_expect(sizeof shared.q[0]);
#pragma unroll 1
    for (int c = 0; c < chunks(C.head_dim); ++c) {
      tma_load_5d(shared_address(shared.q[wg]) + c * kRowsPerWarpgroup * 128, &p.q, full,
                  kEvictFirst, c * kChunk, 0, tile.q_begin + position, tile.head,
                  p.cu_seqlens_q != nullptr ? 0 : tile.batch);
    }
  }
}

template <TileConfig C, class T, Mask kMask>
__device__ __forceinline__ void produce(const AttentionForwardParams &p, Shared<C, T> &shared) {
  Ring<2> slots;
  uint32_t q_parity = 0;
  uint32_t blocks = 0;   // K loaded so far, from which ring positions follow
  bool v_pending = false;  // V of the last block is yet to be loaded

  Trace trace;
  for (int index = blockIdx.x;;) {
    shared.tile_empty[slots.stage].wait(slots.parity ^ 1);
    trace(20);
    Tile &tile = shared.tile[slots.stage];
    const bool done = index >= p.tiles;
    int count = 0;
    if (done) {
      tile.row_block = -1;
    } else {
      const bool any_rows = tile_at<C, kMask>(p, index, tile);
      index = next_tile_index(p, index);
      if (!any_rows) continue;
      count = max(0, tile.n_max - tile.n_min);
    }
    trace(21);
    if (count > 0) shared.tile_full[slots.stage].arrive();
    // Even steps load K, odd ones V of the block before. The first odd one is for the last V of the
    // tile before, where the consumers join tiles; otherwise each tile has a step more for its last
    // V. A tile without keys, and the end, have only the step that sees to the last V, as the slot of
    // its tile may be gone afterwards.
    const int steps = max(2 * count + (C.join_tiles ? 0 : 2), 2);
#pragma unroll 1
    for (int step = count > 0 ? 0 : 1; step < steps; ++step) {
      const bool is_v = step & 1;
      const bool previous = step == 1;
      if (count > 0 && step == (C.q_registers && C.join_tiles ? 0 : 1)) {
        load_q(p, shared, tile, q_parity);
        q_parity ^= 1;
        trace(22);
      }
      if (previous && !v_pending) continue;
      if (step == 2 * count && !is_v) continue;
      const Tile &of = shared.tile[previous ? slots.stage ^ 1 : slots.stage];
      const int n = previous ? of.n_min : of.n_max - 1 - step / 2 + is_v;
      const uint32_t block = is_v ? blocks - 1 - (count > 0 && step < 2 * count) : blocks++;
      const uint32_t stage = block % C.stages;
      (is_v ? shared.v_empty : shared.k_empty)[stage].wait(block / C.stages & 1 ^ 1);
      trace(is_v ? 24 : 23);
      load_kv<C>(p, is_v ? &p.v : &p.k, of, n,
                 (is_v ? chunks(C.head_dim_v) : chunks(C.head_dim)) * kChunk,
                 is_v ? shared_address(shared.v[stage]) : shared_address(shared.k[stage]),
                 &(is_v ? shared.v_full : shared.k_full)[stage]);
    }
    v_pending = C.join_tiles && count > 0;
    if (count <= 0) shared.tile_full[slots.stage].arrive();
    if (done) break;
    slots.advance();
  }
}

}  // namespace unsloth
