// The shares of the parameters' gradients, added up when a block has no more rows; and what else
// the kernels of rows in a ring and those of rows in registers have alike.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "norm/backward/arguments.h"

namespace unsloth {

using Arguments = NormBackwardRingArguments;

constexpr int kThreads = 512;
// What a block may have.
constexpr int kSharedBytes = 227 * 1024;

// The mean of a row's first vector. Whatever the row, it is so near the mean that distances from
// it lose less than their roundings: of n elements with variance v, eight of mean m have m² <= v
// n / 8.
template <class T>
__device__ __forceinline__ float pivot(const uint4 &words) {
  constexpr int kWidth = Vector<T>::kWidth;
  float first[kWidth], sum = 0.0f;
  Vector<T>::unpack(words, first);
#pragma unroll
  for (int j = 0; j < kWidth; j++) sum += first[j];
  return sum / kWidth;
}

template <int kWidth>
__device__ __forceinline__ void store_vector(const float (&from)[kWidth], float *to) {
#pragma unroll
  for (int j = 0; j < kWidth; j += 4) {
    *reinterpret_cast<float4 *>(to + j) = float4{from[j], from[j + 1], from[j + 2], from[j + 3]};
  }
}

// Where a parameter's sums go: the blocks' shares, or of one block the gradient itself.
struct Sums {
  void *to;
  uint32_t dtype;  // of the gradient; 0 for shares
  bool accumulate;

  // Of four columns from `column` on.
  __device__ __forceinline__ void store(uint32_t column, const float4 &sums) const {
    if (dtype == 0) {
      *reinterpret_cast<float4 *>(static_cast<float *>(to) + column) = sums;
      return;
    }
    // A gradient may begin anywhere.
    const float four[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (dtype == static_cast<uint32_t>(Float::kF32)) {
        float &at = static_cast<float *>(to)[column + j];
        at = accumulate ? four[j] + at : four[j];
      } else if (dtype == static_cast<uint32_t>(Float::kF16)) {
        static_cast<__half *>(to)[column + j] = __half(four[j]);
      } else {
        static_cast<__nv_bfloat16 *>(to)[column + j] = __nv_bfloat16(four[j]);
      }
    }
  }
};

// Adds the slots' shares, which pass through shared memory, and stores the sums. Calls
// `for_vectors(each)`, and that `each(k, i)` for the vectors i of a row that a thread has.
template <int kVectors, int kWidth, class ForVectors>
__device__ __forceinline__ void store_shares(const float (&share)[kVectors][kWidth], Sums sums,
                                             uint32_t columns, uint32_t slot, uint32_t num_slots,
                                             uint8_t *shared, ForVectors for_vectors) {
  if (sums.to == nullptr) return;
  if (sums.dtype == 0) {
    sums.to = static_cast<float *>(sums.to) + static_cast<size_t>(blockIdx.x) * columns;
  }
  if (num_slots == 1) {
    for_vectors([&](int k, uint32_t i) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 4) {
        const float *v = share[k] + j;
        sums.store(i * kWidth + j, float4{v[0], v[1], v[2], v[3]});
      }
    });
    return;
  }
  float *all = reinterpret_cast<float *>(shared);
  __syncthreads();
  for_vectors(
      [&](int k, uint32_t i) { store_vector(share[k], all + slot * columns + i * kWidth); });
  __syncthreads();
  for (uint32_t i = threadIdx.x * 4; i < columns; i += kThreads * 4) {
    float4 sum = *reinterpret_cast<const float4 *>(all + i);
    for (uint32_t other = 1; other < num_slots; other++) {
      const float4 more = *reinterpret_cast<const float4 *>(all + other * columns + i);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    sums.store(i, sum);
  }
}

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_NORM_BACKWARD_KERNEL(name, run, type, centered, residual, refill, group, rows, \
                                     vectors, stages, head_bytes)                              \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)                           \
      name(const __grid_constant__ NormBackwardRingArguments params) {                         \
    unsloth::let_next_kernel_start();                                                          \
    unsloth::await_previous_kernel();                                                          \
    extern __shared__ __align__(128) uint8_t dynamic[];                                        \
    run(params, dynamic);                                                                      \
  }                                                                                            \
  extern "C" __device__ const NormBackwardRingLaunch name##_launch = {                         \
      static_cast<int32_t>(unsloth::kDtype<type>),                                             \
      centered,                                                                                \
      residual,                                                                                \
      refill,                                                                                  \
      group,                                                                                   \
      rows,                                                                                    \
      vectors,                                                                                 \
      stages,                                                                                  \
      head_bytes,                                                                              \
      unsloth::kThreads,                                                                       \
      unsloth::kSharedBytes,                                                                   \
  };
