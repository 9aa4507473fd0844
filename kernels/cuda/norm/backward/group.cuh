// The gradients of RMSNorm and LayerNorm on Hopper for rows of 16 bits and middle lengths: as
// ring.cuh has it, but a slot takes kRows rows at a time and keeps them in registers from the first
// pass to the second. A thread has few columns of many rows, so that it loads each element once,
// and rows share the waits of a sum.
#pragma once

#include "common/gains.cuh"
#include "common/named_barrier.cuh"
#include "common/rows.cuh"
#include "common/tma.cuh"
#include "shares.cuh"

namespace unsloth {

// Rows at a time, and vectors of 16 bytes that a thread has of each.
constexpr int kRows = 2;
constexpr int kVectors = 2;
constexpr int kMaxStages = 3;

// Sums over the warp of kCount values, a power of two: lane l is left with value l % kCount.
template <int kCount, int kBit = 1>
__device__ __forceinline__ float warp_sums(const float (&v)[kCount]) {
  constexpr uint32_t kAll = 0xffffffff;
  if constexpr (kCount == 1) {
    float mine = v[0];
#pragma unroll
    for (int step = kBit; step < 32; step *= 2) mine += __shfl_xor_sync(kAll, mine, step);
    return mine;
  } else {
    const bool upper = threadIdx.x & kBit;
    float left[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
      const float keep = upper ? v[2 * i + 1] : v[2 * i], give = upper ? v[2 * i] : v[2 * i + 1];
      left[i] = keep + __shfl_xor_sync(kAll, give, kBit);
    }
    return warp_sums<kCount / 2, 2 * kBit>(left);
  }
}

// Of kGroup threads to a row.
template <class T, bool kCentered, bool kResidual, int kGroup>
struct Group {
  using V = Vector<T>;
  static constexpr int kWidth = V::kWidth;
  static constexpr int kTensors = 2 + kResidual;
  static constexpr int kSlots = kThreads / kGroup, kWarps = kGroup / 32;
  // LayerNorm's are about a pivot near the mean, as in ring.cuh.
  static constexpr int kSums = kCentered ? 4 : 2, kCount = kSums * kRows;
  // Lanes that add a sum's parts, and a stride of sums at which they do not meet in a bank.
  static constexpr int kLanes = 32 / kCount, kStride = kWarps + kLanes;

  // What a row's second pass needs.
  struct alignas(16) Means {
    float mean, scale, back, gradient;
  };

  // What lies before the stages.
  struct Shared {
    // By slot and stage.
    Mbarrier full[kSlots * kMaxStages];
    // Warps' parts of sums: those of one step are read while those of the next are written.
    float parts[2][kSlots][kCount * kStride];
    // By warp.
    Means means[kThreads / 32][kRows];
  };
  static constexpr int kHeadBytes = (sizeof(Shared) + 127) / 128 * 128;

  const Arguments &p;
  Shared &shared;
  uint8_t *stages;
  int slot, lane;
  uint32_t units;  // slots of all blocks

  float gains[kVectors][kWidth];
  float dweight[kVectors][kWidth] = {};
  float dbias[kCentered ? kVectors : 1][kWidth] = {};

  __device__ __forceinline__ Group(const Arguments &p, uint8_t *dynamic)
      : p(p), shared(*reinterpret_cast<Shared *>(dynamic)), stages(dynamic + kHeadBytes) {
    // The same in a warp, which the compiler does not know.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    slot = warp / kWarps;
    lane = threadIdx.x - slot * kGroup;
    units = gridDim.x * kSlots;
  }

  __device__ __forceinline__ uint32_t row_bytes() const { return p.length * 16; }

  // Row r of a step, if below p.rows; behind one that is not none is. Blocks get rows before slots
  // do, and slots before any has two, so that few rows are taken at once.
  __device__ __forceinline__ uint32_t row_of(uint32_t step, uint32_t r) const {
    return blockIdx.x + gridDim.x * slot + units * (r + kRows * step);
  }

  __device__ __forceinline__ uint8_t *stage_at(uint32_t stage) const {
    return stages + (slot * p.stages + stage) * (kRows * kTensors * row_bytes());
  }

  // Starts copying a step's rows: tensor by tensor, a row a lane. By the slot's first warp.
  __device__ __forceinline__ void start(uint32_t step, uint32_t stage) {
    if (row_of(step, 0) >= p.rows) return;
    const uint32_t id = threadIdx.x % 32, bytes = row_bytes();
    Mbarrier &full = shared.full[slot * kMaxStages + stage];
    if (id == 0) {
      uint32_t rows = 0;
#pragma unroll
      for (int r = 0; r < kRows; r++) rows += row_of(step, r) < p.rows;
      full.arrive_expect(rows * kTensors * bytes);
    }
    __syncwarp();
    const uint32_t r = id % kRows, tensor = id / kRows, row = row_of(step, r);
    if (tensor >= kTensors || row >= p.rows) return;
    const void *base = p.x;
    Strides by = {p.x_0, p.x_1, p.x_2};
    if (tensor == 1) {
      base = p.dout;
      by = {p.dout_0, p.dout_1, p.dout_2};
    }
    if (kResidual && tensor == 2) {
      base = p.dresidual;
      by = {p.dresidual_0, p.dresidual_1, p.dresidual_2};
    }
    const uint8_t *from = static_cast<const uint8_t *>(base) + row_start(row, by, p);
    bulk_load_by_thread(shared_address(stage_at(stage)) + id * bytes, from, bytes, &full);
  }

  // Calls `each(k, i)` for the vectors i that a thread has of a row.
  template <class Each>
  __device__ __forceinline__ void for_vectors(Each each) const {
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const uint32_t i = lane + k * kGroup;
      if (i < p.length) each(k, i);
    }
  }

  // Adds a row's part of the sums.
  __device__ __forceinline__ void add(const uint4 (&x_words)[kVectors],
                                      const uint4 (&g_words)[kVectors], float pivot, float *sums) {
    for_vectors([&](int k, uint32_t) {
      float x[kWidth], g[kWidth];
      V::unpack(x_words[k], x);
      V::unpack(g_words[k], g);
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float d = kCentered ? x[j] - pivot : x[j], t = g[j] * gains[k][j];
        sums[0] = fmaf(d, d, sums[0]);
        sums[1] = fmaf(t, d, sums[1]);
        if constexpr (kCentered) {
          sums[2] += t;
          sums[3] += d;
        }
      }
    });
  }

  // Sums over the slot's threads, in one order whatever the warps: lane l comes away with value l /
  // kLanes.
  __device__ __forceinline__ void leave_parts(float mine, uint32_t half) {
    const uint32_t id = threadIdx.x % 32;
    if (id < kCount) shared.parts[half][slot][id * kStride + lane / 32] = mine;
  }
  __device__ __forceinline__ float sum_of_parts(uint32_t half) const {
    const uint32_t id = threadIdx.x % 32, c = id / kLanes, j = id % kLanes;
    const float *parts = shared.parts[half][slot] + c * kStride;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += kLanes) {
      if (kWarps >= kLanes || warp + j < kWarps) sum += parts[warp + j];
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    return sum;
  }

  // The rows' means, of which each lane works out those that its sum belongs to.
  __device__ __forceinline__ const Means *means_of(float sum, const float (&pivots)[kRows]) {
    const uint32_t row = threadIdx.x % 32 / (kLanes * kSums);
    float s[kSums], pivot = pivots[0];
#pragma unroll
    for (int n = 0; n < kSums; n++) {
      s[n] = __shfl_sync(0xffffffff, sum, (row * kSums + n) * kLanes);
    }
#pragma unroll
    for (int r = 1; r < kRows; r++) pivot = row == r ? pivots[r] : pivot;
    Means m = {pivot, 0.0f, 0.0f, 0.0f};
    if constexpr (kCentered) {
      const float shift = s[3] * p.inverse_length;
      m.mean += shift;
      s[0] = fmaxf(fmaf(-shift, s[3], s[0]), 0.0f);
      s[1] = fmaf(-shift, s[2], s[1]);
    }
    m.scale = rsqrtf(s[0] * p.inverse_length + p.epsilon);
    m.back = -s[1] * p.inverse_length * m.scale * m.scale * m.scale;
    if constexpr (kCentered) m.gradient = s[2] * p.inverse_length * m.scale;
    Means *to = shared.means[threadIdx.x / 32];
    if (threadIdx.x % (kLanes * kSums) == 0) to[row] = m;
    __syncwarp();
    return to;
  }

  // Sums a step's rows, stores their dx, and adds to the shares.
  __device__ __forceinline__ void take(uint32_t step, uint32_t stage) {
    const uint4 *at = reinterpret_cast<const uint4 *>(stage_at(stage));
    uint4 xs[kRows][kVectors], gs[kRows][kVectors], residuals[kResidual ? kRows : 1][kVectors];
    float pivots[kRows] = {}, sums[kCount] = {};
    uint32_t there = 0;
#pragma unroll
    for (int r = 0; r < kRows; r++) there += row_of(step, r) < p.rows;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r >= there) continue;
      for_vectors([&](int k, uint32_t i) {
        xs[r][k] = at[r * p.length + i];
        gs[r][k] = at[(kRows + r) * p.length + i];
        if constexpr (kResidual) residuals[r][k] = at[(2 * kRows + r) * p.length + i];
      });
      if constexpr (kCentered) pivots[r] = pivot<T>(at[r * p.length]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r < there) add(xs[r], gs[r], pivots[r], sums + r * kSums);
    }
    leave_parts(warp_sums<kCount>(sums), step & 1);
    named_barrier_sync(1 + slot, kGroup);
    // All have the rows in registers: the stage can be filled again.
    if (lane < 32) start(step + p.stages, stage);
    const Means *means = means_of(sum_of_parts(step & 1), pivots);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r >= there) continue;
      const Means m = means[r];
      const Strides by = {p.dx_0, p.dx_1, p.dx_2};
      uint4 *dx = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p.dx) +
                                            row_start(row_of(step, r), by, p));
      for_vectors([&](int k, uint32_t i) {
        float x[kWidth], g[kWidth], y[kWidth];
        V::unpack(xs[r][k], x);
        V::unpack(gs[r][k], g);
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          const float d = kCentered ? x[j] - m.mean : x[j], scaled = g[j] * m.scale;
          dweight[k][j] = fmaf(scaled, d, dweight[k][j]);
          if constexpr (kCentered) dbias[k][j] += g[j];
          y[j] = fmaf(scaled, gains[k][j], kCentered ? fmaf(d, m.back, -m.gradient) : d * m.back);
        }
        if constexpr (kResidual) {
          float more[kWidth];
          V::unpack(residuals[r][k], more);
#pragma unroll
          for (int j = 0; j < kWidth; j++) y[j] += more[j];
        }
        dx[i] = V::packed(y);
      });
    }
    // Means are read before those of the next step are written.
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x < kSlots * kMaxStages) {
      shared.full[threadIdx.x].init(1);
      fence_mbarrier_init();
    }
    __syncthreads();
    if (lane < 32) {
      for (uint32_t i = 0; i < p.stages; i++) start(i, i);
    }
    for_vectors([&](int k, uint32_t i) {
      load_gains<T>(p.weight, p.weight_dtype, p.weight_offset, i, gains[k]);
    });
    uint32_t stage = 0, parity = 0;
    for (uint32_t step = 0; row_of(step, 0) < p.rows; step++) {
      shared.full[slot * kMaxStages + stage].wait(parity);
      take(step, stage);
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    const auto store = [&](const auto &share, void *to, uint32_t dtype) {
      store_shares(share, Sums{to, dtype, p.accumulate != 0}, p.length * kWidth, slot, kSlots,
                   stages, [&](auto each) { for_vectors(each); });
    };
    store(dweight, p.dweights, p.dweights_dtype);
    if constexpr (kCentered) store(dbias, p.dbiases, p.dbiases_dtype);
  }
};

template <class T, bool kCentered, bool kResidual, int kGroup>
__device__ __forceinline__ void group(const Arguments &p, uint8_t *dynamic) {
  Group<T, kCentered, kResidual, kGroup>(p, dynamic).run();
}

}  // namespace unsloth

// For rows of up to `threads` times two vectors.
#define UNSLOTH_NORM_BACKWARD_GROUP(name, type, centered, residual, threads)                      \
  UNSLOTH_NORM_BACKWARD_KERNEL(norm_backward_ring_group_##name##_##threads,                       \
                               (unsloth::group<type, centered, residual, threads>), type,         \
                               centered, residual, 0, threads, unsloth::kRows, unsloth::kVectors, \
                               unsloth::kMaxStages,                                               \
                               (unsloth::Group<type, centered, residual, threads>::kHeadBytes))
