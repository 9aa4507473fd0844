// The gains of a norm, which may be of any dtype, or absent.
#pragma once

#include "common/vector.cuh"

namespace unsloth {

// A gain as it is stored.
__device__ __forceinline__ float stored_gain(const void *weight, uint32_t dtype, uint32_t i) {
  if (dtype == static_cast<uint32_t>(Float::kF32)) {
    return static_cast<const float *>(weight)[i];
  }
  if (dtype == static_cast<uint32_t>(Float::kF16)) {
    return __half2float(static_cast<const __half *>(weight)[i]);
  }
  return __bfloat162float(static_cast<const __nv_bfloat16 *>(weight)[i]);
}

// The gains of vector i of rows of T, as f32: ones where the dtype is 0.
template <class T>
__device__ __forceinline__ void load_gains(const void *weight, uint32_t dtype, float offset,
                                           uint32_t i, float (&to)[Vector<T>::kWidth]) {
  constexpr int kWidth = Vector<T>::kWidth;
  const bool aligned = reinterpret_cast<uintptr_t>(weight) % 16 == 0;
  if (dtype == 0) {
#pragma unroll
    for (int j = 0; j < kWidth; j++) to[j] = 1.0f;
    return;
  }
  if (aligned && dtype == static_cast<uint32_t>(kDtype<T>)) {
    Vector<T>::unpack(static_cast<const uint4 *>(weight)[i], to);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; j++) to[j] = stored_gain(weight, dtype, i * kWidth + j);
  }
#pragma unroll
  for (int j = 0; j < kWidth; j++) to[j] += offset;
}

}  // namespace unsloth
