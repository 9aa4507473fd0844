// What a block computes: the gradients of a block of keys of one key head, from every query that
// sees them.
#pragma once

#include "attention/backward/arguments.h"
#include "common/math.cuh"
#include "config.h"

namespace unsloth {

// Packed sequences are cut into blocks of `unit` tokens, and blocks are numbered through the batch:
// those of sequence i begin with the number that this returns. A sequence gets at least as many
// numbers as it has blocks, and all together at most tokens / unit + batch, which the host knows
// without the lengths.
__device__ __forceinline__ int first_number(const int32_t *cu_seqlens, int i, int unit) {
  return cu_seqlens[i] / unit + i;
}

// A sequence: where its rows begin, and how many there are.
struct Sequence {
  int batch;
  int q_begin, seqlen_q;
  int k_begin, seqlen_k;
  int first_block;  // of its blocks of queries, in a head's statistics and sums
};

__device__ __forceinline__ Sequence sequence_at(const AttentionGradientsArguments &p, int batch) {
  Sequence s = {batch, 0, p.seqlen_q, 0, p.seqlen_k, batch * p.row_blocks};
  if (p.cu_seqlens_q != nullptr) {
    s.q_begin = p.cu_seqlens_q[batch];
    s.seqlen_q = p.cu_seqlens_q[batch + 1] - s.q_begin;
    // Pairs of blocks are numbered: some steps take two.
    s.first_block = 2 * first_number(p.cu_seqlens_q, batch, 2 * kBlockM);
  }
  if (p.cu_seqlens_k != nullptr) {
    s.k_begin = p.cu_seqlens_k[batch];
    s.seqlen_k = p.cu_seqlens_k[batch + 1] - s.k_begin;
  }
  return s;
}

// The sequence whose numbers `number` is among. All lanes of a warp search together: in each round
// they test the beginnings of 32 equal parts of what is left. Dense calls have no use for its code,
// so it is not inlined.
__device__ __noinline__ int sequence_of(const int32_t *cu_seqlens, int batch, int unit,
                                        int number) {
  const int lane = threadIdx.x % 32;
  int found = 0;
  for (int left = batch; left > 1;) {
    const int part = ceil_div(left, 32), at = found + lane * part;
    const bool begun =
        lane * part < left && (lane == 0 || first_number(cu_seqlens, at, unit) <= number);
    const int last = __popc(__ballot_sync(0xffffffff, begun)) - 1;
    found += last * part;
    left = min(part, left - last * part);
  }
  return found;
}

// Where a block of threads works in a packed batch. The grid has `heads` blocks of threads for each
// number: first those of sequence 0 for all heads, one head behind the other, then those of
// sequence 1, and so on. Numbers, not the longest sequence, decide how many are launched.
struct Place {
  int batch;
  int blocks;  // numbers of the sequence
  int index;   // among heads * blocks; negative: of tokens before the first sequence
};

// `numbers`: of all sequences.
__device__ __forceinline__ Place place_in(const int32_t *cu_seqlens, int batch, int unit,
                                          int numbers, int heads, int block) {
  const int i = sequence_of(cu_seqlens, batch, unit, block / heads);
  const int first = first_number(cu_seqlens, i, unit);
  const int next = i + 1 < batch ? first_number(cu_seqlens, i + 1, unit) : numbers;
  return {i, max(next - first, 1), block - first * heads};
}

// More blocks than a sequence has.
constexpr int kNoBlock = 1 << 23;

// A block of queries, of the kernels that run before and after.
struct QueryBlock {
  Sequence sequence;
  int head, m;
};

__device__ __forceinline__ QueryBlock query_block_at(const AttentionGradientsArguments &p) {
  if (p.cu_seqlens_q != nullptr) {
    const int blocks = static_cast<int>(p.blocks_per_head);
    const int head = blockIdx.x / blocks, block = blockIdx.x - head * blocks;
    const int batch = sequence_of(p.cu_seqlens_q, p.batch, 2 * kBlockM, block / 2);
    const Sequence s = sequence_at(p, batch);
    return {s, head, block < s.first_block ? kNoBlock : block - s.first_block};
  }
  const int pair = blockIdx.x / p.row_blocks;
  const int m = blockIdx.x - pair * p.row_blocks;
  return {sequence_at(p, pair / p.heads_q), pair % p.heads_q, m};
}

// Of a head's statistics the block of queries m, and of its sums of dQ.
__device__ __forceinline__ int64_t block_at(const AttentionGradientsArguments &p, const Sequence &s,
                                            int head, int m) {
  return static_cast<int64_t>(head) * p.blocks_per_head + s.first_block + m;
}

// Where a query's statistics lie among those of its block. The accumulators of a thread of the main
// kernel have queries 8j + 2 (lane % 4) + {0, 1}; it reads those of two j at once, and its quad
// those of 16 queries, side by side.
__device__ __forceinline__ int statistic_at(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Of a thread's accumulator i, from where its quad's place in the order begins.
__device__ __forceinline__ constexpr int statistic_of(int i) {
  return i / 8 * 16 + i / 4 % 2 * 2 + i % 2;
}

// Of a block's steps m. Consumers keep them in registers: each look into shared memory between two
// products is time in which a warpgroup does nothing else (LADDER.md, step 26).
struct Steps {
  int m_min, m_max;           // those whose queries see one of the keys
  int mask_below, mask_from;  // m < mask_below and m >= mask_from need masking
  int partial;                // the one that ends in another sequence's rows, or -1
  int after_others;           // from where on the next block of keys has a part, too
  int finish_from;            // from where on the one before has none
  int first;                  // where this block begins
  int begin, end, by;         // it goes on by `by`, at `end` with `begin` of the next head

  // A pair in order adds to its first step only once the pair that it waits for has added to so
  // many steps more. Pairs that begin together would otherwise stay one step apart, and each would
  // stall whenever the pair that it waits for takes longer. With few `steps` that start costs more
  // than it saves.
  __device__ __forceinline__ int lead(int steps) const {
    return max(min(min(kMostLead, steps / 16), m_max - 1 - m_min), 0);
  }

  // Whether the next block of keys has a part in step m, and whether the one before has.
  __device__ __forceinline__ bool has_later(int m) const { return m >= after_others; }
  __device__ __forceinline__ bool has_earlier(int m) const { return m < finish_from; }

  // The one after m, of the same head of queries or, where that is `first`, of the next.
  __device__ __forceinline__ int after(int m) const { return m + by != end ? m + by : begin; }
};

struct Work {
  Sequence sequence;
  int head_kv;
  int first_key;
  Steps steps;
};

// Into how many runs heads are parted: an even number, of which each about fills the device once.
__device__ __forceinline__ int runs_of(int heads, int blocks_per_head) {
  const int wanted = 2 * max(heads * blocks_per_head / (2 * kRunBlocks), 1);
  return max(min(wanted, heads / 2 * 2), 1);
}

// A block of keys has kN of them, which kBlocks blocks of threads share; a step has kM queries.
// `number`: which of the grid's blocks this is.
template <int kN, Mask kMask, int kM, int kBlocks = 1>
__device__ __forceinline__ Work work_at(const AttentionGradientsArguments &p, int number) {
  Work w;
  const bool packed_keys = p.cu_seqlens_k != nullptr;
  Place at = {0, p.key_blocks, number};
  if (packed_keys) {
    at = place_in(p.cu_seqlens_k, p.batch, kN, p.key_blocks, p.heads_kv, number);
  }
  // Blocks of a head side by side: they read the same queries.
  int pair = at.index / at.blocks, key_block = at.index - pair * at.blocks;
  // But for those of so many heads from the first of these on, which go by turns: fewer where more
  // query heads share keys, whose queries would leave the L2 cache.
  const int pairs = packed_keys ? p.heads_kv : p.batch * p.heads_kv;
  const int of_pair = at.blocks * p.group * kBlocks;
  int first = pairs, heads = 1;
  // In order, a block waits for the one that comes before it: mostly that behind it, as the last
  // keys come first.
  bool from_last = p.ordered;
  const int runs = runs_of(pairs, at.blocks * kBlocks);
  if (kMask == Mask::kCausal &&
      (p.ordered ? p.group * (kN / kM) > kBlocks : p.group > 1 && 2 * runs <= pairs)) {
    // The first keys have the most steps. So heads come in runs. The blocks of one run come from
    // the last keys on: they begin together, and end one after the other. Those of the next run
    // come from the first keys on: they begin as the others end, and end together. In order each of
    // these waits for the one before it, which has more steps: by so many that it stays ahead.
    const int run = static_cast<int>(((pair + int64_t{1}) * runs - 1) / pairs);
    from_last = run % 2 == 0;
    first = static_cast<int>(int64_t{run} * pairs / runs);
    heads = static_cast<int>((run + int64_t{1}) * pairs / runs) - first;
  } else if (p.ordered && (kMask == Mask::kNone || kM == kN)) {
    // So that a head's blocks begin one after the other: each waits for the next block of keys at
    // every step. With a mask, blocks whose keys are as many as two steps' queries begin far enough
    // apart as it is.
    const int together = ceil_div(kLastBlocks / (kMask == Mask::kNone ? kBlocks : 2), of_pair);
    first = pair / together * together;
    heads = min(together, pairs - first);
  } else if ((kMask == Mask::kCausal || p.ordered) && (!packed_keys || at.batch == p.batch - 1)) {
    // One that has many steps would run alone at the end: the last heads' come by size.
    heads = min(pairs, ceil_div(kLastBlocks, of_pair));
    first = pairs - heads;
  }
  const int block = at.index - first * at.blocks;
  if (block >= 0) {
    key_block = block / heads;
    pair = first + block - key_block * heads;
  }
  if (from_last) key_block = at.blocks - 1 - key_block;
  if (at.index < 0) pair = 0, key_block = kNoBlock;
  w.first_key = key_block * kN;
  w.head_kv = pair % p.heads_kv;
  w.sequence = sequence_at(p, packed_keys ? at.batch : pair / p.heads_kv);
  const Sequence &s = w.sequence;
  const int end = min(w.first_key + kN, s.seqlen_k), diagonal = s.seqlen_k - s.seqlen_q;
  w.steps.m_min = w.steps.after_others = 0;
  w.steps.m_max = w.first_key < end ? ceil_div(s.seqlen_q, kM) : 0;
  // Query i sees keys from i + diagonal - window_left to i + diagonal + window_right.
  if (kMask != Mask::kNone) {
    const int first = w.first_key - diagonal - (kMask == Mask::kCausal ? 0 : p.window_right);
    w.steps.m_min = max(first, 0) / kM;
    w.steps.after_others = max(first + kN, 0) / kM;
  }
  if (kMask == Mask::kWindow) {
    const int last = end - 1 - diagonal + p.window_left;
    w.steps.m_max = last < 0 ? 0 : min(w.steps.m_max, last / kM + 1);
  }
  if (w.first_key + kN >= s.seqlen_k) w.steps.after_others = w.steps.m_max;
  w.steps.finish_from = w.first_key == 0 ? 0 : w.steps.m_max;
  if (kMask == Mask::kWindow && w.first_key > 0) {
    const int last = w.first_key - 1 - diagonal + p.window_left;
    w.steps.finish_from = last < 0 ? 0 : last / kM + 1;
  }
  // Blocks that wait from the first keys on take their steps from the last queries back: those see
  // the keys of all of them, so that the block waited for has such a step at once, too.
  const bool descending = p.ordered && !from_last;
  w.steps.begin = w.steps.first = descending ? w.steps.m_max - 1 : w.steps.m_min;
  w.steps.end = descending ? w.steps.m_min - 1 : w.steps.m_max;
  w.steps.by = descending ? -1 : 1;
  if (kMask == Mask::kNone && p.order != nullptr && !p.ordered) {
    // A head's blocks begin with different steps, so that they seldom come to one together.
    w.steps.first = static_cast<int64_t>(w.steps.m_max) * key_block / at.blocks;
  }
  w.steps.mask_below = 0;
  w.steps.mask_from = w.steps.m_max;
  if (kMask != Mask::kNone) {
    // From where on every query sees the last key; and up to where every one sees the first.
    const int right = kMask == Mask::kCausal ? 0 : p.window_right;
    w.steps.mask_below = ceil_div(max(w.first_key + kN - 1 - diagonal - right, 0), kM);
    if (kMask == Mask::kWindow) {
      const int seen = w.first_key - diagonal + p.window_left + 1;
      w.steps.mask_from = max(seen, 0) / kM;
    }
  }
  if (w.first_key + kN > s.seqlen_k) w.steps.mask_below = w.steps.m_max;
  const bool packed = p.cu_seqlens_q != nullptr && s.seqlen_q % kM != 0;
  w.steps.partial = packed ? s.seqlen_q / kM : -1;
  return w;
}

}  // namespace unsloth
