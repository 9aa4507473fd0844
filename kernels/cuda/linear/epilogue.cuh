// What becomes of a product's sums: bias, residual or gate, and rounding to the output's dtype.
#pragma once

#include "common/math.cuh"
#include "common/vector.cuh"

namespace unsloth {

__device__ __forceinline__ float number_of(const void *of, uint32_t dtype, uint32_t at) {
  if (dtype == static_cast<uint32_t>(Float::kF32)) return static_cast<const float *>(of)[at];
  const uint16_t bits = static_cast<const uint16_t *>(of)[at];
  return dtype == static_cast<uint32_t>(Float::kF16)
             ? __half2float(__ushort_as_half(bits))
             : __uint_as_float(static_cast<uint32_t>(bits) << 16);
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

// Stores a sum in `dtype`, which residual or gate have too. The arguments are those of a family of
// products: bias, residual, out, their strides in bytes, and an epilogue.
template <class Arguments>
__device__ __forceinline__ void finish(const Arguments &p, Float dtype, uint32_t row,
                                       uint32_t column, float sum) {
  if (p.bias_dtype != 0) sum += number_of(p.bias, p.bias_dtype, column);
  if (p.epilogue != static_cast<uint32_t>(Epilogue::kStore)) {
    const uint8_t *others = static_cast<const uint8_t *>(p.residual) + row * p.residual_stride;
    const float other = number_of(others, static_cast<uint32_t>(dtype), column);
    if (p.epilogue == static_cast<uint32_t>(Epilogue::kAdd)) {
      sum += other;
    } else {
      sum *= activate(other, p.epilogue);
    }
  }
  uint8_t *out = static_cast<uint8_t *>(p.out) + row * p.out_stride;
  if (dtype == Float::kF32) {
    reinterpret_cast<float *>(out)[column] = sum;
  } else {
    const uint32_t pair =
        dtype == Float::kF16 ? pack<__half>(sum, sum) : pack<__nv_bfloat16>(sum, sum);
    reinterpret_cast<uint16_t *>(out)[column] = static_cast<uint16_t>(pair);
  }
}

}  // namespace unsloth
