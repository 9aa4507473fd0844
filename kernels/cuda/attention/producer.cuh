// The producer: one thread that keeps Q, K and V coming.
//
// K and V come by turns, V one block behind, since the consumers compute P V one step behind Q K^T.
// The key blocks of a tile run downwards: the masked ones come first.
//
// The thread has the few registers that the consumers leave it: the tile stays in shared memory and
// one copy of the loading code serves K and V.
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
                                       const Tile &tile, const Ring<C.q_stages> &ring) {
#pragma unroll 1
  for (int wg = 0; wg < C.warpgroups; ++wg) {
    const int position = (tile.row_block * C.warpgroups + wg) * (kRowsPerWarpgroup >> p.pack_log2);
    Mbarrier *full = &shared.q_full[ring.stage][wg];
    shared.q_empty[ring.stage][wg].wait(ring.parity ^ 1);
    full->arrive_expect(sizeof shared.q[0][0]);
#pragma unroll 1
    for (int c = 0; c < chunks(C.head_dim); ++c) {
      tma_load_5d(shared_address(shared.q[ring.stage][wg]) + c * kRowsPerWarpgroup * 128, &p.q,
                  full, kEvictFirst, c * kChunk, 0, tile.q_begin + position, tile.head,
                  p.cu_seqlens_q != nullptr ? 0 : tile.batch);
    }
  }
}

// Where the producer stands, from tile to tile.
template <TileConfig C>
struct Progress {
  Ring<2> slots;
  Ring<C.q_stages> q_ring;
  uint32_t blocks = 0;  // key blocks of all tiles so far, from which ring positions follow
};

// Loads what a tile needs, and gives the index of the next one.
template <TileConfig C, class T>
__device__ __forceinline__ int load_tile(const AttentionForwardParams &p, Shared<C, T> &shared,
                                         const Tile &tile, int index, Progress<C> &at,
                                         Trace &trace) {
  const int count = tile.n_max - tile.n_min;
  if (count <= 0) return next_tile_index(p, index);
  // Even steps load K, odd ones V of the block before. The first odd one loads Q instead, and the
  // last even one finds no more K.
#pragma unroll 1
  for (int step = 0; step < 2 * count + 2; ++step) {
    if (step == 1) {
      load_q(p, shared, tile, at.q_ring);
      at.q_ring.advance();
      trace(22);
      continue;
    }
    if (step == 2 * count) {
      // Late, so that whoever is done first gets it, but the last V hides its latency.
      index = next_tile_index(p, index);
      continue;
    }
    const bool is_v = step & 1;
    const int block = step / 2 - is_v;
    const uint32_t stage = (at.blocks + block) % C.stages;
    const uint32_t parity = (at.blocks + block) / C.stages & 1;
    (is_v ? shared.v_empty : shared.k_empty)[stage].wait(parity ^ 1);
    trace(is_v ? 24 : 23);
    load_kv<C>(p, is_v ? &p.v : &p.k, tile, tile.n_max - 1 - block,
               (is_v ? chunks(C.head_dim_v) : chunks(C.head_dim)) * kChunk,
               is_v ? shared_address(shared.v[stage]) : shared_address(shared.k[stage]),
               &(is_v ? shared.v_full : shared.k_full)[stage]);
  }
  at.blocks += count;
  return index;
}

// Tells the consumers that there is no more.
template <TileConfig C, class T>
__device__ __forceinline__ void end_tiles(const AttentionForwardParams &p, Shared<C, T> &shared,
                                          const Ring<2> &slots, int index, int tiles) {
  shared.tile_empty[slots.stage].wait(slots.parity ^ 1);
  shared.tile[slots.stage].row_block = -1;
  shared.tile_full[slots.stage].arrive();
  end_claims(p, index, tiles);
}

// One thread.
template <TileConfig C, class T, Mask kMask>
__device__ __forceinline__ void produce(const AttentionForwardParams &p, Shared<C, T> &shared) {
  Progress<C> at;
  Trace trace;
  int index = blockIdx.x;
  while (index < p.tiles) {
    shared.tile_empty[at.slots.stage].wait(at.slots.parity ^ 1);
    trace(20);
    Tile &tile = shared.tile[at.slots.stage];
    tile_at<C, kMask>(p, index, tile);
    shared.tile_full[at.slots.stage].arrive();
    at.slots.advance();
    trace(21);
    index = load_tile(p, shared, tile, index, at, trace);
  }
  end_tiles(p, shared, at.slots, index, p.tiles);
}

// One warp: all of it looks for the next tile, its first lane loads.
template <TileConfig C, class T, Mask kMask>
__device__ __forceinline__ void produce_ragged(const AttentionForwardParams &p,
                                               Shared<C, T> &shared) {
  const bool leader = threadIdx.x == 0;
  Progress<C> at;
  Trace trace;
  start_walk(p, shared.walk);
  int index = blockIdx.x;
  for (;;) {
    Tile &tile = shared.tile[at.slots.stage];
    shared.tile_empty[at.slots.stage].wait(at.slots.parity ^ 1);
    if (!ragged_tile_at<C, kMask>(p, index, shared.walk, tile)) break;
    if (leader) {
      shared.tile_full[at.slots.stage].arrive();
      index = load_tile(p, shared, tile, index, at, trace);
    }
    at.slots.advance();
    index = __shfl_sync(0xffffffff, index, 0);
  }
  if (leader) end_tiles(p, shared, at.slots, index, shared.walk.tiles_before);
}

}  // namespace unsloth
