// Codes of weights as numbers of 16 bits, which tensor cores multiply: exactly, for codes are small
// integers. The scale of a group multiplies its sum, which is f32.
//
// An f16 whose low bits are a code is a subnormal number, code 2^-24; tensor cores take these as
// they are, and products with any f16 are normal in f32. A bf16 with the exponent of 128 has seven
// bits for a code, which it adds to 128. What is too much, 128 or a format's zero, is taken off by
// products of the same x with a constant, which cost two instructions for 512 weights.
#pragma once

#include "common/blocks.cuh"
#include "common/math.cuh"
#include "common/mma.cuh"

namespace unsloth {

template <class T>
struct Decoded;

template <>
struct Decoded<__half> {
  static constexpr uint32_t kMagic = 0;
  static constexpr uint32_t kOne = 0x3c003c00;
  // By which a scale is multiplied; what codes have too much beside the format's zero.
  static constexpr float kUnit = 0x1p24f;
  static constexpr int kExcess = 0;

  // -number 2^-24, twice.
  static __device__ constexpr uint32_t minus(int number) {
    return (0x8000u | static_cast<uint32_t>(number)) * 0x10001u;
  }
};

template <>
struct Decoded<__nv_bfloat16> {
  static constexpr uint32_t kMagic = 0x43004300;
  static constexpr uint32_t kOne = 0x3f803f80;
  static constexpr float kUnit = 1;
  static constexpr int kExcess = 128;

  // -number, twice; from 128 to 255, of which it has all bits.
  static __device__ constexpr uint32_t minus(int number) {
    return (0xc300u | static_cast<uint32_t>(number - 128)) * 0x10001u;
  }
};

// Four neighbours of x as the right-hand side of products: 0 and 2, 1 and 3; of f32 in two parts,
// which have 16 bits of it.
template <class T>
struct Inputs {
  using Number = T;
  static constexpr int kParts = 1;
  uint32_t b[kParts][2];

  // `aligned`: to 8 bytes.
  __device__ __forceinline__ Inputs(const T *x, bool aligned) {
    const uint16_t *four = reinterpret_cast<const uint16_t *>(x);
    uint2 words;
    if (aligned) {
      words = *reinterpret_cast<const uint2 *>(four);
    } else {
      words = {four[0] | static_cast<uint32_t>(four[1]) << 16,
               four[2] | static_cast<uint32_t>(four[3]) << 16};
    }
    b[0][0] = __byte_perm(words.x, words.y, 0x5410);
    b[0][1] = __byte_perm(words.x, words.y, 0x7632);
  }
};

template <>
struct Inputs<float> {
  using Number = __nv_bfloat16;
  static constexpr int kParts = 2;
  uint32_t b[kParts][2];

  // `aligned`: to 16 bytes.
  __device__ __forceinline__ Inputs(const float *x, bool aligned) {
    float4 four;
    if (aligned) {
      four = *reinterpret_cast<const float4 *>(x);
    } else {
      four = {x[0], x[1], x[2], x[3]};
    }
    const float even[2] = {four.x, four.z}, odd[2] = {four.y, four.w};
    split(even, b[0][0], b[1][0]);
    split(odd, b[0][1], b[1][1]);
  }

  // The nearest, and the nearest to what that leaves. Of what is not finite nothing is.
  static __device__ __forceinline__ void split(const float (&x)[2], uint32_t &first,
                                               uint32_t &second) {
    first = pack<__nv_bfloat16>(x[0], x[1]);
    second = pack<__nv_bfloat16>(x[0] - __uint_as_float(first << 16),
                                 x[1] - __uint_as_float(first & 0xffff0000));
  }
};

// The products of a row's 16 or 32 neighbours with x, as sums of D: a lane's codes of rows g and
// g + 8, four neighbours to a word, and its numbers of x.
template <class X, Blocks kBlocks>
struct Products {
  using F = Format<kBlocks>;
  using T = typename Inputs<X>::Number;
  using D = Decoded<T>;
  // Eight bits of code, where there is room for seven.
  static constexpr bool kSigned = kBlocks == Blocks::kQ8_0 && D::kExcess != 0;
  static constexpr int kMinus = (kSigned ? 0 : F::kZero) + D::kExcess;

  // Of codes less their zero.
  float codes[4] = {};
  // Of x alone, where formats have offsets.
  float ones[4] = {};

  static __device__ __forceinline__ void fill(uint32_t (&a)[4], uint32_t word) {
    a[0] = a[1] = a[2] = a[3] = word;
  }

  // Neighbours 0 and 2, or 1 and 3, of four.
  static __device__ __forceinline__ uint32_t pair(uint32_t quad, int odd, uint32_t mask,
                                                  uint32_t magic) {
    return (quad >> 8 * odd & mask) | magic;
  }

  __device__ __forceinline__ void add(uint32_t first, uint32_t second, const Inputs<X> &x) {
    uint32_t a[4];
    if constexpr (kHasOffsets) {
      fill(a, D::kOne);
      multiply(a, x, ones);
    } else if constexpr (kMinus != 0) {
      fill(a, D::minus(kMinus));
      multiply(a, x, codes);
    }
    constexpr uint32_t kMask = kSigned ? 0x007f007f : 0x00ff00ff;
    if constexpr (kSigned) {
      // The codes' own bytes, signed: seven bits, and -128 where there is the eighth.
      first ^= 0x80808080, second ^= 0x80808080;
      constexpr uint32_t kSign = 0x00800080, kMinus128 = 0xc300 / 0x80;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        a[2 * i] = pair(first, i, kSign, 0) * kMinus128;
        a[2 * i + 1] = pair(second, i, kSign, 0) * kMinus128;
      }
      multiply(a, x, codes);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[2 * i] = pair(first, i, kMask, D::kMagic);
      a[2 * i + 1] = pair(second, i, kMask, D::kMagic);
    }
    multiply(a, x, codes);
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const Inputs<X> &x,
                                                  float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < Inputs<X>::kParts; i++) mma<T>(a, x.b[i], sums);
  }

  static constexpr bool kHasOffsets =
      kHasScalesOfScales<kBlocks> || kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1;

  // Scales the sums of rows g and g + 8, and adds them.
  __device__ __forceinline__ void scale(const Factors (&factors)[2], float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Factors &of_row = factors[i / 2];
      sums[i] = fmaf(of_row.scale * D::kUnit, codes[i], sums[i]);
      if constexpr (kHasOffsets) {
        const float offset = fmaf(-D::kExcess, of_row.scale, of_row.offset);
        sums[i] = fmaf(offset, ones[i], sums[i]);
      }
    }
  }
};

}  // namespace unsloth
