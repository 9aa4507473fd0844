// Which keys are a block's.
//
// The tiles of all pairs of a sequence and a key head stand in a row, and each block takes an equal
// share of it: however lengths differ, all blocks read as much, and a pair lies in as many blocks
// as its tiles need. The lengths are on the device, so each block adds them up for itself.
//
// Where all pairs have as many tiles, blocks first take whole ones in turns, and the row is what is
// left for less than a turn. The heads of a token, which lie side by side, are then read at about
// the same time, and memory opens its pages less often.
#pragma once

#include <climits>
#include <cstdint>

#include "attention/decode/arguments.h"
#include "common/math.cuh"
#include "even_share.cuh"
#include "shared.cuh"

namespace unsloth {

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

struct Sequence {
  int q_begin, q, k_begin, k;
};

__device__ __forceinline__ Sequence sequence(const AttentionDecodingArguments &p, int batch) {
  if (batch >= p.batch) return {0, 0, 0, 0};
  Sequence s = {0, p.seqlen_q, 0, p.seqlen_k};
  if (p.cu_seqlens_q != nullptr) {
    s.q_begin = p.cu_seqlens_q[batch];
    s.q = p.cu_seqlens_q[batch + 1] - s.q_begin;
  }
  if (p.cu_seqlens_k != nullptr) {
    s.k_begin = p.cu_seqlens_k[batch];
    s.k = p.cu_seqlens_k[batch + 1] - s.k_begin;
  }
  if (p.seqlens_k != nullptr) s.k = p.seqlens_k[batch];
  return s;
}

// The first key that any row sees; the last row sees the last key.
__device__ __forceinline__ int first_key(const AttentionDecodingArguments &p, const Sequence &s) {
  return max(0, s.k - s.q - p.window_left);
}

// As many heads as are read together count as one.
template <DecodeConfig C>
__device__ __forceinline__ int pairs_of_sequence(const AttentionDecodingArguments &p) {
  return p.heads_kv / C.heads;
}

// Tiles of a pair. One that sees no key counts as one: somebody has to say so.
template <DecodeConfig C>
__device__ __forceinline__ int tiles_of(const AttentionDecodingArguments &p, const Sequence &s) {
  if (s.q == 0) return 0;
  return max(1, ceil_div(s.k, C.tile) - first_key(p, s) / C.tile);
}

__device__ __forceinline__ int inclusive_sum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffff, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

__device__ __forceinline__ Tiles of_warp(const Tiles &x) {
  return {__reduce_add_sync(0xffffffff, x.all), __reduce_min_sync(0xffffffff, x.least),
          __reduce_max_sync(0xffffffff, x.most)};
}

// Groups of 32 sequences that make up one of the batch's parts.
__device__ __forceinline__ int groups_of_part(const AttentionDecodingArguments &p) {
  return ceil_div(ceil_div(p.batch, 32), kWalkParts);
}

// Whether no length is on the device.
__device__ __forceinline__ bool are_alike(const AttentionDecodingArguments &p) {
  return p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr && p.seqlens_k == nullptr;
}

// All warps: the tiles of every part of the batch. A block barrier follows.
template <DecodeConfig C, class T>
__device__ __forceinline__ void sum_tiles(const AttentionDecodingArguments &p,
                                          Shared<C, T> &shared) {
  if (are_alike(p)) return;
  const int lane = threadIdx.x % 32;
  const int each = groups_of_part(p) * 32;
  for (int part = threadIdx.x / 32; part < kWalkParts; part += C.warps + 1) {
    Tiles tiles = {0, INT_MAX, 0};
    for (int i = part * each + lane; i < min((part + 1) * each, p.batch); i += 32) {
      const int more = tiles_of<C>(p, sequence(p, i));
      tiles = {tiles.all + more, min(tiles.least, more), max(tiles.most, more)};
    }
    if (part * each < p.batch) tiles = of_warp(tiles);
    if (lane == 0) shared.tiles[part] = tiles;
  }
}

// A warp that walks over the block's share.
template <DecodeConfig C>
class Walk {
 public:
  template <class T>
  __device__ __forceinline__ Walk(const AttentionDecodingArguments &p, const Shared<C, T> &shared)
      : p_(p) {
    const int lane = threadIdx.x % 32;
    Tiles even = {}, odd = {};  // of the lane's parts
    if (are_alike(p)) {
      of_pair_ = tiles_of<C>(p, sequence(p, 0));
    } else {
      even = shared.tiles[2 * lane], odd = shared.tiles[2 * lane + 1];
      const Tiles all = of_warp({0, min(even.least, odd.least), max(even.most, odd.most)});
      of_pair_ = all.least == all.most ? all.most : 0;
    }
    if (of_pair_ > 0) {
      const int blocks = gridDim.x, pairs = p.batch * pairs_of_sequence<C>(p);
      turns_ = pairs / blocks;
      first_ = turns_ * blocks;
      const int tiles = (pairs - first_) * of_pair_;
      share_ = even_share(max(ceil_div(tiles, blocks), p.least_tiles), of_pair_, p.more_tiles);
      take_share(tiles);
      return;
    }
    const int of_even = even.all * pairs_of_sequence<C>(p);
    const int of_odd = odd.all * pairs_of_sequence<C>(p);
    const int end = inclusive_sum(of_even + of_odd);
    const int tiles = __shfl_sync(0xffffffff, end, 31);
    share_ = max(ceil_div(tiles, static_cast<int>(gridDim.x)), p.least_tiles);
    take_share(tiles);
    if (at_ == end_) return;
    const int found = __ffs(__ballot_sync(0xffffffff, at_ < end)) - 1;
    const bool in_odd = at_ >= end - of_odd;
    before_ = __shfl_sync(0xffffffff, in_odd ? end - of_odd : end - of_odd - of_even, found);
    const int part = 2 * found + __shfl_sync(0xffffffff, static_cast<int>(in_odd), found);
    group_ = part * groups_of_part(p);
    load_group();
  }

  // The next piece of work, and where its sequence's keys begin; false behind the last.
  __device__ __forceinline__ bool next(Item &item, int &k_begin) {
    if (turn_ < turns_) {
      const Sequence s = set_pair(item, turn_ * gridDim.x + blockIdx.x);
      set_tiles(item, s, 0, of_pair_);
      item.first_block = blockIdx.x;
      item.part = 0;
      item.parts = 1;
      k_begin = s.k_begin;
      ++turn_;
      return true;
    }
    if (at_ == end_) return false;
    Sequence s;
    int begin, tiles;  // of the pair, in the row
    if (of_pair_ > 0) {
      const int pair = at_ / of_pair_;
      begin = pair * of_pair_;
      tiles = of_pair_;
      s = set_pair(item, first_ + pair);
    } else {
      s = set_sequence(item, begin, tiles);
    }
    const int count = min(begin + tiles, end_) - at_;
    set_tiles(item, s, at_ - begin, count);
    item.first_block = begin / share_;
    item.part = static_cast<int>(blockIdx.x) - item.first_block;
    item.parts = (begin + tiles - 1) / share_ - item.first_block + 1;
    k_begin = s.k_begin;
    at_ += count;
    return true;
  }

 private:
  // Of so many tiles of the row. Grids may be larger than there are tiles.
  __device__ __forceinline__ void take_share(int tiles) {
    at_ = min(static_cast<int>(blockIdx.x) * share_, tiles);
    end_ = min(at_ + share_, tiles);
  }

  // Lanes hold 32 sequences of the batch.
  __device__ __forceinline__ void load_group() {
    here_ = sequence(p_, group_ * 32 + threadIdx.x % 32);
    tiles_end_ = inclusive_sum(tiles_of<C>(p_, here_) * pairs_of_sequence<C>(p_));
  }

  // Where all pairs have as many tiles.
  __device__ __forceinline__ Sequence set_pair(Item &item, int pair) const {
    item.batch = pair / pairs_of_sequence<C>(p_);
    item.head = (pair - item.batch * pairs_of_sequence<C>(p_)) * C.heads;
    return sequence(p_, item.batch);
  }

  // Where they have not: the pair whose tiles the block has come to.
  __device__ __forceinline__ Sequence set_sequence(Item &item, int &begin, int &tiles) {
    uint32_t beyond;
    while ((beyond = __ballot_sync(0xffffffff, at_ < before_ + tiles_end_)) == 0) {
      before_ += __shfl_sync(0xffffffff, tiles_end_, 31);
      ++group_;
      load_group();
    }
    const int lane = __ffs(beyond) - 1;
    const auto of_lane = [&](int x) { return __shfl_sync(0xffffffff, x, lane); };
    const Sequence s = {of_lane(here_.q_begin), of_lane(here_.q), of_lane(here_.k_begin),
                        of_lane(here_.k)};
    tiles = tiles_of<C>(p_, s);
    const int from = before_ + of_lane(tiles_end_) - tiles * pairs_of_sequence<C>(p_);
    const int head = (at_ - from) / tiles;
    begin = from + head * tiles;
    item.batch = group_ * 32 + lane;
    item.head = head * C.heads;
    return s;
  }

  __device__ __forceinline__ void set_tiles(Item &item, const Sequence &s, int from,
                                            int count) const {
    item.rows = s.q * p_.group;
    item.q_begin = s.q_begin;
    item.q = s.q;
    item.k = s.k;
    item.first = first_key(p_, s);
    item.tile_begin = item.first / C.tile + from;
    item.tile_end = item.tile_begin + (s.k == 0 ? 0 : count);
  }

  const AttentionDecodingArguments &p_;
  int of_pair_;                           // tiles of every pair; 0: they differ
  int turn_ = 0, turns_ = 0, first_ = 0;  // of whole pairs: those done, all, and pairs in them
  int share_, at_, end_;                  // tiles of a block; of this one's, those that are left
  int group_ = 0, before_ = 0;            // of 32 sequences, and tiles before them
  Sequence here_ = {};                    // the lane's
  int tiles_end_ = 0;                     // of the group's tiles up to the lane's
};

}  // namespace unsloth
