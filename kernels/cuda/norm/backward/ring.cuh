// The gradients of RMSNorm and LayerNorm on Hopper: one pass over memory, whose rows pass through
// shared memory.
//
// A block fills a multiprocessor. Its threads stand in slots, each of which takes a row at a time
// and has a ring of stages, filled by bulk copies that its first thread starts: so many bytes are
// on their way that memory is busy however long a row is summed. Registers are left to the shares
// of the parameters' gradients, which a thread keeps for the columns that it has of every row; the
// slots' are added at the end, and `column_sums` adds the blocks'.
#pragma once

#include "common/gains.cuh"
#include "common/named_barrier.cuh"
#include "common/rows.cuh"
#include "common/tma.cuh"
#include "shares.cuh"

namespace unsloth {

constexpr int kWarps = kThreads / 32;
// Vectors of 16 bytes that a thread has of a row.
constexpr int kVectors = 4;
constexpr int kMaxStages = 8;
// When a slot's first thread refills the stage of the row before. What is best depends on how reads
// and writes of all blocks fall together, which only a measurement tells: as soon as all have left
// it, which they are waited for; before the next row's sums are added; or after, when nobody waits.
enum Refill : uint32_t { kAtOnce, kBeforeSums, kAfterSums, kAsTold };

// What lies before gains and stages.
struct Shared {
  // By slot and stage.
  Mbarrier full[kWarps * kMaxStages];
  Mbarrier empty[kWarps * kMaxStages];
  // Sums of warps: those of one row are read while those of the next are written.
  float means[2][1][kWarps];
  float sums[2][4][kWarps];
};

constexpr int kHeadBytes = (sizeof(Shared) + 127) / 128 * 128;

template <class T, bool kCentered, bool kResidual, Refill kRefill>
struct Backward {
  using V = Vector<T>;
  static constexpr int kWidth = V::kWidth;
  static constexpr int kTensors = 2 + kResidual;
  // The mean of f32 is known before distances from it are summed. Those of 16 bits are summed about
  // a pivot near the mean in the same pass, at a rounding that their own hides.
  static constexpr bool kPivots = kCentered && sizeof(T) == 2;
  static constexpr int kSums = 2 + kCentered + kPivots;

  const Arguments &p;
  Shared &shared;
  float *gains;  // in shared memory, of LayerNorm
  uint8_t *stages;
  int slot, lane;

  // LayerNorm's second share leaves no registers for gains.
  static constexpr bool kKeepsGains = !kCentered;
  float kept[kKeepsGains ? kVectors : 1][kWidth];
  float dweight[kVectors][kWidth] = {};
  float dbias[kCentered ? kVectors : 1][kWidth] = {};

  __device__ __forceinline__ Backward(const Arguments &p, uint8_t *dynamic)
      : p(p),
        shared(*reinterpret_cast<Shared *>(dynamic)),
        gains(reinterpret_cast<float *>(dynamic + kHeadBytes)),
        stages(dynamic + kHeadBytes + (kKeepsGains ? 0 : p.length * kWidth * sizeof(float))) {
    // The same in a warp, which the compiler does not know.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    slot = warp / (p.threads / 32);
    lane = threadIdx.x - slot * p.threads;
  }

  // Whether stages are filled again at this point of a row. Each of RMSNorm's kernels is compiled
  // for one point: with a choice at run time they were a tenth slower.
  __device__ __forceinline__ bool refills(Refill when) const {
    return kRefill == kAsTold ? p.refill == when : kRefill == when;
  }

  __device__ __forceinline__ uint32_t row_bytes() const { return p.length * 16; }
  __device__ __forceinline__ uint32_t num_slots() const { return kThreads / p.threads; }

  // Row i of this slot.
  __device__ __forceinline__ uint32_t row_of(uint32_t i) const {
    return blockIdx.x + gridDim.x * (slot + num_slots() * i);
  }

  __device__ __forceinline__ uint8_t *stage_at(uint32_t stage) const {
    return stages + (slot * p.stages + stage) * (kTensors * row_bytes());
  }

  // Starts copying row i, if there is one. By one thread of the slot.
  __device__ __forceinline__ void start(uint32_t i, uint32_t stage) {
    const uint32_t row = row_of(i);
    if (row >= p.rows) return;
    const auto from = [&](const void *tensor, const Strides &by) {
      return static_cast<const uint8_t *>(tensor) + row_start(row, by, p);
    };
    Mbarrier &full = shared.full[slot * kMaxStages + stage];
    const uint32_t bytes = row_bytes(), to = shared_address(stage_at(stage));
    full.arrive_expect(kTensors * bytes);
    bulk_load_by_thread(to, from(p.x, {p.x_0, p.x_1, p.x_2}), bytes, &full);
    bulk_load_by_thread(to + bytes, from(p.dout, {p.dout_0, p.dout_1, p.dout_2}), bytes, &full);
    if constexpr (kResidual) {
      const Strides by = {p.dresidual_0, p.dresidual_1, p.dresidual_2};
      bulk_load_by_thread(to + 2 * bytes, from(p.dresidual, by), bytes, &full);
    }
  }

  __device__ __forceinline__ void own_gains(uint32_t i, float (&to)[kWidth]) const {
    load_gains<T>(p.weight, p.weight_dtype, p.weight_offset, i, to);
  }

  // Calls `each(k, i)` for the vectors i that a thread has of a row.
  template <class Each>
  __device__ __forceinline__ void for_vectors(Each each) const {
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const uint32_t i = lane + k * p.threads;
      if (i < p.length) each(k, i);
    }
  }

  __device__ __forceinline__ void gains_of(int k, uint32_t i, float (&to)[kWidth]) const {
    if constexpr (kKeepsGains) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) to[j] = kept[k][j];
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        const float4 four = reinterpret_cast<const float4 *>(gains + i * kWidth)[j / 4];
        to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
      }
    }
  }

  // Sums over the slot's threads, on each of them; in one order whatever the warps.
  template <int N>
  __device__ __forceinline__ void reduce(float (&v)[N], float (*parts)[kWarps]) {
    constexpr uint32_t kAll = 0xffffffff;
    const uint32_t id = threadIdx.x % 32;
    // Each lane goes on with one of the sums: lane c of four has the c-th.
    float mine = v[0];
    if constexpr (N > 1) {
      const bool odd = id & 1;
      mine = (odd ? v[1] : v[0]) + __shfl_xor_sync(kAll, odd ? v[0] : v[1], 1);
    } else {
      mine += __shfl_xor_sync(kAll, mine, 1);
    }
    if constexpr (N > 2) {
      const bool upper = id & 2;
      float others;
      if constexpr (N > 3) {
        const bool odd = id & 1;
        others = (odd ? v[3] : v[2]) + __shfl_xor_sync(kAll, odd ? v[2] : v[3], 1);
      } else {
        others = v[2] + __shfl_xor_sync(kAll, v[2], 1);
      }
      mine = (upper ? others : mine) + __shfl_xor_sync(kAll, upper ? mine : others, 2);
    } else {
      mine += __shfl_xor_sync(kAll, mine, 2);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) mine += __shfl_xor_sync(kAll, mine, step);
    const uint32_t warps = p.threads / 32;
    if (warps == 1) {
      __syncwarp();
#pragma unroll
      for (int c = 0; c < N; c++) v[c] = __shfl_sync(kAll, mine, c);
      return;
    }
    const uint32_t warp = threadIdx.x / 32;
    if (id < N) parts[id][warp] = mine;
    named_barrier_sync(1 + slot, p.threads);
#pragma unroll
    for (int c = 0; c < N; c++) v[c] = parts[c][slot * warps + id % warps];
    for (uint32_t step = 1; step < warps; step *= 2) {
#pragma unroll
      for (int c = 0; c < N; c++) v[c] += __shfl_xor_sync(kAll, v[c], step);
    }
  }

  // Sums a row, stores its dx, and adds to the shares.
  template <class Refill>
  __device__ __forceinline__ void take(uint32_t row, uint32_t stage, uint32_t half, Refill refill) {
    const uint4 *xs = reinterpret_cast<const uint4 *>(stage_at(stage));
    const uint4 *douts = xs + p.length;
    const uint4 *residuals = douts + p.length;
    float mean = 0.0f;
    if constexpr (kPivots) {
      mean = pivot<T>(xs[0]);
    } else if constexpr (kCentered) {
      float sum[1] = {};
      for_vectors([&](int, uint32_t i) {
        float x[kWidth];
        V::unpack(xs[i], x);
#pragma unroll
        for (int j = 0; j < kWidth; j++) sum[0] += x[j];
      });
      reduce(sum, shared.means[half]);
      mean = sum[0] * p.inverse_length;
    }
    float sums[kSums] = {};
    for_vectors([&](int k, uint32_t i) {
      float x[kWidth], g[kWidth], w[kWidth];
      V::unpack(xs[i], x);
      V::unpack(douts[i], g);
      gains_of(k, i, w);
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float d = x[j] - mean, t = g[j] * w[j];
        sums[0] = fmaf(d, d, sums[0]);
        sums[1] = fmaf(t, d, sums[1]);
        if constexpr (kCentered) sums[2] += t;
        if constexpr (kPivots) sums[3] += d;
      }
    });
    if (refills(kBeforeSums)) refill();
    reduce(sums, shared.sums[half]);
    if (refills(kAfterSums)) refill();
    if constexpr (kPivots) {
      const float shift = sums[3] * p.inverse_length;
      mean += shift;
      sums[0] = fmaxf(fmaf(-shift, sums[3], sums[0]), 0.0f);
      sums[1] = fmaf(-shift, sums[2], sums[1]);
    }
    const float scale = rsqrtf(sums[0] * p.inverse_length + p.epsilon);
    const float back = -sums[1] * p.inverse_length * scale * scale * scale;
    const float gradient = kCentered ? sums[kCentered ? 2 : 0] * p.inverse_length * scale : 0.0f;
    const Strides by = {p.dx_0, p.dx_1, p.dx_2};
    uint4 *dx = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p.dx) + row_start(row, by, p));
    for_vectors([&](int k, uint32_t i) {
      float x[kWidth], g[kWidth], w[kWidth], y[kWidth];
      V::unpack(xs[i], x);
      V::unpack(douts[i], g);
      gains_of(k, i, w);
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float d = x[j] - mean, scaled = g[j] * scale;
        dweight[k][j] = fmaf(scaled, d, dweight[k][j]);
        if constexpr (kCentered) dbias[k][j] += g[j];
        y[j] = fmaf(scaled, w[j], kCentered ? fmaf(d, back, -gradient) : d * back);
      }
      if constexpr (kResidual) {
        float more[kWidth];
        V::unpack(residuals[i], more);
#pragma unroll
        for (int j = 0; j < kWidth; j++) y[j] += more[j];
      }
      dx[i] = V::packed(y);
    });
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x < kWarps * kMaxStages) {
      shared.full[threadIdx.x].init(1);
      shared.empty[threadIdx.x].init(p.threads / 32);
      fence_mbarrier_init();
    }
    __syncthreads();
    if (lane == 0) {
      for (uint32_t i = 0; i < p.stages; i++) start(i, i);
    }
    if constexpr (kKeepsGains) {
      for_vectors([&](int k, uint32_t i) { own_gains(i, kept[k]); });
    } else {
      for (uint32_t i = threadIdx.x; i < p.length; i += kThreads) {
        float w[kWidth];
        own_gains(i, w);
        store_vector(w, gains + i * kWidth);
      }
      __syncthreads();
    }
    uint32_t stage = 0, parity = 0, i = 0;
    for (uint32_t row = row_of(0); row < p.rows; row = row_of(++i)) {
      // Lets the row that comes next into the stage that the row before has left.
      const auto refill = [&] {
        if (lane != 0 || i == 0) return;
        const uint32_t before = (stage == 0 ? p.stages : stage) - 1;
        if (!refills(kAfterSums)) {
          shared.empty[slot * kMaxStages + before].wait(stage == 0 ? parity ^ 1 : parity);
        }
        start(i - 1 + p.stages, before);
      };
      if (refills(kAtOnce)) refill();
      shared.full[slot * kMaxStages + stage].wait(parity);
      take(row, stage, i & 1, refill);
      if (!refills(kAfterSums)) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) shared.empty[slot * kMaxStages + stage].arrive();
      }
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    const auto store = [&](const auto &share, void *to, uint32_t dtype) {
      store_shares(share, Sums{to, dtype, p.accumulate != 0}, p.length * kWidth, slot, num_slots(),
                   stages, [&](auto each) { for_vectors(each); });
    };
    store(dweight, p.dweights, p.dweights_dtype);
    if constexpr (kCentered) store(dbias, p.dbiases, p.dbiases_dtype);
  }
};

template <class T, bool kCentered, bool kResidual, Refill kRefill>
__device__ __forceinline__ void ring(const Arguments &p, uint8_t *dynamic) {
  Backward<T, kCentered, kResidual, kRefill>(p, dynamic).run();
}

}  // namespace unsloth

#define UNSLOTH_NORM_BACKWARD(name, type, centered, residual, refill)                              \
  UNSLOTH_NORM_BACKWARD_KERNEL(name, (unsloth::ring<type, centered, residual, unsloth::refill>),   \
                               type, centered, residual, unsloth::refill, 0, 1, unsloth::kVectors, \
                               unsloth::kMaxStages, unsloth::kHeadBytes)
