// Single-instruction arithmetic and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace unsloth {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 2^x on the special function unit, subnormal results flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) on the special function unit.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x on the special function unit, to within one unit in the last place.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh on the special function unit, relative error about 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two floats to nearest even and packs them, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The two numbers of a pair.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2 &>(pair));
}

// Four codes of 8-bit floats (e4m3), a byte each, as pairs of f16; none is rounded. Since sm_89.
__device__ __forceinline__ void halves_of_e4m3(uint32_t codes, uint32_t (&pairs)[2]) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(codes));
}

// a - b of pairs.
template <class T>
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t subtract<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t difference;
  // By -1: sm_80 has sums of products only.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xbf80bf80), "r"(a));
  return difference;
}

template <>
__device__ __forceinline__ uint32_t subtract<__half>(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// a b of pairs.
template <class T>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t multiply<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t product;
  // With -0, which changes no sign: sm_80 has sums of products only.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
  return product;
}

template <>
__device__ __forceinline__ uint32_t multiply<__half>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// a b + c of pairs, rounded once.
template <class T>
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t multiply_add<__nv_bfloat16>(uint32_t a, uint32_t b,
                                                                uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

template <>
__device__ __forceinline__ uint32_t multiply_add<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

}  // namespace unsloth
