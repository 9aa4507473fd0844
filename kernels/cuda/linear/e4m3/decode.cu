// The weight's codes, scaled and rounded to the dtype of x: what many rows are multiplied by. A
// thread takes a line of codes.
#include "common/dependent_launch.cuh"
#include "common/e4m3.cuh"
#include "common/vector.cuh"
#include "linear/e4m3/arguments.h"

namespace unsloth {

constexpr uint32_t kThreads = 256, kLine = 16;

// Grid: rows, each of as many blocks as its lines fill.
template <class T>
__device__ __forceinline__ void decode(const LinearE4m3Arguments &p) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
  const uint32_t of_row = (p.in_features + kThreads * kLine - 1) / (kThreads * kLine);
  const uint32_t row = blockIdx.x / of_row;
  const uint32_t at = ((blockIdx.x - row * of_row) * kThreads + threadIdx.x) * kLine;
  if (at >= p.in_features) return;
  const uint8_t *from = p.weight + row * p.weight_stride + at;
  T *to = reinterpret_cast<T *>(static_cast<uint8_t *>(p.out) + row * p.out_stride) + at;
  const float scale =
      p.weight_scale == nullptr ? 1.0f : p.weight_scale[(p.first + row) / p.rows_of_scale];
  const uint32_t there = min(p.in_features - at, kLine);
  float numbers[kLine] = {};
  if (p.aligned && there == kLine) {
    const uint4 line = __ldcs(reinterpret_cast<const uint4 *>(from));
    const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
    for (uint32_t i = 0; i < kLine; i++) {
      numbers[i] = from_e4m3(words[i / 4] >> i % 4 * 8 & 255) * scale;
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kLine; i++) {
      if (i < there) numbers[i] = from_e4m3(from[i]) * scale;
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kLine; i += kWidth) {
    float part[kWidth];
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) part[j] = numbers[i + j];
    const uint4 packed = Vector<T>::packed(part);
    if (p.x_aligned && there == kLine) {
      *reinterpret_cast<uint4 *>(to + i) = packed;
      continue;
    }
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) {
      if (i + j >= there) continue;
      if constexpr (sizeof(T) == 4) {
        to[i + j] = part[j];
      } else {
        const uint32_t bits = words[j / 2] >> j % 2 * 16;
        *reinterpret_cast<uint16_t *>(to + i + j) = static_cast<uint16_t>(bits);
      }
    }
  }
}

}  // namespace unsloth

#define UNSLOTH_LINEAR_E4M3_DECODE(name, type)                                 \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads)              \
      linear_e4m3_##name(const __grid_constant__ LinearE4m3Arguments params) { \
    unsloth::let_next_kernel_start();                                          \
    unsloth::await_previous_kernel();                                          \
    unsloth::decode<type>(params);                                             \
  }                                                                            \
  extern "C" __device__ const LinearE4m3Launch linear_e4m3_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                             \
      0,                                                                       \
      0,                                                                       \
      unsloth::kThreads * unsloth::kLine,                                      \
      0,                                                                       \
      unsloth::kThreads,                                                       \
      0,                                                                       \
  };

UNSLOTH_LINEAR_E4M3_DECODE(decode_f32, float)
UNSLOTH_LINEAR_E4M3_DECODE(decode_f16, __half)
UNSLOTH_LINEAR_E4M3_DECODE(decode_bf16, __nv_bfloat16)
