// A step of decoding, of the projections on to attention's output: one new token of each sequence
// is rotated, put into the cache's pages, and attends to them and itself. For few sequences, where
// what counts is not how many bytes are read but how long each of several kernels would take.
//
// A cluster of blocks has a sequence and a key head, whose query heads are the rows of one product.
// Warps have 16 keys at a time, by turns over all blocks, in rings of their own. What the cache
// held before does not come from the kernel before, so that keys and values are on their way, and
// angles computed that are not the caller's, while that still runs. Then queries turn, and the warp
// that has the new token puts it into its ring and into the cache. Shares are added in the order of
// warps, then of blocks, each of which has as many of the outputs.
//
// Or attention alone: no token is new, queries are as they are to be, and keys, in pages or not,
// may come from the kernel before.
//
// It is CUDA C++ for copies to shared memory and for clusters, of which CubeCL has none.
#pragma once

#include "attention/step/arguments.h"
#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/math.cuh"
#include "common/memory.cuh"
#include "common/mma.cuh"
#include "common/turn.cuh"
#include "common/vector.cuh"

namespace unsloth {

using Arguments = AttentionStepArguments;

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffff;
// Of a warp's step.
constexpr uint32_t kKeys = 16;
constexpr uint32_t kMostRows = 16, kMostParts = 8;
// Lanes that join what parts have of a row. Each reads the sums of one of the block's warps, and
// sends the block's sums to one block of the cluster.
constexpr uint32_t kJoiners = 8;
static_assert(kWarps == kJoiners && kMostParts == kJoiners && kMostRows * kJoiners <= kThreads);
// Below all scores.
constexpr float kNone = -INFINITY;

// The greatest of a row's scores, and the sum of their exponentials relative to it.
struct Sums {
  float most, sum;
};

template <class T, uint32_t kHeadDim>
struct StepShared {
  static constexpr uint32_t kRowBytes = kHeadDim * sizeof(T);
  // A warp's keys, then its values; later its share of the output, in f32.
  static constexpr uint32_t kSlotBytes = 2 * kKeys * kRowBytes;
  static_assert(kSlotBytes >= kMostRows * kHeadDim * sizeof(float));

  uint8_t q[kMostRows * kRowBytes];
  Turn turns[kHeadDim / 2];
  Sums of_warps[kWarps][kMostRows];
  Sums of_blocks[kMostParts][kMostRows];
  // Of each block in turn what it has of this block's outputs.
  alignas(16) float shares[kMostRows * kHeadDim];
};

template <class T, uint32_t kHeadDim>
class Step {
 public:
  using Shared = StepShared<T, kHeadDim>;

  __device__ __forceinline__ Step(const Arguments &p, uint8_t *dynamic)
      : p_(p),
        shared_(*reinterpret_cast<Shared *>(dynamic)),
        warp_(__shfl_sync(kAllLanes, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        part_(blockIdx.x % p.parts),
        head_(blockIdx.x / p.parts),
        ring_(dynamic + sizeof(Shared) + warp_ * p.slots * Shared::kSlotBytes),
        length_(length_of(p, blockIdx.y)),
        old_(length_ - p.append),
        groups_((length_ + kKeys - 1) / kKeys) {}

  __device__ __forceinline__ void run() {
    // Others may store to this block's shared memory once all have come.
    if (p_.parts > 1) cluster_arrive();
    const uint32_t first = warp_ * p_.parts + part_, stride = kWarps * p_.parts;
    uint32_t next = first;
    find_page(next);
    const auto ask = [&](uint32_t to) {
      const uint32_t page = page_;
      find_page(next + stride);
      fill(slot(to), next, page);
      commit_copies();
      next += stride;
    };
    for (uint32_t i = 0; i < p_.slots; i++) ask(i);
    // A table or factors are the caller's, which the kernel before may still write.
    const bool reads_angles = p_.angle_kind != static_cast<uint32_t>(AngleKind::kFrequencies);
    if (!reads_angles) {
      compute_turns();
      __syncthreads();
    }
    await_previous_kernel();
    if (reads_angles) {
      compute_turns();
      __syncthreads();
    }
    const bool has_new = p_.append != 0 && (groups_ - 1) % stride == first;
    if (has_new) load_new();
    turn_queries();
    __syncthreads();
    uint32_t at = 0;
    for (uint32_t group = first; group < groups_; group += stride) {
      await_slot();
      // All lanes' copies are there.
      __syncwarp();
      if (has_new && group + 1 == groups_) {
        put_new(slot(at));
        __syncwarp();
      }
      attend(slot(at), group);
      // And all have done with the slot.
      __syncwarp();
      ask(at);
      at = at + 1 == p_.slots ? 0 : at + 1;
    }
    await_copies<0>();
    __syncwarp();
    leave();
    __syncthreads();
    join();
  }

 private:
  static constexpr uint32_t kRowBytes = Shared::kRowBytes;
  // Of 16 bytes, of a row.
  static constexpr uint32_t kLines = kRowBytes / 16;
  static constexpr uint32_t kPairs = kHeadDim / 2;
  // Of the new token, of a lane.
  static constexpr uint32_t kOwnPairs = kPairs / 32;

  // Lengths in memory may say more than there is room for.
  static __device__ __forceinline__ uint32_t length_of(const Arguments &p, uint32_t sequence) {
    if (p.seqlens == nullptr) return p.keys;
    return min(static_cast<uint32_t>(max(p.seqlens[sequence], 0)), p.keys);
  }

  __device__ __forceinline__ uint8_t *slot(uint32_t i) const {
    return ring_ + i * Shared::kSlotBytes;
  }

  // Where a line of a row of queries or keys lies: of two rows side by side, and of eight rows of
  // values, in other banks.
  static __device__ __forceinline__ uint32_t line_of(uint32_t row, uint32_t line) {
    return row * kRowBytes + (line ^ (row & 1) << 2) * 16;
  }
  static __device__ __forceinline__ uint32_t line_of_value(uint32_t row, uint32_t line) {
    return kKeys * kRowBytes + row * kRowBytes + (line ^ (row & 7)) * 16;
  }

  // Where the key at `index` of the sequence is, which lies in that page, and its value.
  struct Places {
    uint64_t k, v;
  };

  __device__ __forceinline__ Places places_of(uint64_t page, uint32_t index) const {
    const uint64_t in_page = index & ((1u << p_.page_log2) - 1);
    const T *k = static_cast<const T *>(p_.k_pages) + page * p_.k_page + in_page * p_.k_slot;
    const T *v = static_cast<const T *>(p_.v_pages) + page * p_.v_page + in_page * p_.v_slot;
    return {reinterpret_cast<uint64_t>(k + head_ * p_.k_page_head),
            reinterpret_cast<uint64_t>(v + head_ * p_.v_page_head)};
  }

  // Keys that are in no pages are in one for each sequence.
  __device__ __forceinline__ uint32_t page_of(uint32_t index) const {
    if (p_.block_table == nullptr) return sequence();
    return p_.block_table[sequence() * p_.block_table_stride + (index >> p_.page_log2)];
  }

  // Asks for the page of a lane's key of a group that the cache has some of: a turn before it is
  // used, which waits for memory.
  __device__ __forceinline__ void find_page(uint32_t group) {
    const uint32_t begin = group * kKeys;
    if (begin < old_) page_ = page_of(min(begin + lane_ % kKeys, old_ - 1));
  }

  // Starts to copy a group's keys and values, as far as the cache held them; a lane has the page of
  // one. Behind these are zeros where values would be: what is no number would be one times
  // nothing.
  __device__ __forceinline__ void fill(uint8_t *to, uint32_t group, uint32_t page) const {
    if (group >= groups_) return;
    const uint32_t begin = group * kKeys;
    const Places own = places_of(page, begin + lane_ % kKeys);
    const uint32_t line = lane_ % kLines;
#pragma unroll
    for (uint32_t i = 0; i < kKeys * kLines / 32; i++) {
      const uint32_t row = lane_ / kLines + i * (32 / kLines);
      const uint64_t k = __shfl_sync(kAllLanes, own.k, row);
      const uint64_t v = __shfl_sync(kAllLanes, own.v, row);
      if (begin + row < old_) {
        start_copy(to + line_of(row, line), reinterpret_cast<const uint4 *>(k) + line);
        start_copy(to + line_of_value(row, line), reinterpret_cast<const uint4 *>(v) + line);
      } else {
        *reinterpret_cast<uint4 *>(to + line_of_value(row, line)) = {0, 0, 0, 0};
      }
    }
  }

  // Waits for the copies of the next slot: those behind it may go on.
  __device__ __forceinline__ void await_slot() const {
    if (p_.slots == 3) {
      await_copies<2>();
    } else if (p_.slots == 2) {
      await_copies<1>();
    } else {
      await_copies<0>();
    }
  }

  __device__ __forceinline__ void compute_turns() const {
    const uint32_t pair = threadIdx.x;
    if (pair >= p_.pairs) return;
    shared_.turns[pair] = turn_of_pair(p_, p_.positions[sequence()], pair, frequency_of(p_, pair));
  }

  // Two components that turn together, or two neighbours behind all that turn.
  struct Pair {
    uint32_t a, b;
  };

  __device__ __forceinline__ Pair pair_at(uint32_t i) const {
    if (p_.interleaved != 0 || i >= p_.pairs) return {2 * i, 2 * i + 1};
    return {i, i + p_.pairs};
  }

  __device__ __forceinline__ float2 turn(uint32_t i, float a, float b) const {
    return i < p_.pairs ? turned(a, b, shared_.turns[i]) : float2{a, b};
  }

  static __device__ __forceinline__ float number(const T *at) {
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(*at);
    } else {
      return __bfloat162float(*at);
    }
  }

  static __device__ __forceinline__ uint16_t rounded(float x) {
    return static_cast<uint16_t>(pack<T>(x, x));
  }

  // By all threads.
  __device__ __forceinline__ void turn_queries() const {
    const T *q =
        static_cast<const T *>(p_.q) + sequence() * p_.q_token + head_ * p_.group * p_.q_head;
    for (uint32_t at = threadIdx.x; at < p_.group * kPairs; at += kThreads) {
      const uint32_t row = at / kPairs, i = at % kPairs;
      const Pair pair = pair_at(i);
      const T *of_row = q + row * p_.q_head;
      const float2 two = turn(i, number(of_row + pair.a), number(of_row + pair.b));
      put(shared_.q, line_of(row, pair.a / 8), pair.a, rounded(two.x));
      put(shared_.q, line_of(row, pair.b / 8), pair.b, rounded(two.y));
    }
  }

  // The bits of a component of the row that has its line there.
  static __device__ __forceinline__ void put(uint8_t *rows, uint32_t line, uint32_t component,
                                             uint32_t bits) {
    *reinterpret_cast<uint16_t *>(rows + line + component % 8 * sizeof(T)) =
        static_cast<uint16_t>(bits);
  }

  // The same of a row in memory.
  static __device__ __forceinline__ void put(uint64_t row, uint32_t component, uint32_t bits) {
    reinterpret_cast<uint16_t *>(row)[component] = static_cast<uint16_t>(bits);
  }

  // What a lane has of the new key and value.
  __device__ __forceinline__ void load_new() {
    new_page_ = page_of(length_ - 1);
    const T *k = static_cast<const T *>(p_.k) + sequence() * p_.k_token + head_ * p_.k_head;
    const T *v = static_cast<const T *>(p_.v) + sequence() * p_.v_token + head_ * p_.v_head;
#pragma unroll
    for (uint32_t j = 0; j < kOwnPairs; j++) {
      const uint32_t i = lane_ + 32 * j;
      const Pair pair = pair_at(i);
      const float2 two = turn(i, number(k + pair.a), number(k + pair.b));
      new_key_[j] = pack<T>(two.x, two.y);
      new_value_[j] = pack<T>(number(v + 2 * i), number(v + 2 * i + 1));
    }
  }

  // Puts the new token into its group, and into the cache.
  __device__ __forceinline__ void put_new(uint8_t *to) const {
    const uint32_t row = (length_ - 1) % kKeys;
    const Places at = places_of(new_page_, length_ - 1);
#pragma unroll
    for (uint32_t j = 0; j < kOwnPairs; j++) {
      const uint32_t i = lane_ + 32 * j;
      const Pair pair = pair_at(i);
      put(to, line_of(row, pair.a / 8), pair.a, new_key_[j]);
      put(to, line_of(row, pair.b / 8), pair.b, new_key_[j] >> 16);
      put(to, line_of_value(row, i / 4), 2 * i, new_value_[j]);
      put(to, line_of_value(row, i / 4), 2 * i + 1, new_value_[j] >> 16);
      put(at.k, pair.a, new_key_[j]), put(at.k, pair.b, new_key_[j] >> 16);
      put(at.v, 2 * i, new_value_[j]), put(at.v, 2 * i + 1, new_value_[j] >> 16);
    }
  }

  __device__ __forceinline__ uint4 query(uint32_t row, uint32_t line) const {
    return *reinterpret_cast<const uint4 *>(shared_.q + line_of(row, line));
  }

  // Components are multiplied in an order that queries and keys have in common: lane t of four has
  // whole lines. Rows that are not there repeat the last one. Each group reads queries again: their
  // registers are another block's.
  __device__ __forceinline__ void attend(const uint8_t *slot, uint32_t group) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    const uint32_t last = p_.group - 1;
    float s[2][4] = {};
    // Not all at once, which would take more registers than half a multiprocessor has.
#pragma unroll 2
    for (uint32_t i = 0; i < kLines / 4; i++) {
      const uint4 low = query(min(g, last), 4 * i + t), high = query(min(g + 8, last), 4 * i + t);
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const uint4 k = *reinterpret_cast<const uint4 *>(slot + line_of(g + 8 * h, 4 * i + t));
        mma<T>({low.x, high.x, low.y, high.y}, {k.x, k.y}, s[h]);
        mma<T>({low.z, high.z, low.w, high.w}, {k.z, k.w}, s[h]);
      }
    }
    uint32_t weights[4];
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
      float of_row[4];
      float most = most_[r];
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t key = group * kKeys + i / 2 * 8 + 2 * t + i % 2;
        const float score = s[i / 2][2 * r + i % 2] * p_.score_scale_log2;
        of_row[i] = key < length_ ? score : kNone;
        most = fmaxf(most, of_row[i]);
      }
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      // A row that sees nothing but infinities has no sum.
      const float base = most == kNone ? 0 : most;
      const float less = exp2f(most_[r] - base);
      most_[r] = most;
      sum_[r] *= less;
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        of_row[i] = exp2f(of_row[i] - base);
        sum_[r] += of_row[i];
      }
#pragma unroll
      for (uint32_t n = 0; n < kLines; n++) {
        acc_[n][2 * r] *= less, acc_[n][2 * r + 1] *= less;
      }
      weights[r] = pack<T>(of_row[0], of_row[1]);
      weights[2 + r] = pack<T>(of_row[2], of_row[3]);
    }
#pragma unroll
    for (uint32_t n = 0; n < kLines; n += 2) {
      uint32_t v[4];
      load_matrix_x4_transposed(shared_address(slot + line_of_value(lane_ % 16, n + lane_ / 16)),
                                v);
      mma<T>(weights, {v[0], v[1]}, acc_[n]);
      mma<T>(weights, {v[2], v[3]}, acc_[n + 1]);
    }
  }

  // Leaves what a warp has where its ring was.
  __device__ __forceinline__ void leave() {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    float *share = reinterpret_cast<float *>(ring_);
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
      const uint32_t row = g + 8 * r;
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(kAllLanes, sum_[r], 2);
      if (row >= p_.group) continue;
      if (t == 0) shared_.of_warps[warp_][row] = {most_[r], sum_[r]};
#pragma unroll
      for (uint32_t n = 0; n < kLines; n++) {
        *reinterpret_cast<float2 *>(share + row * kHeadDim + 8 * n + 2 * t) = {acc_[n][2 * r],
                                                                               acc_[n][2 * r + 1]};
      }
    }
  }

  // Adds the warps' shares, and the blocks'.
  __device__ __forceinline__ void join() const {
    const uint32_t count = p_.group * kHeadDim, own = count / p_.parts;
    if (p_.parts > 1) cluster_wait();
    if (warp_ * (32 / kJoiners) < p_.group) join_sums();
    __syncthreads();
    const uint32_t slots_bytes = p_.slots * Shared::kSlotBytes;
    const uint8_t *rings = ring_ - warp_ * slots_bytes;
    for (uint32_t at = 4 * threadIdx.x; at < count; at += 4 * kThreads) {
      const uint32_t row = at / kHeadDim;
      float4 value = {};
#pragma unroll
      for (uint32_t i = 0; i < kWarps; i++) {
        const float by = shared_.of_warps[i][row].most;
        const float *share = reinterpret_cast<const float *>(rings + i * slots_bytes);
        const float4 of = *reinterpret_cast<const float4 *>(share + at);
        if (by < 0) continue;
        value.x = fmaf(of.x, by, value.x), value.y = fmaf(of.y, by, value.y);
        value.z = fmaf(of.z, by, value.z), value.w = fmaf(of.w, by, value.w);
      }
      if (p_.parts == 1) {
        const float sum = shared_.of_warps[0][row].sum;
        store(at, value.x, sum), store(at + 1, value.y, sum);
        store(at + 2, value.z, sum), store(at + 3, value.w, sum);
      } else {
        const uint32_t to = at / own;
        store_to_peer(peer_address(&shared_.shares[part_ * own + at - to * own], to), value);
      }
    }
    if (p_.parts == 1) return;
    cluster_sync();
    for (uint32_t i = threadIdx.x; i < own; i += kThreads) {
      const uint32_t at = part_ * own + i;
      Sums parts[kMostParts];
      float most = kNone, value = 0, sum = 0;
#pragma unroll
      for (uint32_t block = 0; block < kMostParts; block++) {
        parts[block] = {kNone, 0};
        if (block < p_.parts) parts[block] = shared_.of_blocks[block][at / kHeadDim];
        most = fmaxf(most, parts[block].most);
      }
#pragma unroll
      for (uint32_t block = 0; block < kMostParts; block++) {
        // What is no number is some.
        if (parts[block].sum == 0) continue;
        const float by = exp2f(parts[block].most - most);
        sum = fmaf(parts[block].sum, by, sum);
        value = fmaf(shared_.shares[block * own + i], by, value);
      }
      store(at, value, sum);
      if (at % kHeadDim == 0) store_lse(at / kHeadDim, {most, sum});
    }
  }

  // Instead of the greatest score that a warp has of a row, by what its share is to be multiplied;
  // below zero if it has none. Other blocks are told the sums of all; alone, they are the first
  // warp's.
  __device__ __forceinline__ void join_sums() const {
    const uint32_t row = threadIdx.x / kJoiners, i = threadIdx.x % kJoiners;
    const bool is_there = row < p_.group;
    Sums &mine = shared_.of_warps[i][row];
    Sums part = {kNone, 0};
    if (is_there) part = mine;
    float most = part.most;
#pragma unroll
    for (uint32_t step = 1; step < kJoiners; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    }
    // What is no number is some.
    const float by = part.sum == 0 ? -1 : exp2f(part.most - most);
    float sum = part.sum == 0 ? 0 : part.sum * by;
#pragma unroll
    for (uint32_t step = 1; step < kJoiners; step *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (!is_there) return;
    mine.most = by;
    if (p_.parts == 1) {
      if (i != 0) return;
      mine.sum = sum;
      store_lse(row, {most, sum});
    } else if (i < p_.parts) {
      const uint32_t place = peer_address(&shared_.of_blocks[part_][row], i);
      store_to_peer(place, most);
      store_to_peer(place + sizeof(float), sum);
    }
  }

  // Component `at` of the key head's query heads: of a query that sees no key it is zero.
  __device__ __forceinline__ void store(uint32_t at, float value, float sum) const {
    if (sum != 0) value /= sum;
    const uint64_t head = head_ * p_.group + at / kHeadDim;
    uint16_t *o = static_cast<uint16_t *>(p_.o) + sequence() * p_.o_token + head * p_.o_head;
    o[at % kHeadDim] = rounded(value);
  }

  // The logarithm of a row's sum, if that is asked for.
  __device__ __forceinline__ void store_lse(uint32_t row, const Sums &all) const {
    if (p_.lse == nullptr) return;
    const uint64_t at = sequence() * p_.lse_token + (head_ * p_.group + row) * p_.lse_head;
    static_cast<float *>(p_.lse)[at] = (all.most + log2f(all.sum)) * kLn2;
  }

  static __device__ __forceinline__ uint32_t sequence() { return blockIdx.y; }

  const Arguments &p_;
  Shared &shared_;
  const uint32_t warp_, lane_, part_, head_;
  uint8_t *const ring_;
  // Keys with the new one, those that were there, and groups of all.
  const uint32_t length_, old_, groups_;
  // Of the group that is asked for next.
  uint32_t page_ = 0;
  uint32_t new_page_ = 0;
  // Two neighbours each, or two components that turn together.
  uint32_t new_key_[kOwnPairs], new_value_[kOwnPairs];
  // Rows g and g + 8.
  float most_[2] = {kNone, kNone}, sum_[2] = {};
  // Eight components each, as products have them.
  float acc_[kLines][4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_ATTENTION_STEP(name, type, head_dim)                                   \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 2)                   \
      attention_step_##name(const __grid_constant__ AttentionStepArguments params) {   \
    unsloth::let_next_kernel_start();                                                  \
    if (params.append == 0) unsloth::await_previous_kernel();                          \
    extern __shared__ uint4 dynamic[];                                                 \
    unsloth::Step<type, head_dim>(params, reinterpret_cast<uint8_t *>(dynamic)).run(); \
  }                                                                                    \
  extern "C" __device__ const AttentionStepLaunch attention_step_##name##_launch = {   \
      static_cast<int32_t>(unsloth::kDtype<type>),                                     \
      head_dim,                                                                        \
      unsloth::kMostRows,                                                              \
      unsloth::kKeys,                                                                  \
      unsloth::kWarps * unsloth::StepShared<type, head_dim>::kSlotBytes,               \
      sizeof(unsloth::StepShared<type, head_dim>),                                     \
      unsloth::kThreads,                                                               \
      227 * 1024,                                                                      \
  };
