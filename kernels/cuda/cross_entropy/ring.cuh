// Cross-entropy with its gradient on Hopper: logits stay in shared memory from their sum to their
// gradient, so that memory is read once and written once.
//
// A block fills a multiprocessor and takes a token at a time. Its last warp, the producer, copies
// chunks of the token's logits into a ring of stages; the other threads sum them and, once the sum
// is known, store the gradient and give the stages back, into which the next token's logits come
// meanwhile. Where less than two tokens fit, no logits would be on their way while a sum is
// awaited: two blocks of a cluster then share a token, each has a half of its logits, and they tell
// each other their sums. Tokens are claimed: multiprocessors differ by a few per cent in what
// memory gives them. Of logits that are longer than the ring the first chunks are given back
// once they are summed, and are copied again behind the others: they are likely to be in the cache.
#pragma once

#include "common/claims.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/named_barrier.cuh"
#include "common/rows.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "cross_entropy/arguments.h"

namespace unsloth {

using Arguments = CrossEntropyRingArguments;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Vectors of 16 bytes that a thread has of a chunk.
constexpr int kVectors = 2;
constexpr int kChunk = kThreads * kVectors;
constexpr int kStages = 14;

// What logits come to: the sum of their exponentials relative to that of `base`, which is one of
// them, and where labels are smoothed their own sum.
struct Sums {
  float base, exponentials, total;
};

// How far above its base a logit may be. Few logits are that far above those before, and
// exponentials of so few powers add up to no infinity.
constexpr float kHeadroom = 8.0f;

// Which token the producer has taken, and its target. After the last token it passes on one whose
// number no token has, and the consumers end.
struct Turn {
  int64_t target;
  uint32_t token;
};

struct alignas(128) Shared {
  uint4 stages[kStages][kChunk];
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
  // Of stages with a token's first chunk. An ignored token has a stage without a chunk.
  Turn turns[kStages];
  // Of warps: those of a token are read while those of the next are written.
  Sums sums[2][kWarps];
  // Of the other block of a pair, likewise.
  alignas(16) float4 of_other[2];
  Mbarrier told[2];
  // The first block of a pair claims tokens for both: it writes the number to `claimed` of the
  // second block and tells it by that one's `claim_told`; the second one answers to `claim_read` of
  // the first.
  alignas(16) float4 claimed;
  Mbarrier claim_told, claim_read;
};

// What a block may have.
constexpr int kSharedBytes = 227 * 1024;
static_assert(sizeof(Shared) <= kSharedBytes);

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * kLog2E); }

// Exponentials relative to a base of usual size are relative to the power of two next to the
// base's: each is then one fused product and a power of two, and no rounding of the base counts.
// The product may overflow where the base is greater.
__device__ __forceinline__ bool has_power(float base) { return fabsf(base) < 1e38f; }
__device__ __forceinline__ float power_of(float base) { return rintf(base * kLog2E); }

// What takes exponentials from one base to a greater one.
__device__ __forceinline__ float rebase(float from, float to) {
  return has_power(to) ? exp2_approx(power_of(from) - power_of(to)) : exp_approx(from - to);
}

__device__ __forceinline__ int64_t target_of(uint32_t token, const Arguments &p) {
  const int64_t at = row_start(token, {p.targets_0, p.targets_1, p.targets_2}, p);
  const uint8_t *from = static_cast<const uint8_t *>(p.targets) + at;
  return p.wide_targets ? *reinterpret_cast<const int64_t *>(from)
                        : *reinterpret_cast<const int32_t *>(from);
}

// What a block has of a token: its logits, or their half. The first `again` chunks are copied
// twice.
struct Share {
  uint32_t first, length;  // in vectors
  uint32_t count, again;   // chunks

  __device__ __forceinline__ Share(uint32_t of_token, uint32_t rank, uint32_t blocks) {
    const uint32_t whole = (of_token + blocks - 1) / blocks;
    first = rank * whole;
    length = min(whole, of_token - first);
    count = (length + kChunk - 1) / kChunk;
    again = count > kStages ? count - kStages : 0;
  }

  // Vectors of a chunk.
  __device__ __forceinline__ uint32_t vectors(uint32_t chunk) const {
    return min(length - chunk * kChunk, static_cast<uint32_t>(kChunk));
  }
};

// Blocks that share a token, this one's number among them, and the tokens that they have.
template <int kBlocks>
struct Place {
  uint32_t rank = blockIdx.x % kBlocks, token = blockIdx.x / kBlocks, step = gridDim.x / kBlocks;
};

// The tokens of a block, or of a pair, one after the other. The producer of each block asks.
template <int kBlocks>
struct Claims {
  const Arguments &p;
  Shared &shared;
  const Place<kBlocks> place;
  uint32_t count = 0;

  // The token to take after `token`; a number from p.tokens on if there is none.
  __device__ __forceinline__ uint32_t next(uint32_t token) {
    if (p.counter == nullptr) return token + place.step;
    if (kBlocks == 2 && place.rank == 1) {
      shared.claim_told.arrive_expect(sizeof(float4));
      shared.claim_told.wait(count++ & 1);
      const uint32_t claimed = __float_as_uint(shared.claimed.x);
      arrive_at_peer(peer_address(&shared.claim_read, 0));
      return claimed;
    }
    if (count == 0) begin_claims(p.counter, p.launch_tag);
    const uint32_t claimed = place.step + claim(p.counter);
    if constexpr (kBlocks == 2) {
      wait_until_read();
      store_async({__uint_as_float(claimed), 0.0f, 0.0f, 0.0f}, peer_address(&shared.claimed, 1),
                  peer_address(&shared.claim_told, 1));
    }
    count++;
    return claimed;
  }

  // `token`: the number for which there was no token. The block that got the last of all numbers
  // resets the counter.
  __device__ __forceinline__ void end(uint32_t token) {
    if (p.counter == nullptr || place.rank != 0) return;
    if (token - place.step == p.tokens - 1) end_claims(p.counter, p.launch_tag);
    // The other block arrives at this one's barrier, so this block may not end before.
    if constexpr (kBlocks == 2) wait_until_read();
  }

  __device__ __forceinline__ void wait_until_read() {
    if (count > 0) shared.claim_read.wait((count - 1) & 1);
  }
};

// By one thread.
template <int kBlocks>
__device__ __forceinline__ void produce(const Arguments &p, Shared &shared) {
  const Place<kBlocks> place;
  const Share share(p.length, place.rank, kBlocks);
  Claims<kBlocks> claims = {p, shared, place};
  Ring<kStages> ring;
  const auto begin = [&](const Turn &turn) {
    shared.empty[ring.stage].wait(ring.parity ^ 1);
    shared.turns[ring.stage] = turn;
  };
  const auto copy = [&](const uint4 *from, uint32_t chunk) {
    const uint32_t bytes = share.vectors(chunk) * 16;
    shared.empty[ring.stage].wait(ring.parity ^ 1);
    shared.full[ring.stage].arrive_expect(bytes);
    bulk_load_by_thread(shared_address(shared.stages[ring.stage]), from + chunk * kChunk, bytes,
                        &shared.full[ring.stage]);
    ring.advance();
  };
  uint32_t token = place.token;
  while (token < p.tokens) {
    const int64_t target = target_of(token, p);
    begin({target, token});
    uint32_t next;
    if (target == p.ignore_index) {
      shared.full[ring.stage].arrive();
      ring.advance();
      next = claims.next(token);
    } else {
      const int64_t start = row_start(token, {p.logits_0, p.logits_1, p.logits_2}, p);
      const auto *from = reinterpret_cast<const uint4 *>(static_cast<uint8_t *>(p.logits) + start);
      from += share.first;
      copy(from, 0);
      // The answer comes while the other chunks are asked for.
      next = claims.next(token);
      for (uint32_t c = 1; c < share.count; c++) copy(from, c);
      for (uint32_t c = 0; c < share.again; c++) copy(from, c);
    }
    token = next;
  }
  begin({0, UINT32_MAX});
  shared.full[ring.stage].arrive();
  claims.end(token);
}

template <class T, int kBlocks>
struct Consumer {
  using V = Vector<T>;
  static constexpr int kWidth = V::kWidth;

  // What the gradient of a token's logits needs, times that of its loss.
  struct Token {
    uint32_t token;
    uint32_t target_vector, target_column;
    float lse, total;
    float power;  // of two: what the exponentials add up to
    float factor, spread, of_target;
  };

  const Arguments &p;
  Shared &shared;
  const Place<kBlocks> place;
  const Share share;
  Ring<kStages> ring = {};
  float scale_of_all = 1.0f;

  __device__ __forceinline__ Consumer(const Arguments &p, Shared &shared)
      : p(p), shared(shared), share(p.length, place.rank, kBlocks) {
    if (p.dloss != nullptr) scale_of_all *= *p.dloss;
    if (p.denominator != nullptr) scale_of_all /= *p.denominator;
  }

  __device__ __forceinline__ void give_back(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
  }

  // The sums over the logits of the token number `count` of this block, in all threads; in one
  // order whatever the grid.
  __device__ __forceinline__ Sums sum(uint32_t count) {
    // Below every logit but minus infinity, from which it has a distance.
    float base = -3.402823466e38f, exponentials = 0.0f, total = 0.0f;
    float power = 0.0f;  // of the base
    for (uint32_t c = 0; c < share.count; c++) {
      shared.full[ring.stage].wait(ring.parity);
      const uint32_t vectors = share.vectors(c);
      float s[kVectors][kWidth];
#pragma unroll
      for (int k = 0; k < kVectors; k++) {
        const uint32_t i = threadIdx.x + k * kThreads;
        V::unpack(i < vectors ? shared.stages[ring.stage][i] : V::least(), s[k]);
      }
      float greatest = s[0][0];
#pragma unroll
      for (int i = 1; i < kVectors * kWidth; i++)
        greatest = fmaxf(greatest, s[i / kWidth][i % kWidth]);
      if (greatest > base + kHeadroom) {
        exponentials *= rebase(base, greatest);
        base = greatest;
        power = power_of(base);
      }
      float sums[kVectors] = {};
      if (has_power(base)) {
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
#pragma unroll
          for (int k = 0; k < kVectors; k++) {
            sums[k] += exp2_approx(fmaf(s[k][j], kLog2E, -power));
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
#pragma unroll
          for (int k = 0; k < kVectors; k++) sums[k] += exp_approx(s[k][j] - base);
        }
      }
#pragma unroll
      for (int k = 0; k < kVectors; k++) exponentials += sums[k];
      if (p.spread > 0.0f) {
#pragma unroll
        for (int k = 0; k < kVectors; k++) {
          if (threadIdx.x + k * kThreads >= vectors) break;
#pragma unroll
          for (int j = 0; j < kWidth; j++) total += s[k][j];
        }
      }
      if (c < share.again) give_back(ring.stage);
      ring.advance();
    }
    const Sums of_warp = all_lanes({base, exponentials, total});
    const uint32_t half = count & 1;
    if (threadIdx.x % 32 == 0) shared.sums[half][threadIdx.x / 32] = of_warp;
    named_barrier_sync(1, kThreads);
    const Sums mine = all_lanes(shared.sums[half][threadIdx.x % kWarps], kWarps);
    if constexpr (kBlocks == 1) return mine;
    // The other block comes to this token's sums again only after it has these.
    if (threadIdx.x == 0) {
      shared.told[half].arrive_expect(sizeof(float4));
      store_async({mine.base, mine.exponentials, mine.total, 0.0f},
                  peer_address(&shared.of_other[half], place.rank ^ 1),
                  peer_address(&shared.told[half], place.rank ^ 1));
    }
    shared.told[half].wait(count / 2 & 1);
    const float4 told = shared.of_other[half];
    const Sums other = {told.x, told.y, told.z};
    return place.rank == 0 ? added(mine, other) : added(other, mine);
  }

  // In one order, so that both blocks have the same bits.
  static __device__ __forceinline__ Sums added(const Sums &a, const Sums &b) {
    const float base = fmaxf(a.base, b.base);
    const float exponentials = a.exponentials * rebase(a.base, base);
    return {base, fmaf(b.exponentials, rebase(b.base, base), exponentials), a.total + b.total};
  }

  // The sums of `lanes` neighbours, in each of them.
  static __device__ __forceinline__ Sums all_lanes(Sums mine, int lanes = 32) {
    constexpr uint32_t kAll = 0xffffffff;
    float base = mine.base;
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
      base = fmaxf(base, __shfl_xor_sync(kAll, base, step));
    }
    float exponentials = mine.exponentials * rebase(mine.base, base);
    float total = mine.total;
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
      exponentials += __shfl_xor_sync(kAll, exponentials, step);
      total += __shfl_xor_sync(kAll, total, step);
    }
    return {base, exponentials, total};
  }

  // Stores the gradient of a chunk, and the token's loss if its target is there.
  __device__ __forceinline__ void differentiate(const uint4 *stage, uint32_t chunk, uint4 *to,
                                                const Token &t) {
    const uint32_t vectors = share.vectors(chunk);
    float s[kVectors][kWidth], g[kVectors][kWidth];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const uint32_t i = threadIdx.x + k * kThreads;
      V::unpack(i < vectors ? stage[i] : V::least(), s[k]);
    }
    if (has_power(t.lse)) {
#pragma unroll
      for (int i = 0; i < kVectors * kWidth; i++) {
        const float of = s[i / kWidth][i % kWidth];
        g[i / kWidth][i % kWidth] =
            fmaf(exp2_approx(fmaf(of, kLog2E, -t.power)), t.factor, -t.spread);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors * kWidth; i++) {
        const float of = s[i / kWidth][i % kWidth];
        g[i / kWidth][i % kWidth] = fmaf(exp_approx(of - t.lse), t.factor, -t.spread);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const uint32_t i = threadIdx.x + k * kThreads;
      if (i >= vectors) break;
      const uint32_t at = share.first + chunk * kChunk + i;
      if (at == t.target_vector) {
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          if (j == static_cast<int>(t.target_column)) {
            g[k][j] -= t.of_target;
            store_loss(t, s[k][j]);
          }
        }
      }
      to[at] = V::packed(g[k]);
    }
  }

  __device__ __forceinline__ void store_loss(const Token &t, float of_target) {
    if (p.losses == nullptr) return;
    // Logits may be minus infinity where no probability is spread over them.
    const float smooth = p.spread > 0.0f ? p.spread * t.total : 0.0f;
    p.losses[t.token] =
        t.lse - (1.0f - p.label_smoothing) * of_target - smooth + p.z_loss * t.lse * t.lse;
  }

  __device__ __forceinline__ void ignore(uint32_t token, uint4 *to) {
    to += share.first;
    for (uint32_t i = threadIdx.x; i < share.length; i += kThreads) to[i] = {0, 0, 0, 0};
    if (threadIdx.x != 0 || place.rank != 0) return;
    if (p.losses != nullptr) p.losses[token] = 0.0f;
    if (p.lses != nullptr) p.lses[token] = 0.0f;
  }

  __device__ __forceinline__ void take(uint32_t token, int64_t target, uint4 *to, uint32_t count) {
    Ring<kStages> kept = ring;
    for (uint32_t c = 0; c < share.again; c++) kept.advance();
    const Sums sums = sum(count);
    const bool inside = target >= 0 && target < static_cast<int64_t>(p.length) * kWidth;
    const float scale = inside ? scale_of_all : __uint_as_float(0x7fffffff);
    Token t;
    t.token = token;
    t.target_vector = inside ? target / kWidth : UINT32_MAX;
    t.target_column = inside ? target % kWidth : 0;
    t.total = sums.total;
    if (has_power(sums.base)) {
      const float power = power_of(sums.base);
      t.lse = fmaf(power, kLn2, logf(sums.exponentials));
      t.power = power + log2f(sums.exponentials);
    } else {
      t.lse = sums.base + logf(sums.exponentials);
      t.power = 0.0f;
    }
    t.factor = scale * (1.0f + 2.0f * p.z_loss * t.lse);
    t.spread = scale * p.spread;
    t.of_target = scale * (1.0f - p.label_smoothing);
    if (threadIdx.x == 0 && place.rank == 0) {
      if (p.lses != nullptr) p.lses[token] = t.lse;
      if (!inside) store_loss(t, scale);
    }
    for (uint32_t c = share.again; c < share.count; c++) {
      const uint4 *stage = shared.stages[kept.stage];
      differentiate(stage, c, to, t);
      give_back(kept.stage);
      kept.advance();
    }
    for (uint32_t c = 0; c < share.again; c++) {
      shared.full[ring.stage].wait(ring.parity);
      const uint4 *stage = shared.stages[ring.stage];
      differentiate(stage, c, to, t);
      give_back(ring.stage);
      ring.advance();
    }
  }

  __device__ __forceinline__ void run() {
    uint32_t count = 0;
    for (;;) {
      shared.full[ring.stage].wait(ring.parity);
      const auto [target, token] = shared.turns[ring.stage];
      if (token >= p.tokens) return;
      const int64_t start = row_start(token, {p.dlogits_0, p.dlogits_1, p.dlogits_2}, p);
      uint4 *to = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p.dlogits) + start);
      if (target == p.ignore_index) {
        ignore(token, to);
        give_back(ring.stage);
        ring.advance();
      } else {
        take(token, target, to, count);
        count++;
      }
    }
  }
};

template <class T, int kBlocks>
__device__ __forceinline__ void cross_entropy(const Arguments &p) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  Shared &shared = *reinterpret_cast<Shared *>(dynamic);
  if (threadIdx.x < kStages) {
    shared.full[threadIdx.x].init(1);
    shared.empty[threadIdx.x].init(kWarps);
    if (threadIdx.x < 2) shared.told[threadIdx.x].init(1);
    if (threadIdx.x == 0) {
      shared.claim_told.init(1);
      shared.claim_read.init(1);
    }
    fence_mbarrier_init();
  }
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (threadIdx.x < kThreads) {
    Consumer<T, kBlocks>(p, shared).run();
  } else if (threadIdx.x == kThreads) {
    produce<kBlocks>(p, shared);
  }
}

}  // namespace unsloth

// Instantiates a kernel whose tokens have a block each, and one whose tokens have a cluster of two,
// and beside them what the host must know of them.
#define UNSLOTH_CROSS_ENTROPY_OF(name, type, blocks)                                              \
  extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(                    \
      unsloth::kThreads + 32, 1) name(const __grid_constant__ CrossEntropyRingArguments params) { \
    unsloth::let_next_kernel_start();                                                             \
    unsloth::await_previous_kernel();                                                             \
    unsloth::cross_entropy<type, blocks>(params);                                                 \
  }                                                                                               \
  extern "C" __device__ const CrossEntropyRingLaunch name##_launch = {                            \
      static_cast<int32_t>(unsloth::kDtype<type>),                                                \
      blocks,                                                                                     \
      unsloth::kThreads + 32,                                                                     \
      unsloth::kSharedBytes,                                                                      \
  };
#define UNSLOTH_CROSS_ENTROPY(dtype, type)                             \
  UNSLOTH_CROSS_ENTROPY_OF(cross_entropy_ring_tokens_##dtype, type, 1) \
  UNSLOTH_CROSS_ENTROPY_OF(cross_entropy_ring_pairs_##dtype, type, 2)
