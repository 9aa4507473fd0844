// Cross-entropy with its gradient on Hopper: logits stay in shared memory from their sum to their
// gradient, so that memory is read once and written once.
//
// A block fills a multiprocessor and takes a token at a time. Its last warp, the producer, copies
// chunks of the token's logits into a ring of stages; the other threads sum them and, once the sum
// is known, store the gradient and give the stages back, into which the next token's logits come
// meanwhile. Of logits that are longer than the ring the first chunks are given back once they are
// summed, and are copied again behind the others: they are likely to be in the cache.
#pragma once

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

// What logits come to: the greatest, the sum of exponentials of the distances from it, their sum.
struct Sums {
  float peak, exponentials, total;
};

struct alignas(128) Shared {
  uint4 stages[kStages][kChunk];
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
  // Of warps: those of a token are read while those of the next are written.
  Sums sums[2][kWarps];
};

// What a block may have.
constexpr int kSharedBytes = 227 * 1024;
static_assert(sizeof(Shared) <= kSharedBytes);

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * kLog2E); }

__device__ __forceinline__ int64_t target_of(uint32_t token, const Arguments &p) {
  const int64_t at = row_start(token, {p.targets_0, p.targets_1, p.targets_2}, p);
  const uint8_t *from = static_cast<const uint8_t *>(p.targets) + at;
  return p.wide_targets ? *reinterpret_cast<const int64_t *>(from)
                        : *reinterpret_cast<const int32_t *>(from);
}

// A token's chunks. The first `again` are copied twice.
struct Chunks {
  uint32_t length, count, again;

  __device__ __forceinline__ explicit Chunks(uint32_t length)
      : length(length),
        count((length + kChunk - 1) / kChunk),
        again(count > kStages ? count - kStages : 0) {}

  // Vectors of one.
  __device__ __forceinline__ uint32_t vectors(uint32_t chunk) const {
    return min(length - chunk * kChunk, static_cast<uint32_t>(kChunk));
  }
};

// By one thread.
__device__ __forceinline__ void produce(const Arguments &p, Shared &shared) {
  const Chunks chunks(p.length);
  Ring<kStages> ring;
  const auto copy = [&](const uint4 *from, uint32_t chunk) {
    const uint32_t bytes = chunks.vectors(chunk) * 16;
    shared.empty[ring.stage].wait(ring.parity ^ 1);
    shared.full[ring.stage].arrive_expect(bytes);
    bulk_load_by_thread(shared_address(shared.stages[ring.stage]), from + chunk * kChunk, bytes,
                        &shared.full[ring.stage]);
    ring.advance();
  };
  int64_t next = target_of(blockIdx.x, p);
  for (uint32_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t target = next;
    if (token + gridDim.x < p.tokens) next = target_of(token + gridDim.x, p);
    if (target == p.ignore_index) continue;
    const int64_t start = row_start(token, {p.logits_0, p.logits_1, p.logits_2}, p);
    const auto *from = reinterpret_cast<const uint4 *>(static_cast<uint8_t *>(p.logits) + start);
    for (uint32_t c = 0; c < chunks.count; c++) copy(from, c);
    for (uint32_t c = 0; c < chunks.again; c++) copy(from, c);
  }
}

template <class T>
struct Consumer {
  using V = Vector<T>;
  static constexpr int kWidth = V::kWidth;

  const Arguments &p;
  Shared &shared;
  Chunks chunks;
  Ring<kStages> ring = {};
  float scale_of_all = 1.0f;

  __device__ __forceinline__ Consumer(const Arguments &p, Shared &shared)
      : p(p), shared(shared), chunks(p.length) {
    if (p.dloss != nullptr) scale_of_all *= *p.dloss;
    if (p.denominator != nullptr) scale_of_all /= *p.denominator;
  }

  __device__ __forceinline__ void give_back(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
  }

  // The sums over a token's logits, in all threads; in one order whatever the grid.
  __device__ __forceinline__ Sums sum(uint32_t half) {
    // Below every logit but minus infinity, from which it has a distance.
    float peak = -3.402823466e38f, exponentials = 0.0f, total = 0.0f;
    for (uint32_t c = 0; c < chunks.count; c++) {
      shared.full[ring.stage].wait(ring.parity);
      const uint32_t vectors = chunks.vectors(c);
#pragma unroll
      for (int k = 0; k < kVectors; k++) {
        const uint32_t i = threadIdx.x + k * kThreads;
        if (i >= vectors) break;
        float s[kWidth];
        V::unpack(shared.stages[ring.stage][i], s);
        float next = peak;
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          next = fmaxf(next, s[j]);
          total += s[j];
        }
        exponentials *= exp_approx(peak - next);
#pragma unroll
        for (int j = 0; j < kWidth; j++) exponentials += exp_approx(s[j] - next);
        peak = next;
      }
      if (c < chunks.again) give_back(ring.stage);
      ring.advance();
    }
    const Sums of_warp = all_lanes({peak, exponentials, total});
    if (threadIdx.x % 32 == 0) shared.sums[half][threadIdx.x / 32] = of_warp;
    named_barrier_sync(1, kThreads);
    return all_lanes(shared.sums[half][threadIdx.x % kWarps], kWarps);
  }

  // The sums of `lanes` neighbours, in each of them.
  static __device__ __forceinline__ Sums all_lanes(Sums mine, int lanes = 32) {
    constexpr uint32_t kAll = 0xffffffff;
    float peak = mine.peak;
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(kAll, peak, step));
    }
    float exponentials = mine.exponentials * exp_approx(mine.peak - peak);
    float total = mine.total;
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
      exponentials += __shfl_xor_sync(kAll, exponentials, step);
      total += __shfl_xor_sync(kAll, total, step);
    }
    return {peak, exponentials, total};
  }

  // Stores the gradient of a chunk, and the token's loss if its target is there.
  __device__ __forceinline__ void differentiate(const uint4 *stage, uint32_t chunk, uint4 *to,
                                                uint32_t token, int64_t target, const Sums &sums,
                                                float lse, float factor, float scale) {
    const uint32_t vectors = chunks.vectors(chunk);
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const uint32_t i = threadIdx.x + k * kThreads;
      if (i >= vectors) break;
      float s[kWidth], g[kWidth];
      V::unpack(stage[i], s);
      const uint32_t at = chunk * kChunk + i;
#pragma unroll
      for (int j = 0; j < kWidth; j++) g[j] = fmaf(exp_approx(s[j] - lse), factor, -p.spread);
      if (at == target / kWidth) {
        const int column = target % kWidth;
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          if (j == column) {
            g[j] -= 1.0f - p.label_smoothing;
            store_loss(token, s[j], sums, lse);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; j++) g[j] *= scale;
      to[at] = V::packed(g);
    }
  }

  __device__ __forceinline__ void store_loss(uint32_t token, float of_target, const Sums &sums,
                                             float lse) {
    if (p.losses == nullptr) return;
    // Logits may be minus infinity where no probability is spread over them.
    const float smooth = p.spread > 0.0f ? p.spread * sums.total : 0.0f;
    p.losses[token] = lse - (1.0f - p.label_smoothing) * of_target - smooth + p.z_loss * lse * lse;
  }

  __device__ __forceinline__ void ignore(uint32_t token, uint4 *to) {
    for (uint32_t i = threadIdx.x; i < p.length; i += kThreads) to[i] = {0, 0, 0, 0};
    if (threadIdx.x != 0) return;
    if (p.losses != nullptr) p.losses[token] = 0.0f;
    if (p.lses != nullptr) p.lses[token] = 0.0f;
  }

  __device__ __forceinline__ void take(uint32_t token, int64_t target, uint4 *to, uint32_t half) {
    Ring<kStages> kept = ring;
    for (uint32_t c = 0; c < chunks.again; c++) kept.advance();
    const Sums sums = sum(half);
    const float lse = sums.peak + logf(sums.exponentials);
    const float factor = 1.0f + 2.0f * p.z_loss * lse;
    const bool inside = target >= 0 && target < static_cast<int64_t>(p.length) * kWidth;
    const float nan = __uint_as_float(0x7fffffff);
    const float scale = inside ? scale_of_all : nan;
    if (threadIdx.x == 0) {
      if (p.lses != nullptr) p.lses[token] = lse;
      if (!inside) store_loss(token, nan, sums, lse);
    }
    for (uint32_t c = chunks.again; c < chunks.count; c++) {
      const uint4 *stage = shared.stages[kept.stage];
      differentiate(stage, c, to, token, target, sums, lse, factor, scale);
      give_back(kept.stage);
      kept.advance();
    }
    for (uint32_t c = 0; c < chunks.again; c++) {
      shared.full[ring.stage].wait(ring.parity);
      const uint4 *stage = shared.stages[ring.stage];
      differentiate(stage, c, to, token, target, sums, lse, factor, scale);
      give_back(ring.stage);
      ring.advance();
    }
  }

  __device__ __forceinline__ void run() {
    int64_t next = target_of(blockIdx.x, p);
    uint32_t half = 0;
    for (uint32_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
      const int64_t target = next;
      if (token + gridDim.x < p.tokens) next = target_of(token + gridDim.x, p);
      const int64_t start = row_start(token, {p.dlogits_0, p.dlogits_1, p.dlogits_2}, p);
      uint4 *to = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p.dlogits) + start);
      if (target == p.ignore_index) {
        ignore(token, to);
      } else {
        take(token, target, to, half);
        half ^= 1;
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void cross_entropy(const Arguments &p) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  Shared &shared = *reinterpret_cast<Shared *>(dynamic);
  if (threadIdx.x < kStages) {
    shared.full[threadIdx.x].init(1);
    shared.empty[threadIdx.x].init(kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kThreads) {
    Consumer<T>(p, shared).run();
  } else if (threadIdx.x == kThreads) {
    produce(p, shared);
  }
}

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_CROSS_ENTROPY(name, type)                                 \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads + 32, 1) \
      name(const __grid_constant__ CrossEntropyRingArguments params) {    \
    unsloth::cross_entropy<type>(params);                                 \
  }                                                                       \
  extern "C" __device__ const CrossEntropyRingLaunch name##_launch = {    \
      static_cast<int32_t>(unsloth::kDtype<type>),                        \
      unsloth::kThreads + 32,                                             \
      unsloth::kSharedBytes,                                              \
  };
