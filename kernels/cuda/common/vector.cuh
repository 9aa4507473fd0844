// 16 bytes of a tensor as numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.cuh"
#include "contract.h"

namespace unsloth {

template <class T>
constexpr Float kDtype = std::is_same_v<T, float>    ? Float::kF32
                         : std::is_same_v<T, __half> ? Float::kF16
                                                     : Float::kBf16;

template <class T>
struct Vector {
  static constexpr int kWidth = 16 / sizeof(T);

  // Minus infinities.
  static __device__ __forceinline__ uint4 least() {
    const uint32_t word = std::is_same_v<T, __half>          ? 0xfc00fc00
                          : std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80
                                                             : 0xff800000;
    return {word, word, word, word};
  }

  static __device__ __forceinline__ void unpack(const uint4 &words, float (&to)[kWidth]) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (std::is_same_v<T, float>) {
        to[i] = __uint_as_float(word[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        to[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word[i])));
        to[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word[i] >> 16)));
      } else {
        to[2 * i] = __uint_as_float(word[i] << 16);
        to[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000);
      }
    }
  }

  // The greatest magnitude of these and of others, as bits, in whose order magnitudes are; NaN is
  // above all. Of 16 bits there are two in a word, each of its places.
  static __device__ __forceinline__ uint32_t max_magnitudes(const uint4 &words, uint32_t others) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (std::is_same_v<T, float>) {
        others = max(others, word[i] & 0x7fffffff);
      } else {
        others = __vmaxu2(others, word[i] & 0x7fff7fff);
      }
    }
    return others;
  }

  // The greater one of `max_magnitudes`, as bits of an f32.
  static __device__ __forceinline__ uint32_t as_f32(uint32_t magnitudes) {
    if constexpr (std::is_same_v<T, float>) return magnitudes;
    const uint32_t greater = max(magnitudes >> 16, magnitudes & 0xffff);
    if constexpr (std::is_same_v<T, __half>) {
      return __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(greater))));
    } else {
      return greater << 16;
    }
  }

  // Rounded to nearest even.
  static __device__ __forceinline__ uint4 packed(const float (&from)[kWidth]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (std::is_same_v<T, float>) {
        word[i] = __float_as_uint(from[i]);
      } else {
        word[i] = pack<T>(from[2 * i], from[2 * i + 1]);
      }
    }
    return {word[0], word[1], word[2], word[3]};
  }
};

}  // namespace unsloth
