// What becomes of a product's sums: bias, residual or gate, and rounding to the output's dtype.
#pragma once

#include "common/math.cuh"
#include "common/vector.cuh"

namespace unsloth {

// The bits of a number as it lies; 0 where there is none (dtype 0).
__device__ __forceinline__ uint32_t bits_of(const void *of, uint32_t dtype, uint32_t at) {
  if (dtype == 0) return 0;
  if (dtype == static_cast<uint32_t>(Float::kF32)) return static_cast<const uint32_t *>(of)[at];
  return static_cast<const uint16_t *>(of)[at];
}

__device__ __forceinline__ float number_of_bits(uint32_t bits, uint32_t dtype) {
  if (dtype == static_cast<uint32_t>(Float::kF16)) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
  return __uint_as_float(dtype == static_cast<uint32_t>(Float::kBf16) ? bits << 16 : bits);
}

__device__ __forceinline__ float number_of(const void *of, uint32_t dtype, uint32_t at) {
  return number_of_bits(bits_of(of, dtype, at), dtype);
}

__device__ __forceinline__ void store_number(void *to, Float dtype, uint32_t at, float x) {
  if (dtype == Float::kF32) {
    static_cast<float *>(to)[at] = x;
  } else {
    const uint32_t pair = dtype == Float::kF16 ? pack<__half>(x, x) : pack<__nv_bfloat16>(x, x);
    static_cast<uint16_t *>(to)[at] = static_cast<uint16_t>(pair);
  }
}

// 1 / (1 + exp(-x)), without an overflow.
__device__ __forceinline__ float logistic(float x) {
  const float e = __expf(-fabsf(x));
  return (x < 0 ? e : 1.0f) / (1 + e);
}

__device__ __forceinline__ float activate(float x, uint32_t epilogue) {
  if (epilogue == static_cast<uint32_t>(Epilogue::kGateSilu)) return x * logistic(x);
  if (epilogue == static_cast<uint32_t>(Epilogue::kGateGelu)) return x * normcdff(x);
  if (epilogue == static_cast<uint32_t>(Epilogue::kGateReluSquared)) {
    const float positive = x < 0 ? 0 : x;  // NaN stays
    return positive * positive;
  }
  // (1 + tanh(u)) / 2 is the logistic function of 2 u; the factor is 2 sqrt(2 / pi).
  return x * logistic(1.595769f * fmaf(0.044715f * x * x, x, x));
}

// A sum with a residual, or times an activated gate.
__device__ __forceinline__ float with_other(float sum, float other, uint32_t epilogue) {
  if (epilogue == static_cast<uint32_t>(Epilogue::kAdd)) return sum + other;
  return sum * activate(other, epilogue);
}

// Stores a sum in `dtype`, which residual or gate have too. The arguments are those of a family of
// products: bias, residual, out, their strides in bytes, and an epilogue.
template <class Arguments>
__device__ __forceinline__ void finish(const Arguments &p, Float dtype, uint32_t row,
                                       uint32_t column, float sum) {
  if (p.bias_dtype != 0) sum += number_of(p.bias, p.bias_dtype, column);
  if (p.epilogue != static_cast<uint32_t>(Epilogue::kStore)) {
    const uint8_t *others = static_cast<const uint8_t *>(p.residual) + row * p.residual_stride;
    const float other = number_of(others, static_cast<uint32_t>(dtype), column);
    sum = with_other(sum, other, p.epilogue);
  }
  store_number(static_cast<uint8_t *>(p.out) + row * p.out_stride, dtype, column, sum);
}

}  // namespace unsloth
