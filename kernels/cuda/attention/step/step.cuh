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
  float shares[kMostRows * kHeadDim];
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
        sequence_(blockIdx.y),
        ring_(dynamic + sizeof(Shared) + warp_ * p.slots * Shared::kSlotBytes),
        length_(static_cast<uint32_t>(p.seqlens[blockIdx.y])),
        groups_((length_ + kKeys - 1) / kKeys) {}

  __device__ __forceinline__ void run() {
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
    if (!reads_angles) compute_turns();
    // The other blocks' shared memory is there from here on, and angles that are computed.
    if (p_.parts == 1) {
      __syncthreads();
    } else {
      cluster_sync();
    }
    await_previous_kernel();
    if (reads_angles) {
      compute_turns();
      __syncthreads();
    }
    const bool has_new = (groups_ - 1) % stride == first;
    if (has_new) load_new();
    turn_queries();
    __syncthreads();
    load_queries();
    uint32_t at = 0;
    for (uint32_t group = first; group < groups_; group += stride) {
      await_slot();
      // All lanes' copies are there.
      __syncwarp();
      if (group + 1 == groups_) {
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

  // Where the key at `index` of the sequence lies in its page, in elements, and its value.
  struct Places {
    uint64_t k, v;
  };

  __device__ __forceinline__ Places places_of(uint64_t page, uint32_t index) const {
    const uint64_t in_page = index & ((1u << p_.page_log2) - 1);
    return {page * p_.k_page + in_page * p_.k_slot + head_ * p_.k_page_head,
            page * p_.v_page + in_page * p_.v_slot + head_ * p_.v_page_head};
  }

  __device__ __forceinline__ uint32_t page_of(uint32_t index) const {
    return p_.block_table[sequence_ * p_.block_table_stride + (index >> p_.page_log2)];
  }

  // Asks for the page of a lane's key of a group that the cache has some of: a turn before it is
  // used, which waits for memory.
  __device__ __forceinline__ void find_page(uint32_t group) {
    const uint32_t begin = group * kKeys, old = length_ - 1;
    if (begin < old) page_ = page_of(min(begin + lane_ % kKeys, old - 1));
  }

  // Starts to copy a group's keys and values, as far as the cache held them; a lane has the page of
  // one. Behind these are zeros where values would be: what is no number would be one times
  // nothing.
  __device__ __forceinline__ void fill(uint8_t *to, uint32_t group, uint32_t page) const {
    if (group >= groups_) return;
    const uint32_t begin = group * kKeys, old = length_ - 1;
#pragma unroll
    for (uint32_t i = lane_; i < kKeys * kLines; i += 32) {
      const uint32_t row = i / kLines, line = i % kLines;
      const Places at = places_of(__shfl_sync(kAllLanes, page, row), begin + row);
      if (begin + row < old) {
        start_copy(to + line_of(row, line), static_cast<const T *>(p_.k_pages) + at.k + line * 8);
        start_copy(to + line_of_value(row, line),
                   static_cast<const T *>(p_.v_pages) + at.v + line * 8);
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
    shared_.turns[pair] = turn_of_pair(p_, p_.positions[sequence_], pair, frequency_of(p_, pair));
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
        static_cast<const T *>(p_.q) + sequence_ * p_.q_token + head_ * p_.group * p_.q_head;
    for (uint32_t at = threadIdx.x; at < p_.group * kPairs; at += kThreads) {
      const uint32_t row = at / kPairs, i = at % kPairs;
      const Pair pair = pair_at(i);
      const T *of_row = q + row * p_.q_head;
      const float2 two = turn(i, number(of_row + pair.a), number(of_row + pair.b));
      put(shared_.q, line_of(row, pair.a / 8), pair.a, two.x);
      put(shared_.q, line_of(row, pair.b / 8), pair.b, two.y);
    }
  }

  // A component of the row that has its line there.
  static __device__ __forceinline__ void put(uint8_t *rows, uint32_t line, uint32_t component,
                                             float x) {
    *reinterpret_cast<uint16_t *>(rows + line + component % 8 * sizeof(T)) = rounded(x);
  }

  // What a lane has of the new key and value.
  __device__ __forceinline__ void load_new() {
    new_page_ = page_of(length_ - 1);
    const T *k = static_cast<const T *>(p_.k) + sequence_ * p_.k_token + head_ * p_.k_head;
    const T *v = static_cast<const T *>(p_.v) + sequence_ * p_.v_token + head_ * p_.v_head;
#pragma unroll
    for (uint32_t j = 0; j < kOwnPairs; j++) {
      const uint32_t i = lane_ + 32 * j;
      const Pair pair = pair_at(i);
      new_key_[j] = turn(i, number(k + pair.a), number(k + pair.b));
      new_value_[j] = {number(v + 2 * i), number(v + 2 * i + 1)};
    }
  }

  // Puts the new token into its group, and into the cache.
  __device__ __forceinline__ void put_new(uint8_t *to) const {
    const uint32_t row = (length_ - 1) % kKeys;
    const Places at = places_of(new_page_, length_ - 1);
    uint16_t *k = static_cast<uint16_t *>(p_.k_pages) + at.k;
    uint16_t *v = static_cast<uint16_t *>(p_.v_pages) + at.v;
#pragma unroll
    for (uint32_t j = 0; j < kOwnPairs; j++) {
      const uint32_t i = lane_ + 32 * j;
      const Pair pair = pair_at(i);
      put(to, line_of(row, pair.a / 8), pair.a, new_key_[j].x);
      put(to, line_of(row, pair.b / 8), pair.b, new_key_[j].y);
      put(to, line_of_value(row, i / 4), 2 * i, new_value_[j].x);
      put(to, line_of_value(row, i / 4), 2 * i + 1, new_value_[j].y);
      k[pair.a] = rounded(new_key_[j].x), k[pair.b] = rounded(new_key_[j].y);
      v[2 * i] = rounded(new_value_[j].x), v[2 * i + 1] = rounded(new_value_[j].y);
    }
  }

  // A lane's part of the queries. Components are multiplied in an order that queries and keys have
  // in common: lane t of four has whole lines. Rows that are not there repeat the last one.
  __device__ __forceinline__ void load_queries() {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const uint32_t row = min(g + 8 * h, p_.group - 1);
#pragma unroll
      for (uint32_t i = 0; i < kLines / 4; i++) {
        q_[h][i] = *reinterpret_cast<const uint4 *>(shared_.q + line_of(row, 4 * i + t));
      }
    }
  }

  __device__ __forceinline__ void attend(const uint8_t *slot, uint32_t group) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    float s[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < kLines / 4; i++) {
      const uint4 low = q_[0][i], high = q_[1][i];
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

  // The sums of `count` parts of a row, relative to the greatest of all; `use` is called with each
  // that has any, and by what it is to be multiplied.
  template <class Use>
  static __device__ __forceinline__ Sums all_of(const Sums (*parts)[kMostRows], uint32_t count,
                                                uint32_t row, const Use &use) {
    Sums all = {kNone, 0};
    for (uint32_t i = 0; i < count; i++) all.most = fmaxf(all.most, parts[i][row].most);
    for (uint32_t i = 0; i < count; i++) {
      const Sums part = parts[i][row];
      // What is no number is some.
      if (part.sum == 0) continue;
      const float by = exp2f(part.most - all.most);
      all.sum = fmaf(part.sum, by, all.sum);
      use(i, by);
    }
    return all;
  }

  // Adds the warps' shares, and the blocks'.
  __device__ __forceinline__ void join() const {
    const uint32_t count = p_.group * kHeadDim, own = count / p_.parts;
    const uint32_t slots_bytes = p_.slots * Shared::kSlotBytes;
    const uint8_t *rings = ring_ - warp_ * slots_bytes;
    for (uint32_t at = threadIdx.x; at < count; at += kThreads) {
      float value = 0;
      const Sums all = all_of(shared_.of_warps, kWarps, at / kHeadDim, [&](uint32_t i, float by) {
        const float *share = reinterpret_cast<const float *>(rings + i * slots_bytes);
        value = fmaf(share[at], by, value);
      });
      if (p_.parts == 1) {
        store(at, value / all.sum);
        continue;
      }
      const uint32_t to = at / own;
      store_to_peer(peer_address(&shared_.shares[part_ * own + at - to * own], to), value);
    }
    if (p_.parts == 1) return;
    for (uint32_t at = threadIdx.x; at < p_.group * p_.parts; at += kThreads) {
      const uint32_t to = at / p_.group, row = at % p_.group;
      const Sums all = all_of(shared_.of_warps, kWarps, row, [](uint32_t, float) {});
      const uint32_t place = peer_address(&shared_.of_blocks[part_][row], to);
      store_to_peer(place, all.most);
      store_to_peer(place + sizeof(float), all.sum);
    }
    cluster_sync();
    for (uint32_t i = threadIdx.x; i < own; i += kThreads) {
      const uint32_t at = part_ * own + i;
      float value = 0;
      const Sums all =
          all_of(shared_.of_blocks, p_.parts, at / kHeadDim, [&](uint32_t block, float by) {
            value = fmaf(shared_.shares[block * own + i], by, value);
          });
      store(at, value / all.sum);
    }
  }

  // Component `at` of the key head's query heads.
  __device__ __forceinline__ void store(uint32_t at, float value) const {
    const uint64_t head = head_ * p_.group + at / kHeadDim;
    uint16_t *o = static_cast<uint16_t *>(p_.o) + sequence_ * p_.o_token + head * p_.o_head;
    o[at % kHeadDim] = rounded(value);
  }

  const Arguments &p_;
  Shared &shared_;
  const uint32_t warp_, lane_, part_, head_, sequence_;
  uint8_t *const ring_;
  // Keys with the new one, and groups of them.
  const uint32_t length_, groups_;
  // Of the group that is asked for next.
  uint32_t page_ = 0;
  uint32_t new_page_ = 0;
  float2 new_key_[kOwnPairs], new_value_[kOwnPairs];
  // Rows g and g + 8.
  uint4 q_[2][kLines / 4];
  float most_[2] = {kNone, kNone}, sum_[2] = {};
  // Eight components each, as products have them.
  float acc_[kLines][4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_ATTENTION_STEP(name, type, head_dim)                                   \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads)                      \
      attention_step_##name(const __grid_constant__ AttentionStepArguments params) {   \
    unsloth::let_next_kernel_start();                                                  \
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
