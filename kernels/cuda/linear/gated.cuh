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
  store_number(static_cast<uint8_t *>(p.out) + row * p.out_stride, dtype, column, up);
}

// The bits of residual and biases of a column. Kernels load them before the sums of the column are
// there, and use them once these are.
struct OfColumn {
  // Residual or gate, unless a gate is one of the sums.
  uint32_t other, bias, up_bias;
};

template <class Arguments>
__device__ __forceinline__ void load_biases(const Arguments &p, uint32_t column, OfColumn &to) {
  to.bias = bits_of(p.bias, p.bias_dtype, column);
  to.up_bias = bits_of(p.up_bias, p.up_bias_dtype, column);
}

// `residual`: of the row.
template <class Arguments>
__device__ __forceinline__ uint32_t other_of(const Arguments &p, const void *residual,
                                             uint32_t column) {
  const bool has_other = p.gated == 0 && p.epilogue != static_cast<uint32_t>(Epilogue::kStore);
  return has_other ? bits_of(residual, p.dtype, column) : 0;
}

// What is to be stored in the dtype of the output.
template <class Arguments>
__device__ __forceinline__ float finished(const Arguments &p, float sum, float up,
                                          const OfColumn &of_column) {
  if (p.bias_dtype != 0) sum += number_of_bits(of_column.bias, p.bias_dtype);
  if (p.gated != 0) {
    if (p.up_bias_dtype != 0) up += number_of_bits(of_column.up_bias, p.up_bias_dtype);
    return up * activate(rounded(sum, static_cast<Float>(p.dtype)), p.epilogue);
  }
  if (p.epilogue == static_cast<uint32_t>(Epilogue::kStore)) return sum;
  return with_other(sum, number_of_bits(of_column.other, p.dtype), p.epilogue);
}

}  // namespace unsloth
