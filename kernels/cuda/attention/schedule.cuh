// Which tile comes next, and which keys it needs.
//
// Blocks are persistent. Tiles are dealt out in turn when all cost the same, or taken from a
// counter, longest first, when they do not (causal, windows, ragged batches). The counter is
// advanced with a wrapping increment that as many calls as there are tiles bring back to zero, so
// it needs no reset between launches.
#pragma once

#include <cstdint>

#include "../common/math.cuh"
#include "params.h"
#include "shared.cuh"

namespace unsloth {

// The tile after `index`.
__device__ __forceinline__ int next_tile_index(const AttentionForwardParams &p, int index) {
  if (p.tile_counter == nullptr) return index + gridDim.x;
  return gridDim.x + atomicInc(p.tile_counter, p.tiles - 1);
}

// Fills in tile `index`; false if it lies past the end of its sequence.
template <TileConfig C, Mask kMask>
__device__ __forceinline__ bool tile_at(const AttentionForwardParams &p, int index, Tile &t) {
  const int heads = p.heads_q >> p.pack_log2;
  int pair, row_block;
  if (p.pairs_in_l2 == 0) {
    pair = index / p.row_blocks;
    row_block = index - pair * p.row_blocks;
  } else {
    // Sections of as many (batch, head) pairs as L2 holds K and V for; within one, the last rows of
    // every pair first, since under a causal mask they are the longest.
    const int first = index / (p.pairs_in_l2 * p.row_blocks) * p.pairs_in_l2;
    const int pairs = min(p.pairs_in_l2, p.batch * heads - first);
    const int within = index - first * p.row_blocks;
    const int round = within / pairs;
    pair = first + within - round * pairs;
    row_block = p.row_blocks - 1 - round;
  }
  const int batch = pair / heads;
  const int head = pair - batch * heads;
  t.row_block = row_block;
  t.batch = batch;
  t.head = head;
  t.head_kv = heads == p.heads_kv ? head : head / (heads / p.heads_kv);

  int q_begin = 0, seqlen_q = p.seqlen_q;
  if (p.cu_seqlens_q != nullptr) {
    q_begin = p.cu_seqlens_q[batch];
    seqlen_q = p.cu_seqlens_q[batch + 1] - q_begin;
  }
  t.q_begin = q_begin;
  t.seqlen_q = seqlen_q;
  const int positions = block_m(C) >> p.pack_log2;
  const int first = row_block * positions;
  if (first >= seqlen_q) return false;

  int k_begin = 0, seqlen_k = p.seqlen_k;
  if (p.cu_seqlens_k != nullptr) {
    k_begin = p.cu_seqlens_k[batch];
    seqlen_k = p.cu_seqlens_k[batch + 1] - k_begin;
  }
  if (p.seqlens_k != nullptr) seqlen_k = p.seqlens_k[batch];
  t.k_begin = k_begin;
  t.seqlen_k = seqlen_k;

  const int last = min(first + positions, seqlen_q);  // exclusive
  const int shift = seqlen_k - seqlen_q;              // masks are aligned bottom-right
  int keys = seqlen_k;
  t.n_min = 0;
  if (kMask == Mask::kCausal) keys = min(keys, last + shift);
  if (kMask == Mask::kWindow) {
    keys = min(keys, last + shift + p.window_right);
    t.n_min = max(0, first + shift - p.window_left) / C.block_n;
  }
  t.n_max = keys <= 0 ? 0 : ceil_div(keys, C.block_n);
  return true;
}

}  // namespace unsloth
