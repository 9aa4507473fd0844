// The producer: two warps that keep Q, K and V coming.
//
// The first one finds the tiles and loads Q and K, the second one loads V, which the consumers need
// a step later and give back a step later: neither waits for the other. The key blocks of a tile
// run downwards: the masked ones come first.
//
// A copy is issued by one lane of a whole warp, which spares the compiler the loop over lanes that
// it makes of a copy in divergent code.
#pragma once

#include "common/tma.cuh"
#include "common/trace.cuh"
#include "schedule.cuh"

namespace unsloth {

// How far a producing warp has come. Positions in rings follow.
struct Progress {
  uint32_t tiles = 0;
  uint32_t tiles_with_keys = 0;
  uint32_t blocks = 0;  // of keys
};

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// The position in a ring of kStages buffers of what came `n`-th.
template <int kStages>
__device__ __forceinline__ Ring<kStages> ring_at(uint32_t n) {
  return {static_cast<int>(n % kStages), n / kStages & 1};
}

template <TileConfig C, class T>
__device__ __forceinline__ void load_q(const AttentionForwardArguments &p, Shared<C, T> &shared,
                                       const Tile &tile, const Ring<C.q_stages> &ring) {
  const int head = tile.head, batch = p.cu_seqlens_q != nullptr ? 0 : tile.batch;
#pragma unroll 1
  for (int wg = 0; wg < C.warpgroups; ++wg) {
    const int position = (tile.row_block * C.warpgroups + wg) * (kRowsPerWarpgroup >> p.pack_log2);
    Mbarrier *full = &shared.q_full[ring.stage][wg];
    shared.q_empty[ring.stage][wg].wait(ring.parity ^ 1);
    if (threadIdx.x % 32 == 0) full->arrive_expect(sizeof shared.q[0][0]);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < chunks(C.head_dim); ++c) {
      tma_load_5d(shared_address(shared.q[ring.stage][wg]) + c * kRowsPerWarpgroup * 128, &p.q,
                  full, kEvictFirst, c * kChunk, 0, tile.q_begin + position, head, batch);
    }
  }
}

// Loads the key blocks of a tile, of K (and Q behind the first one) or of V.
//
// A block comes in boxes of rows, each from one page; without pages it is one box. Lane i looks up
// the page of box i, a block ahead. Boxes wholly past the end of the sequence are left out: their
// pages may not exist.
template <TileConfig C, class T, bool kV, bool kRagged>
__device__ __forceinline__ void load_blocks(const AttentionForwardArguments &p,
                                            Shared<C, T> &shared, const Tile &tile, Progress &at,
                                            Trace &trace) {
  constexpr int kChunks = chunks(kV ? C.head_dim_v : C.head_dim);
  constexpr int kRowBytes = kChunk * 2;  // of a chunk
  const int lane = threadIdx.x % 32;
  const bool is_paged = kRagged && p.block_table != nullptr;
  const int box_rows = is_paged ? p.kv_box_rows : C.block_n;
  const int box_log2 = __ffs(box_rows) - 1;  // of pages
  const int head = uniform(tile.head_kv);
  const int begin = is_paged ? 0 : uniform(tile.k_begin);
  const int batch = kRagged && p.cu_seqlens_k != nullptr ? 0 : uniform(tile.batch);
  const int n_max = uniform(tile.n_max), n_min = uniform(tile.n_min);
  const int seqlen_k = uniform(tile.seqlen_k);
  const auto page_of_box = [&](int n) {
    const int row = lane * box_rows, key = n * C.block_n + row;
    const bool there = n >= 0 && row < C.block_n && key < seqlen_k;
    return there ? p.block_table[batch * static_cast<int64_t>(p.block_table_stride) +
                                 (key >> p.page_log2)]
                 : 0;
  };
  int page = is_paged ? page_of_box(n_max - 1) : batch;
#pragma unroll 1
  for (int n = n_max - 1; n >= n_min; --n) {
    const int next_page = is_paged ? page_of_box(n - 1) : batch;
    const Ring<C.stages> ring = ring_at<C.stages>(at.blocks++);
    (kV ? shared.v_empty : shared.k_empty)[ring.stage].wait(ring.parity ^ 1);
    trace(23);
    const int key = uniform(n * C.block_n);
    const int rows =
        is_paged ? ceil_div(min(C.block_n, seqlen_k - key), box_rows) * box_rows : C.block_n;
    const int stage = uniform(ring.stage);
    Mbarrier *full = &(kV ? shared.v_full : shared.k_full)[stage];
    if (lane == 0) full->arrive_expect(rows * kChunks * kRowBytes);
    __syncwarp();
    const uint32_t to = kV ? shared_address(shared.v[stage]) : shared_address(shared.k[stage]);
#pragma unroll 1
    for (int row = 0; row < rows; row += box_rows) {
      const int outer = is_paged ? __shfl_sync(0xffffffff, page, row >> box_log2) : batch;
      const int at_row = is_paged ? (key + row) & ((1 << p.page_log2) - 1) : begin + key;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        tma_load_4d(to + (c * C.block_n + row) * kRowBytes, kV ? &p.v : &p.k, full, kEvictLast,
                    c * kChunk, at_row, head, outer);
      }
    }
    page = next_page;
    if (!kV && n == n_max - 1) {
      load_q(p, shared, tile, ring_at<C.q_stages>(at.tiles_with_keys++));
      trace(22);
    }
  }
}

// The first warp.
template <TileConfig C, class T, Mask kMask, bool kRagged>
__device__ __forceinline__ void produce_queries_and_keys(const AttentionForwardArguments &p,
                                                         Shared<C, T> &shared) {
  const bool leader = threadIdx.x == 0;
  Progress at;
  Trace trace;
  if (kRagged) start_walk(p, shared.walk);
  int index = blockIdx.x;
  for (;; ++at.tiles) {
    const Ring<2> slot = ring_at<2>(at.tiles);
    Tile &tile = shared.tile[slot.stage];
    shared.tile_empty[slot.stage].wait(slot.parity ^ 1);
    trace(20);
    bool there;
    if constexpr (kRagged) {
      there = ragged_tile_at<C, kMask>(p, index, shared.walk, tile);
    } else {
      there =
          __any_sync(0xffffffff, index < p.tiles);  // the same in all lanes, to the compiler too
      if (there && leader) tile_at<C, kMask>(p, index, tile);
      __syncwarp();
    }
    if (!there) break;
    if (leader) shared.tile_full[slot.stage].arrive();
    trace(21);
    load_blocks<C, T, false, kRagged>(p, shared, tile, at, trace);
    // Late, so that whoever is done first gets it.
    if (leader) index = next_tile_index(p, index);
    index = __shfl_sync(0xffffffff, index, 0);
  }
  if (leader) {  // there is no more
    const Ring<2> slot = ring_at<2>(at.tiles);
    shared.tile[slot.stage].row_block = -1;
    shared.tile_full[slot.stage].arrive();
    end_claims(p, index, kRagged ? shared.walk.tiles_before : p.tiles);
  }
}

// The second warp.
template <TileConfig C, class T, bool kRagged>
__device__ __forceinline__ void produce_values(const AttentionForwardArguments &p,
                                               Shared<C, T> &shared) {
  Progress at;
  Trace trace;
  for (;; ++at.tiles) {
    const Ring<2> slot = ring_at<2>(at.tiles);
    const Tile &tile = shared.tile[slot.stage];
    shared.tile_full[slot.stage].wait(slot.parity);
    if (uniform(tile.row_block) < 0) break;
    load_blocks<C, T, true, kRagged>(p, shared, tile, at, trace);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[slot.stage].arrive();
  }
}

template <TileConfig C, class T, Mask kMask, bool kRagged>
__device__ __forceinline__ void produce(const AttentionForwardArguments &p, Shared<C, T> &shared) {
  const int warp = uniform(threadIdx.x / 32);
  if (warp == 0) {
    produce_queries_and_keys<C, T, kMask, kRagged>(p, shared);
  } else if (warp == 1) {
    produce_values<C, T, kRagged>(p, shared);
  }
}

}  // namespace unsloth
