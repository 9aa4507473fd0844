// 8-bit floats of 4 exponent bits with bias 7 and 3 of mantissa, without infinities.
#pragma once

#include <type_traits>

#include "common/math.cuh"

namespace unsloth {

// Whether the device converts codes by itself.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif

// What makes `pairs_of_e4m3` the numbers that the codes stand for: f16's bias is 8 greater.
template <class T>
constexpr float kUnitOfE4m3 = std::is_same_v<T, __half> && !kConvertsE4m3 ? 256 : 1;

// Four codes, a byte each, as numbers of T; none is rounded. Where the device does not convert
// codes, NaN comes out as 480, as if it were none.
//
// Integer instructions are issued at half the rate of others, and reading a matrix at the speed of
// memory leaves time for few of them: conversions by the device are two for four codes, and for
// bf16 two more and four of floats.
template <class T>
__device__ __forceinline__ void pairs_of_e4m3(uint32_t codes, uint32_t (&pairs)[2]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kConvertsE4m3) {
    halves_of_e4m3(codes, pairs);
    if constexpr (!kHalf) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 two = unpack<__half>(pairs[i]);
        pairs[i] = __byte_perm(__float_as_uint(two.x), __float_as_uint(two.y), 0x7632);
      }
    }
  } else {
    constexpr uint32_t kWhich[2] = {0x1404, 0x3424};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // The upper byte of each number, of which the sign stays where it is.
      const uint32_t upper = __byte_perm(codes, 0, kWhich[i]);
      const uint32_t pair = (upper & 0x7f007f00) >> (kHalf ? 1 : 4) | (upper & 0x80008000);
      // bf16's bias is 120 greater. A sum of such numbers would not be in f32's range.
      pairs[i] = kHalf ? pair : multiply<__nv_bfloat16>(pair, 0x7b807b80);
    }
  }
}

// Has the upper bit of each of four codes that are NaN and that `pairs_of_e4m3` makes numbers.
__device__ __forceinline__ uint32_t lost_nan_of_e4m3(uint32_t codes) {
  return kConvertsE4m3 ? 0 : (codes & 0x7f7f7f7f) + 0x01010101;
}
constexpr uint32_t kNanOfE4m3 = 0x80808080;

// The number of a code.
__device__ __forceinline__ float from_e4m3(uint32_t code) {
  if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
  const uint32_t half = (code & 0x7f) << 7 | (code & 0x80) << 8;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * 256;
}

// The nearest code, ties to even; what is beyond 448 becomes that.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
  constexpr uint32_t kBias = (127 - 7) << 23, kLeast = (127 - 6) << 23;
  // A number whose unit in the last place is that of subnormal codes, 2^-9.
  constexpr uint32_t kSubnormal = (127 + 14) << 23;
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
  const uint32_t odd = magnitude >> 20 & 1;
  const uint32_t normal = (magnitude - kBias + 0x7ffff + odd) >> 20;
  const float sum = __uint_as_float(magnitude) + __uint_as_float(kSubnormal);
  const uint32_t subnormal = __float_as_uint(sum) - kSubnormal;
  const uint32_t finite = min(magnitude < kLeast ? subnormal : normal, 0x7eu);
  return (magnitude > 0x7f800000 ? 0x7f : finite) | (bits >> 24 & 0x80);
}

}  // namespace unsloth
