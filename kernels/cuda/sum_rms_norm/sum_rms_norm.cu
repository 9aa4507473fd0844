// Parts of a sum, which other ranks have sent, become the residual stream and its norm:
// out = rms_norm(residual + part 0 + part 1 + ..).
//
// A block has a row, and keeps the sum in registers. It adds in the order of the parts, in f32. It
// has read its row of every part when it writes, so that out may be one of them.
#include "common/block_sum.cuh"
#include "common/dependent_launch.cuh"
#include "common/gains.cuh"
#include "common/vector.cuh"
#include "contract.h"

#include "sum_rms_norm/arguments.h"

namespace unsloth {

using Arguments = SumRmsNormArguments;

// What a block has in registers: `lines` vectors of 16 bytes for each of its threads.
template <uint32_t threads, uint32_t lines>
struct Form {
  static constexpr uint32_t kThreads = threads, kWarps = threads / 32, kLines = lines;
};

// Vector i of rows of T that begin anywhere.
template <class T>
__device__ __forceinline__ uint4 load_anywhere(const void *from, uint64_t i) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
  float numbers[kWidth];
#pragma unroll
  for (uint32_t j = 0; j < kWidth; j++) {
    numbers[j] = static_cast<float>(static_cast<const T *>(from)[i * kWidth + j]);
  }
  return Vector<T>::packed(numbers);
}

template <class T>
__device__ __forceinline__ void store_anywhere(void *to, uint64_t i,
                                               const float (&numbers)[Vector<T>::kWidth]) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
#pragma unroll
  for (uint32_t j = 0; j < kWidth; j++) {
    static_cast<T *>(to)[i * kWidth + j] = static_cast<T>(numbers[j]);
  }
}

template <class T, class Form>
__device__ __forceinline__ void sum_rms_norm(const Arguments &p, float *of_warp) {
  constexpr uint32_t kWidth = Vector<T>::kWidth, kLines = Form::kLines;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * p.row_vectors;
  const auto vector_of = [](uint32_t i) { return i * Form::kThreads + threadIdx.x; };

  float sums[kLines][kWidth];
  uint4 residual[kLines];
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    residual[i] = {0, 0, 0, 0};
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) sums[i][j] = 0;
    if (p.residual == nullptr || vector_of(i) >= p.row_vectors) continue;
    const uint64_t at = first + vector_of(i);
    residual[i] = p.aligned != 0 ? static_cast<const uint4 *>(p.residual)[at]
                                 : load_anywhere<T>(p.residual, at);
  }
#pragma unroll 2
  for (uint32_t part = 0; part < p.num_parts; part++) {
    const uint4 *const row = p.parts + part * p.part_vectors + first;
#pragma unroll
    for (uint32_t i = 0; i < kLines; i++) {
      if (vector_of(i) >= p.row_vectors) continue;
      float numbers[kWidth];
      Vector<T>::unpack(row[vector_of(i)], numbers);
#pragma unroll
      for (uint32_t j = 0; j < kWidth; j++) sums[i][j] += numbers[j];
    }
  }
  float squares = 0;
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    float before[kWidth];
    Vector<T>::unpack(residual[i], before);
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) {
      sums[i][j] += before[j];
      squares += sums[i][j] * sums[i][j];
    }
  }
  const float mean =
      block_sum<Form::kWarps>(squares, of_warp) / static_cast<float>(p.row_vectors * kWidth);
  const float scale = rsqrtf(mean + p.epsilon);
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    if (vector_of(i) >= p.row_vectors) continue;
    const uint64_t at = first + vector_of(i);
    if (p.residual_out != nullptr) {
      if (p.aligned != 0) {
        static_cast<uint4 *>(p.residual_out)[at] = Vector<T>::packed(sums[i]);
      } else {
        store_anywhere<T>(p.residual_out, at, sums[i]);
      }
    }
    float gains[kWidth];
    load_gains<T>(p.weight, p.weight_dtype, p.weight_offset, vector_of(i), gains);
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) gains[j] *= sums[i][j] * scale;
    p.out[at] = Vector<T>::packed(gains);
  }
}

}  // namespace unsloth

#define UNSLOTH_SUM_RMS_NORM(name, type, ...)                                        \
  extern "C" __global__ void __launch_bounds__(unsloth::Form<__VA_ARGS__>::kThreads) \
      sum_rms_norm_##name(const __grid_constant__ SumRmsNormArguments params) {      \
    unsloth::let_next_kernel_start();                                                \
    extern __shared__ float of_warp[];                                               \
    unsloth::await_previous_kernel();                                                \
    unsloth::sum_rms_norm<type, unsloth::Form<__VA_ARGS__>>(params, of_warp);        \
  }                                                                                  \
  extern "C" __device__ const SumRmsNormLaunch sum_rms_norm_##name##_launch = {      \
      static_cast<int32_t>(unsloth::kDtype<type>),                                   \
      unsloth::Form<__VA_ARGS__>::kThreads * unsloth::Form<__VA_ARGS__>::kLines,     \
      unsloth::Form<__VA_ARGS__>::kThreads,                                          \
      unsloth::Form<__VA_ARGS__>::kWarps * sizeof(float),                            \
  };

// Rows of 2 KiB, 8 KiB and 32 KiB.
#define UNSLOTH_SUM_RMS_NORM_OF(name, type)        \
  UNSLOTH_SUM_RMS_NORM(name##_short, type, 128, 1) \
  UNSLOTH_SUM_RMS_NORM(name, type, 256, 2)         \
  UNSLOTH_SUM_RMS_NORM(name##_long, type, 512, 4)

UNSLOTH_SUM_RMS_NORM_OF(f32, float)
UNSLOTH_SUM_RMS_NORM_OF(f16, __half)
UNSLOTH_SUM_RMS_NORM_OF(bf16, __nv_bfloat16)
