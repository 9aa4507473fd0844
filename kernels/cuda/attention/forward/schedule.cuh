// Which tile comes next, and which keys it needs.
//
// Blocks are persistent. The first tile of each follows from its place in the grid, the others are
// taken from a counter (common/claims.cuh), if there are more tiles than blocks.
//
// The lengths of a ragged batch are known here alone. Its sequences are walked in classes, those
// with more than half as many keys as the longest first, then those with more than a quarter, and
// so on, and only tiles that have rows are counted.
#pragma once

#include <cstdint>

#include "attention/forward/arguments.h"
#include "common/claims.cuh"
#include "common/math.cuh"
#include "shared.cuh"

namespace unsloth {

// The tile after `index`. Indices grow.
__device__ __forceinline__ int next_tile_index(const AttentionForwardArguments &p, int index) {
  const int blocks = gridDim.x;
  if (p.tile_counter == nullptr) return index + blocks;
  if (index < blocks) begin_claims(p.tile_counter, p.launch_tag);
  return blocks + static_cast<int>(claim(p.tile_counter));
}

// After a block's last claim, which gave `index` though there are only so many tiles.
__device__ __forceinline__ void end_claims(const AttentionForwardArguments &p, int index,
                                           int tiles) {
  if (p.tile_counter != nullptr && index - static_cast<int>(gridDim.x) == tiles - 1) {
    end_claims(p.tile_counter, p.launch_tag);
  }
}

struct Lengths {
  int q_begin, q, k_begin, k;
};

__device__ __forceinline__ Lengths lengths(const AttentionForwardArguments &p, int batch) {
  Lengths l = {0, p.seqlen_q, 0, p.seqlen_k};
  if (p.cu_seqlens_q != nullptr) {
    l.q_begin = p.cu_seqlens_q[batch];
    l.q = p.cu_seqlens_q[batch + 1] - l.q_begin;
  }
  if (p.cu_seqlens_k != nullptr) {
    l.k_begin = p.cu_seqlens_k[batch];
    l.k = p.cu_seqlens_k[batch + 1] - l.k_begin;
  }
  if (p.seqlens_k != nullptr) l.k = p.seqlens_k[batch];
  return l;
}

// A (sequence, head) pair and a block of its rows.
struct Place {
  int pair, row_block;
};

// Pairs in sections of as many as L2 holds K and V for; within one, the last rows of every pair
// first, since under a causal mask they are the longest.
__device__ __forceinline__ Place place_at(int index, int row_blocks, int pairs, int pairs_in_l2) {
  const int first = index / (pairs_in_l2 * row_blocks) * pairs_in_l2;
  const int section = min(pairs_in_l2, pairs - first);
  const int within = index - first * row_blocks;
  const int round = within / section;
  return {first + within - round * section, row_blocks - 1 - round};
}

// Fills in a tile, whose sequence has rows there.
template <TileConfig C, Mask kMask>
__device__ __forceinline__ void fill_tile(const AttentionForwardArguments &p, int batch, int head,
                                          int row_block, const Lengths &l, Tile &t) {
  const int heads = p.heads_q >> p.pack_log2;
  t.row_block = row_block;
  t.batch = batch;
  t.head = head;
  t.head_kv = heads == p.heads_kv ? head : head / (heads / p.heads_kv);
  t.q_begin = l.q_begin;
  t.seqlen_q = l.q;
  t.k_begin = l.k_begin;
  t.seqlen_k = l.k;

  const int positions = block_m(C) >> p.pack_log2;
  const int first = row_block * positions;
  const int last = min(first + positions, l.q);  // exclusive
  const int shift = l.k - l.q;                   // masks are aligned bottom-right
  int keys = l.k;
  t.n_min = 0;
  if (kMask == Mask::kCausal) keys = min(keys, last + shift);
  if (kMask == Mask::kWindow) {
    keys = min(keys, last + shift + p.window_right);
    t.n_min = max(0, first + shift - p.window_left) / C.block_n;
  }
  t.n_max = keys <= 0 ? 0 : ceil_div(keys, C.block_n);
}

// Tile `index` of a batch whose sequences are all alike. Behind the tiles of their queries may come
// those of another chunk of queries, which see fewer of the same keys.
template <TileConfig C, Mask kMask>
__device__ __forceinline__ void tile_at(const AttentionForwardArguments &p, int index, Tile &t) {
  const int heads = p.heads_q >> p.pack_log2;
  Lengths l = {p.q_begin, p.seqlen_q, 0, p.seqlen_k};
  int row_blocks = p.row_blocks;
  if (index >= p.chunk_from) {
    index -= p.chunk_from;
    l = {0, p.chunk_seqlen_q, 0, p.chunk_seqlen_k};
    row_blocks = p.chunk_row_blocks;
  }
  Place at;
  if (p.pairs_in_l2 == 0) {
    at.pair = index / row_blocks;
    at.row_block = index - at.pair * row_blocks;
  } else {
    at = place_at(index, row_blocks, p.batch * heads, p.pairs_in_l2);
  }
  const int batch = at.pair / heads;
  fill_tile<C, kMask>(p, batch, at.pair - batch * heads, at.row_block, l, t);
}

constexpr int kWalkClasses = 6;  // the last one takes all that is shorter

__device__ __forceinline__ void start_walk(const AttentionForwardArguments &p, Walk &walk) {
  int longest = 0;
  for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
    longest = max(longest, lengths(p, batch).k);
  }
  longest = __reduce_max_sync(0xffffffff, longest);
  if (threadIdx.x % 32 == 0) walk = {0, 0, 0, longest};
  __syncwarp();
}

// Tile `index` of a ragged batch; false behind the last. A whole warp takes part.
template <TileConfig C, Mask kMask>
__device__ __forceinline__ bool ragged_tile_at(const AttentionForwardArguments &p, int index,
                                               Walk &walk, Tile &t) {
  const int lane = threadIdx.x % 32;
  const int heads = p.heads_q >> p.pack_log2;
  int group = walk.group, length_class = walk.length_class, before = walk.tiles_before;
  for (;;) {
    Lengths l = {0, 0, 0, 0};
    int row_blocks = 0;
    if (group + lane < p.batch) {
      l = lengths(p, group + lane);
      const bool shorter = l.k > walk.longest >> (length_class + 1);
      const bool fits = length_class == 0 || l.k <= walk.longest >> length_class;
      if (fits && (shorter || length_class + 1 == kWalkClasses)) {
        row_blocks = ceil_div(l.q << p.pack_log2, block_m(C));
      }
    }
    int end = row_blocks * heads;  // of the sequence's tiles, once summed up
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, end, step);
      if (lane >= step) end += other;
    }
    const uint32_t beyond = __ballot_sync(0xffffffff, index < before + end);
    if (beyond != 0) {
      if (lane == __ffs(beyond) - 1) {
        const int fitting = p.keys_in_l2 / max(1, l.k);
        const int pairs = min(heads, max(1, fitting) * (heads / p.heads_kv));
        const Place at =
            place_at(index - before - end + row_blocks * heads, row_blocks, heads, pairs);
        fill_tile<C, kMask>(p, group + lane, at.pair, at.row_block, l, t);
        walk.group = group;
        walk.length_class = length_class;
        walk.tiles_before = before;
      }
      __syncwarp();
      return true;
    }
    before += __shfl_sync(0xffffffff, end, 31);
    group += 32;
    if (group >= p.batch) {
      group = 0;
      if (++length_class == kWalkClasses) {
        if (lane == 0) walk.tiles_before = before;
        return false;
      }
    }
  }
}

}  // namespace unsloth
