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

// Loads key block n of K or V, chunk by chunk of 64 columns.
template <TileConfig C>
__device__ __forceinline__ void load_kv(const AttentionForwardParams &p, const CUtensorMap *map,
                                        const Tile &tile, int n, int columns, uint32_t stage,
                                        Mbarrier *full) {
  const int batch = p.cu_seqlens_k != nullptr ? 0 : tile.batch;
  full->arrive_expect(columns * (C.block_n * 2));
#pragma unroll 1
  for (int c = 0; c < columns; c += kChunk) {
    tma_load_4d(stage, map, full, kEvictLast, c, tile.k_begin + n * C.block_n, tile.head_kv, batch);
    stage += C.block_n * kChunk * 2;
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

// The same of pages, by a whole warp: each lane copies one chunk of one box of rows, from a page
// that it looked up a step before. Boxes wholly past the end of the sequence are left out: their
// pages may not exist.
template <TileConfig C, class T>
__device__ __forceinline__ int load_pages(const AttentionForwardParams &p, Shared<C, T> &shared,
                                          const Tile &tile, int index, Progress<C> &at,
                                          Trace &trace) {
  const int count = tile.n_max - tile.n_min;
  const bool leader = threadIdx.x == 0;
  if (count <= 0) return leader ? next_tile_index(p, index) : 0;
  constexpr int kChunks = chunks(C.head_dim);  // V has no more
  const int chunk = threadIdx.x % kChunks;
  const int row = threadIdx.x / kChunks * p.kv_box_rows;  // in the block
  const int32_t *pages = p.block_table + tile.batch * static_cast<int64_t>(p.block_table_stride);
  // In V's turn the block before is loaded, whose page is kept.
  int page = -1, page_before = -1, page_next = -1;
#pragma unroll 1
  for (int step = -2; step < 2 * count + 2; ++step) {
    if (step % 2 == 0) {
      page_before = page;
      page = page_next;
      const int key = (tile.n_max - 2 - step / 2) * C.block_n + row;
      const bool there = step < 2 * count - 2 && row < C.block_n && key < tile.seqlen_k;
      page_next = there ? pages[key >> p.page_log2] : -1;
    }
    if (step < 0) continue;
    if (step == 1) {
      if (leader) load_q(p, shared, tile, at.q_ring);
      at.q_ring.advance();
      continue;
    }
    if (step == 2 * count) {
      if (leader) index = next_tile_index(p, index);
      continue;
    }
    const bool is_v = step & 1;
    const int block = step / 2 - is_v;
    const uint32_t stage = (at.blocks + block) % C.stages;
    const uint32_t parity = (at.blocks + block) / C.stages & 1;
    const int first = (tile.n_max - 1 - block) * C.block_n;
    const int num_chunks = is_v ? chunks(C.head_dim_v) : kChunks;
    Mbarrier *full = &(is_v ? shared.v_full : shared.k_full)[stage];
    (is_v ? shared.v_empty : shared.k_empty)[stage].wait(parity ^ 1);
    if (leader) {
      const int boxes = ceil_div(min(C.block_n, tile.seqlen_k - first), p.kv_box_rows);
      full->arrive_expect(boxes * p.kv_box_rows * num_chunks * (kChunk * 2));
    }
    __syncwarp();
    const int from = is_v ? page_before : page;
    if (from >= 0 && chunk < num_chunks) {
      const uint32_t to = is_v ? shared_address(shared.v[stage]) : shared_address(shared.k[stage]);
      tma_load_4d(to + (chunk * C.block_n + row) * (kChunk * 2), is_v ? &p.v : &p.k, full,
                  kEvictLast, chunk * kChunk, (first + row) & ((1 << p.page_log2) - 1),
                  tile.head_kv, from);
    }
    __syncwarp();
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

// One warp: all of it looks for the next tile and copies pages, its first lane loads the rest.
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
    if (leader) shared.tile_full[at.slots.stage].arrive();
    bool is_paged = false;
    if constexpr (takes_pages(C)) {
      is_paged = p.block_table != nullptr;
      if (is_paged) index = load_pages(p, shared, tile, index, at, trace);
    }
    if (!is_paged && leader) index = load_tile(p, shared, tile, index, at, trace);
    at.slots.advance();
    index = __shfl_sync(0xffffffff, index, 0);
  }
  if (leader) end_tiles(p, shared, at.slots, index, shared.walk.tiles_before);
}

}  // namespace unsloth
