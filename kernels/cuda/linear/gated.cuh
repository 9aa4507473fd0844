// What becomes of the sums of a gate and of what it gates.
#pragma once

#include "linear/epilogue.cuh"

namespace unsloth {

// As if `dtype` had stored it.
__device__ __forceinline__ float rounded(float x, Float dtype) {
  if (dtype == Float::kF32) return x;
  return dtype == Float::kF16 ? unpack<__half>(pack<__half>(x, x)).x
                              : unpack<__nv_bfloat16>(pack<__nv_bfloat16>(x, x)).x;
}

// Stores what an activated gate, rounded as a product of its own would be, and `up` are multiplied.
// The arguments are as `finish` has them, the bias that of the gate, and the bias of `up`.
template <class Arguments>
__device__ __forceinline__ void finish_gated(const Arguments &p, Float dtype, uint32_t row,
                                             uint32_t column, float gate, float up) {
  if (p.bias_dtype != 0) gate += number_of(p.bias, p.bias_dtype, column);
  if (p.up_bias_dtype != 0) up += number_of(p.up_bias, p.up_bias_dtype, column);
  up *= activate(rounded(gate, dtype), p.epilogue);
  uint8_t *out = static_cast<uint8_t *>(p.out) + row * p.out_stride;
  if (dtype == Float::kF32) {
    reinterpret_cast<float *>(out)[column] = up;
  } else {
    const uint32_t pair = dtype == Float::kF16 ? pack<__half>(up, up) : pack<__nv_bfloat16>(up, up);
    reinterpret_cast<uint16_t *>(out)[column] = static_cast<uint16_t>(pair);
  }
}

}  // namespace unsloth
