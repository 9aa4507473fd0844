// QK-norm and RoPE, and their gradients, at the speed of memory.
//
// A warp has some heads of a token at a time, and of each head a lane has one vector of 16 bytes of
// the first half and its partner of the second: what turns is in one thread. Vectors come through
// shared memory, where every lane has places that nobody else reads, and fills them again as soon
// as it has read them: so much is on its way without a register for it, and no thread waits for
// another. A warp walks over tokens, and keeps a token's angles in registers for all of its heads.
// The first blocks have queries, the others keys.
//
// A lane's components, the order of sums and all roundings are those of the kernels for any heads
// (`kernels/src/qk_norm_rope`): both give the same bits.
#pragma once

#include "angles.cuh"
#include "common/async_copy.cuh"
#include "common/dependent_launch.cuh"
#include "common/gains.cuh"
#include "common/vector.cuh"

namespace unsloth {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// Blocks of a multiprocessor, at the least: of one more there would be spills before Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kForwardBlocks = 5;
#else
constexpr int kForwardBlocks = 6;
#endif
constexpr int kBackwardBlocks = 4;
// Components of a lane that follow each other: a vector. It has two such parts.
constexpr int kPart = 8;
constexpr int kShare = 2 * kPart;

// The heads of queries or of keys in one tensor.
struct Heads {
  const uint8_t *first;
  int64_t batch, token, head;

  // Where a token's heads begin.
  __device__ __forceinline__ const uint8_t *row(uint32_t i, const Arguments &p) const {
    const uint32_t entry = divide(i, p.tokens_per_batch_multiplier, p.tokens_per_batch_shift);
    return first + entry * batch + (i - entry * p.tokens_per_batch) * token;
  }
};

template <class T, int kHeadDim, bool kBackward>
struct Warp {
  using V = Vector<T>;
  static constexpr int kLanes = kHeadDim / kShare;
  static constexpr int kHeads = 32 / kLanes;
  static constexpr int kPairs = kHeadDim / 2;
  // From a vector to its partner.
  static constexpr int kHalfBytes = kPairs * sizeof(T);
  // Of a lane's places in a stage.
  static constexpr int kVectors = kBackward ? 4 : 2;
  // Measured on an H200: of gradients memory gives less where more is on its way.
  static constexpr int kStages = kBackward ? 1 : 4;

  struct Shared {
    uint4 stages[kWarps][kStages][kVectors][32];
    float turns[kWarps][2 * kPairs];
  };

  const Arguments &p;
  Shared &shared;
  bool keys;
  // Of queries or keys, and which of them this block is.
  uint32_t blocks, block;
  Heads x, dout, to;
  uint32_t num_heads, items;
  // Which items of which tokens this warp has.
  uint32_t part, parts, first_token, step;
  // The first of a lane's heads, and its lane of those that share it.
  uint32_t slot, lane;
  // What is loaded next, and where to.
  uint32_t next_token, next_item, next_stage = 0;
  const uint8_t *next_x, *next_dout;

  // Reads no memory but the arguments, so that it may run beside the kernel before.
  __device__ __forceinline__ Warp(const Arguments &p, uint8_t *dynamic)
      : p(p), shared(*reinterpret_cast<Shared *>(dynamic)) {
    keys = blockIdx.x >= p.q_blocks;
    blocks = keys ? gridDim.x - p.q_blocks : p.q_blocks;
    block = keys ? blockIdx.x - p.q_blocks : blockIdx.x;
    slot = threadIdx.x % 32 / kLanes;
    lane = threadIdx.x % kLanes;
    const auto heads = [&](const void *first, int64_t batch, int64_t token, int64_t head) {
      const auto *bytes = static_cast<const uint8_t *>(first);
      return Heads{bytes + slot * head + lane * 16, batch, token, head * kHeads};
    };
    x = keys ? heads(p.k, p.k_batch, p.k_token, p.k_head)
             : heads(p.q, p.q_batch, p.q_token, p.q_head);
    to = keys ? heads(p.k_to, p.k_to_batch, p.k_to_token, p.k_to_head)
              : heads(p.q_to, p.q_to_batch, p.q_to_token, p.q_to_head);
    if constexpr (kBackward) {
      dout = keys ? heads(p.dk_out, p.dk_out_batch, p.dk_out_token, p.dk_out_head)
                  : heads(p.dq_out, p.dq_out_batch, p.dq_out_token, p.dq_out_head);
    }
    num_heads = keys ? p.k_heads : p.q_heads;
    items = (num_heads + kHeads - 1) / kHeads;
    const uint32_t parts_log2 = keys ? p.k_parts_log2 : p.q_parts_log2;
    // The same in a warp, which the compiler does not know.
    const uint32_t warp = block * kWarps + __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    parts = 1u << parts_log2;
    part = warp & (parts - 1);
    first_token = warp >> parts_log2;
    step = (blocks * kWarps) >> parts_log2;
    // More parts than items, or the rest of warps that do not make all parts.
    if (part >= items || first_token >= step) first_token = p.tokens;
    next_item = part;
    next_token = first_token;
    seek();
  }

  __device__ __forceinline__ uint4 (&stage(uint32_t i))
      [kVectors][32] { return shared.stages[threadIdx.x / 32][i]; }

  __device__ __forceinline__ bool has(uint32_t item) const {
    return item * kHeads + slot < num_heads;
  }

  // Finds the heads of the token that is loaded next.
  __device__ __forceinline__ void seek() {
    if (next_token >= p.tokens) return;
    next_x = x.row(next_token, p);
    if constexpr (kBackward) next_dout = dout.row(next_token, p);
  }

  // Starts to load the next item, if there is one, to the next stage.
  __device__ __forceinline__ void start() {
    if (next_token < p.tokens) {
      auto &places = stage(next_stage);
      const uint32_t id = threadIdx.x % 32;
      if (has(next_item)) {
        const uint8_t *from = next_x + next_item * x.head;
        start_copy(&places[0][id], from);
        start_copy(&places[1][id], from + kHalfBytes);
        if constexpr (kBackward) {
          const uint8_t *from = next_dout + next_item * dout.head;
          start_copy(&places[2][id], from);
          start_copy(&places[3][id], from + kHalfBytes);
        }
      } else {
        // A head that there is not adds nothing to shares.
#pragma unroll
        for (int i = 0; i < kVectors; i++) places[i][id] = {};
      }
      next_item += parts;
      if (next_item >= items) {
        next_item = part;
        next_token += step;
        seek();
      }
    }
    commit_copies();
    if (++next_stage == kStages) next_stage = 0;
  }

  // A lane's components of two vectors.
  static __device__ __forceinline__ void unpack(const uint4 &a, const uint4 &b,
                                                float (&to)[kShare]) {
    float low[kPart], high[kPart];
    V::unpack(a, low);
    V::unpack(b, high);
#pragma unroll
    for (int i = 0; i < kPart; i++) to[i] = low[i], to[i + kPart] = high[i];
  }

  static __device__ __forceinline__ float dot(const float (&a)[kShare], const float (&b)[kShare]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kShare; i++) sum = fmaf(a[i], b[i], sum);
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
    return sum;
  }

  static __device__ __forceinline__ void turn(float (&values)[kShare],
                                              const Angles<kPairs, kPart> &by) {
#pragma unroll
    for (int i = 0; i < kPart; i++) {
      const float a = values[i], b = values[i + kPart];
      values[i] = fmaf(a, by.cos[i], -(b * by.sin[i]));
      values[i + kPart] = fmaf(b, by.cos[i], a * by.sin[i]);
    }
  }

  __device__ __forceinline__ void store(const float (&values)[kShare], const uint8_t *at) const {
    float low[kPart], high[kPart];
#pragma unroll
    for (int i = 0; i < kPart; i++) low[i] = values[i], high[i] = values[i + kPart];
    // Of a tensor that is written.
    uint8_t *place = const_cast<uint8_t *>(at);
    __stcs(reinterpret_cast<uint4 *>(place), V::packed(low));
    __stcs(reinterpret_cast<uint4 *>(place + kHalfBytes), V::packed(high));
  }

  // Adds the shares of a block's threads, in order, and stores the sums.
  __device__ __forceinline__ void store_shares(const float (&share)[kShare], float *to) {
    static_assert(sizeof(shared.stages) >= sizeof(share) * kThreads);
    float *all = reinterpret_cast<float *>(shared.stages);
    __syncthreads();
    // A thread's components lie a column so that threads do not meet in a bank.
#pragma unroll
    for (int i = 0; i < kShare; i++) all[i * kThreads + threadIdx.x] = share[i];
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < kHeadDim; c += kThreads) {
      const uint32_t of = c / kPart % kLanes, i = c % kPart + c / kPairs * kPart;
      float sum = 0.0f;
      for (uint32_t other = of; other < kThreads; other += kLanes) sum += all[i * kThreads + other];
      to[block * kHeadDim + c] = sum;
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kStages; i++) start();
    Angles<kPairs, kPart> angles(p, shared.turns[threadIdx.x / 32]);
    int64_t position = 0;
    if (first_token < p.tokens) position = angles.position_of(first_token);
    float gains[kShare], shares[kBackward ? kShare : 1] = {};
    {
      const void *weight = keys ? p.k_weight : p.q_weight;
      const uint32_t dtype = keys ? p.k_weight_dtype : p.q_weight_dtype;
      float low[kPart], high[kPart];
      load_gains<T>(weight, dtype, p.weight_offset, lane, low);
      load_gains<T>(weight, dtype, p.weight_offset, lane + kLanes, high);
#pragma unroll
      for (int i = 0; i < kPart; i++) gains[i] = low[i], gains[i + kPart] = high[i];
    }
    uint32_t current = 0;
    for (uint32_t token = first_token; token < p.tokens; token += step) {
      angles.turn_to(position, lane * kPart);
      if (token + step < p.tokens) position = angles.position_of(token + step);
      const uint8_t *row = to.row(token, p);
      for (uint32_t item = part; item < items; item += parts) {
        await_copies<kStages - 1>();
        const bool there = has(item);
        const auto &places = stage(current);
        if (++current == kStages) current = 0;
        const uint32_t id = threadIdx.x % 32;
        float values[kShare];
        unpack(places[0][id], places[1][id], values);
        if constexpr (kBackward) {
          float gradients[kShare];
          unpack(places[2][id], places[3][id], gradients);
          start();
          turn(gradients, angles);
          const float scale = rsqrtf(dot(values, values) * p.inverse_length + p.epsilon);
#pragma unroll
          for (int i = 0; i < kShare; i++) {
            const float scaled = gradients[i] * scale;
            shares[i] = fmaf(scaled, values[i], shares[i]);
            gradients[i] = scaled * gains[i];
          }
          const float product = dot(gradients, values);
          const float back = -product * p.inverse_length * scale * scale;
#pragma unroll
          for (int i = 0; i < kShare; i++) values[i] = fmaf(values[i], back, gradients[i]);
        } else {
          start();
          const float scale = rsqrtf(dot(values, values) * p.inverse_length + p.epsilon);
#pragma unroll
          for (int i = 0; i < kShare; i++) values[i] *= gains[i] * scale;
          turn(values, angles);
        }
        if (there) store(values, row + item * to.head);
      }
    }
    if constexpr (kBackward) {
      float *sums = keys ? p.dk_weights : p.dq_weights;
      if (sums != nullptr) store_shares(shares, sums);
    }
  }
};

}  // namespace unsloth
