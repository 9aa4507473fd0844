#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"

namespace llm {
namespace {

constexpr uint64_t kBlock = 32;        // elements that share a scale, but for Q6_K
constexpr uint64_t kSuperblock = 256;  // elements of a block of the K and TQ types
constexpr uint64_t kLongBlock = 64;    // elements of a block of Q2_0
constexpr uint64_t kCodes = 128;       // elements of a block of I2_S

template <typename T>
T load(const std::byte *src) {
  T value;
  std::memcpy(&value, src, sizeof(T));
  return value;
}

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// A block of Q4_0 or Q4_1 keeps element i in the low nibble of byte i, element i + 16 in the high
// one.
void unpack_nibbles(const std::byte *quants, float scale, float offset, float *dst) {
  for (uint64_t i = 0; i < kBlock / 2; ++i) {
    const auto pair = std::to_integer<unsigned>(quants[i]);
    dst[i] = static_cast<float>(pair & 0x0F) * scale + offset;
    dst[i + kBlock / 2] = static_cast<float>(pair >> 4) * scale + offset;
  }
}

unsigned byte_at(const std::byte *src, uint64_t i) { return std::to_integer<unsigned>(src[i]); }

// The same with a fifth bit each: element i's is bit i of four bytes.
void unpack_five_bits(const std::byte *bits, const std::byte *quants, float scale, float offset,
                      float *dst) {
  for (uint64_t i = 0; i < kBlock; ++i) {
    const unsigned pair = byte_at(quants, i % (kBlock / 2));
    const unsigned low = i < kBlock / 2 ? pair & 0x0F : pair >> 4;
    const unsigned fifth = byte_at(bits, i / 8) >> (i % 8) & 1U;
    dst[i] = static_cast<float>(low | fifth << 4) * scale + offset;
  }
}

// A block of Q4_K or Q5_K: factors of scales and of offsets, eight of both in 6 bits, fifth bits
// (none for Q4_K), low bits.
void unpack_superblock(const std::byte *src, const std::byte *fifth, const std::byte *quants,
                       float *dst) {
  const float scale = f16_to_f32(load<uint16_t>(src));
  const float offset = f16_to_f32(load<uint16_t>(src + 2));
  const std::byte *packed = src + 4;
  for (uint64_t group = 0; group < 8; ++group) {
    unsigned s = 0;
    unsigned o = 0;
    if (group < 4) {
      s = byte_at(packed, group) & 63U;
      o = byte_at(packed, group + 4) & 63U;
    } else {
      const unsigned both = byte_at(packed, group + 4);
      s = (both & 15U) | byte_at(packed, group - 4) >> 6 << 4;
      o = both >> 4 | byte_at(packed, group) >> 6 << 4;
    }
    const float group_scale = scale * static_cast<float>(s);
    const float group_offset = offset * static_cast<float>(o);
    for (uint64_t i = 0; i < kBlock; ++i) {
      const unsigned pair = byte_at(quants, group / 2 * kBlock + i);
      unsigned quant = group % 2 == 0 ? pair & 15U : pair >> 4;
      if (fifth != nullptr) quant |= (byte_at(fifth, i) >> group & 1U) << 4;
      dst[group * kBlock + i] = static_cast<float>(quant) * group_scale - group_offset;
    }
  }
}

// A block of Q6_K: low halves, two high bits, a scale for each 16, their factor.
void unpack_q6_k(const std::byte *src, float *dst) {
  const std::byte *low = src;
  const std::byte *high = src + 128;
  const std::byte *scales = src + 192;
  const float factor = f16_to_f32(load<uint16_t>(src + 208));
  // Sixteen elements share a scale and shifts: the compiler makes vectors of their loop.
  for (uint64_t group = 0; group < 16; ++group, dst += 16) {
    const uint64_t half = group / 8;
    const uint64_t quarter = group % 8 / 2;
    const uint64_t start = group % 2 * 16;
    const std::byte *pairs = low + 64 * half + quarter % 2 * 32 + start;
    const std::byte *tops = high + 32 * half + start;
    const float scale = factor * static_cast<float>(load<int8_t>(scales + group));
    for (uint64_t i = 0; i < 16; ++i) {
      const unsigned nibble = byte_at(pairs, i) >> (quarter / 2 * 4) & 15U;
      const unsigned quant = nibble | (byte_at(tops, i) >> (quarter * 2) & 3U) << 4;
      dst[i] = scale * (static_cast<float>(quant) - 32.0F);
    }
  }
}

// A block of TQ1_0: five codes in each of 48 bytes, which are a fraction of 256 whose digits of
// base 3 they are; four in each of 4 bytes; their factor.
void unpack_tq1_0(const std::byte *src, float *dst) {
  static constexpr unsigned kPowers[] = {1, 3, 9, 27, 81};
  const float scale = f16_to_f32(load<uint16_t>(src + 52));
  const auto digit = [src](uint64_t byte, uint64_t n) {
    return static_cast<float>((byte_at(src, byte) * kPowers[n] & 255U) * 3 >> 8);
  };
  for (uint64_t i = 0; i < 160; ++i) dst[i] = scale * (digit(i % 32, i / 32) - 1.0F);
  for (uint64_t i = 0; i < 80; ++i) dst[160 + i] = scale * (digit(32 + i % 16, i / 16) - 1.0F);
  for (uint64_t i = 0; i < 16; ++i) dst[240 + i] = scale * (digit(48 + i % 4, i / 4) - 1.0F);
}

// A block of TQ2_0: in each half four codes in each of 32 bytes, 32 apart; their factor.
void unpack_tq2_0(const std::byte *src, float *dst) {
  const float scale = f16_to_f32(load<uint16_t>(src + 64));
  for (uint64_t group = 0; group < kSuperblock / 32; ++group, dst += 32) {
    const std::byte *packed = src + group / 4 * 32;
    for (uint64_t i = 0; i < 32; ++i) {
      dst[i] = scale * (static_cast<float>(byte_at(packed, i) >> (group % 4 * 2) & 3U) - 1.0F);
    }
  }
}

// A block of I2_S: four codes in each of 32 bytes, 32 apart, the first in the high bits.
void unpack_i2_s(const std::byte *src, float *dst) {
  for (uint64_t i = 0; i < kCodes; ++i) {
    const unsigned packed = byte_at(src, i % 32);
    dst[i] = static_cast<float>(packed >> (6 - 2 * (i / 32)) & 3U) - 1.0F;
  }
}

// The greatest magnitude becomes 127; the scale is f16, the quotients are of the unrounded one, as
// in llama.cpp.
void encode_q8_0(const float *src, std::byte *dst) {
  float greatest = 0;
  for (uint64_t i = 0; i < kBlock; ++i) greatest = std::max(greatest, std::fabs(src[i]));
  const float scale = greatest / 127.0F;
  const float inverse = scale > 0 ? 1.0F / scale : 0.0F;
  const uint16_t half = f32_to_f16(scale);
  std::memcpy(dst, &half, sizeof(half));
  for (uint64_t i = 0; i < kBlock; ++i) {
    const auto quant = static_cast<int8_t>(std::round(src[i] * inverse));
    std::memcpy(dst + 2 + i, &quant, 1);
  }
}

}  // namespace

const char *tensor_type_name(uint32_t type) {
  struct Name {
    uint32_t type;
    const char *name;
  };
  static constexpr Name kNames[] = {
      {0, "F32"},     {1, "F16"},      {2, "Q4_0"},   {3, "Q4_1"},    {6, "Q5_0"},
      {7, "Q5_1"},    {8, "Q8_0"},     {9, "Q8_1"},   {10, "Q2_K"},   {11, "Q3_K"},
      {12, "Q4_K"},   {13, "Q5_K"},    {14, "Q6_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"},
      {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},
      {22, "IQ2_S"},  {23, "IQ4_XS"},  {24, "I8"},    {25, "I16"},    {26, "I32"},
      {27, "I64"},    {28, "F64"},     {29, "IQ1_M"}, {30, "BF16"},   {34, "TQ1_0"},
      {35, "TQ2_0"},  {36, "I2_S"},    {39, "MXFP4"}, {42, "Q2_0"},
  };
  for (const Name &known : kNames) {
    if (known.type == type) return known.name;
  }
  return nullptr;
}

BlockLayout block_layout(uint32_t type) {
  switch (static_cast<TensorType>(type)) {
    case TensorType::kF32:
      return {1, 4};
    case TensorType::kF16:
      return {1, 2};
    case TensorType::kBF16:
      return {1, 2};
    case TensorType::kQ4_0:
      return {kBlock, 2 + kBlock / 2};
    case TensorType::kQ4_1:
      return {kBlock, 4 + kBlock / 2};
    case TensorType::kQ5_0:
      return {kBlock, 6 + kBlock / 2};
    case TensorType::kQ5_1:
      return {kBlock, 8 + kBlock / 2};
    case TensorType::kQ8_0:
      return {kBlock, 2 + kBlock};
    case TensorType::kQ4_K:
      return {kSuperblock, 144};
    case TensorType::kQ5_K:
      return {kSuperblock, 176};
    case TensorType::kQ6_K:
      return {kSuperblock, 210};
    case TensorType::kTQ1_0:
      return {kSuperblock, 54};
    case TensorType::kTQ2_0:
      return {kSuperblock, 66};
    case TensorType::kQ2_0:
      return {kLongBlock, 18};
    case TensorType::kI2_S:
      return {kCodes, kCodes / 4};
  }
  return {0, 0};
}

uint64_t tail_bytes(TensorType type) { return type == TensorType::kI2_S ? 32 : 0; }

void dequantize(TensorType type, const std::byte *src, uint64_t elements, float *dst) {
  const BlockLayout layout = block_layout(static_cast<uint32_t>(type));
  switch (type) {
    case TensorType::kF32:
      std::memcpy(dst, src, elements * sizeof(float));
      return;
    case TensorType::kF16:
      for (uint64_t i = 0; i < elements; ++i) dst[i] = f16_to_f32(load<uint16_t>(src + 2 * i));
      return;
    case TensorType::kBF16:
      for (uint64_t i = 0; i < elements; ++i) {
        dst[i] = bf16_to_f32(load<uint16_t>(src + 2 * i));
      }
      return;
    case TensorType::kQ4_0:
      for (uint64_t i = 0; i < elements; i += kBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        unpack_nibbles(src + 2, scale, -8.0F * scale, dst + i);
      }
      return;
    case TensorType::kQ4_1:
      for (uint64_t i = 0; i < elements; i += kBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        const float minimum = f16_to_f32(load<uint16_t>(src + 2));
        unpack_nibbles(src + 4, scale, minimum, dst + i);
      }
      return;
    case TensorType::kQ5_0:
      for (uint64_t i = 0; i < elements; i += kBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        unpack_five_bits(src + 2, src + 6, scale, -16.0F * scale, dst + i);
      }
      return;
    case TensorType::kQ5_1:
      for (uint64_t i = 0; i < elements; i += kBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        const float minimum = f16_to_f32(load<uint16_t>(src + 2));
        unpack_five_bits(src + 4, src + 8, scale, minimum, dst + i);
      }
      return;
    case TensorType::kQ4_K:
      for (uint64_t i = 0; i < elements; i += kSuperblock, src += layout.bytes) {
        unpack_superblock(src, nullptr, src + 16, dst + i);
      }
      return;
    case TensorType::kQ5_K:
      for (uint64_t i = 0; i < elements; i += kSuperblock, src += layout.bytes) {
        unpack_superblock(src, src + 16, src + 48, dst + i);
      }
      return;
    case TensorType::kQ6_K:
      for (uint64_t i = 0; i < elements; i += kSuperblock, src += layout.bytes) {
        unpack_q6_k(src, dst + i);
      }
      return;
    case TensorType::kTQ1_0:
      for (uint64_t i = 0; i < elements; i += kSuperblock, src += layout.bytes) {
        unpack_tq1_0(src, dst + i);
      }
      return;
    case TensorType::kTQ2_0:
      for (uint64_t i = 0; i < elements; i += kSuperblock, src += layout.bytes) {
        unpack_tq2_0(src, dst + i);
      }
      return;
    case TensorType::kQ2_0:
      for (uint64_t i = 0; i < elements; i += kLongBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        for (uint64_t j = 0; j < kLongBlock; ++j) {
          const unsigned code = byte_at(src, 2 + j / 4) >> (2 * (j % 4)) & 3U;
          dst[i + j] = scale * (static_cast<float>(code) - 1.0F);
        }
      }
      return;
    case TensorType::kI2_S:
      for (uint64_t i = 0; i < elements; i += kCodes, src += layout.bytes) {
        unpack_i2_s(src, dst + i);
      }
      return;
    case TensorType::kQ8_0:
      for (uint64_t i = 0; i < elements; i += kBlock, src += layout.bytes) {
        const float scale = f16_to_f32(load<uint16_t>(src));
        for (uint64_t j = 0; j < kBlock; ++j) {
          dst[i + j] = scale * static_cast<float>(load<int8_t>(src + 2 + j));
        }
      }
      return;
  }
}

void encode(const float *src, uint64_t elements, TensorType type, std::byte *dst) {
  const auto store = [dst](uint64_t i, uint16_t half) {
    std::memcpy(dst + 2 * i, &half, sizeof(half));
  };
  switch (type) {
    case TensorType::kF32:
      std::memcpy(dst, src, elements * sizeof(float));
      return;
    case TensorType::kF16:
      for (uint64_t i = 0; i < elements; ++i) store(i, f32_to_f16(src[i]));
      return;
    case TensorType::kBF16:
      for (uint64_t i = 0; i < elements; ++i) store(i, f32_to_bf16(src[i]));
      return;
    case TensorType::kQ8_0:
      for (uint64_t i = 0; i < elements; i += kBlock, dst += 2 + kBlock) {
        encode_q8_0(src + i, dst);
      }
      return;
    case TensorType::kQ4_0:
    case TensorType::kQ4_1:
    case TensorType::kQ5_0:
    case TensorType::kQ5_1:
    case TensorType::kQ4_K:
    case TensorType::kQ5_K:
    case TensorType::kQ6_K:
    case TensorType::kTQ1_0:
    case TensorType::kTQ2_0:
    case TensorType::kQ2_0:
    case TensorType::kI2_S:
      throw Error("quantising to less than 8 bits is not supported");
  }
}

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1FU;
  const uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 0x1F ? 0xFFU : exponent + (127 - 15);
  return bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

uint16_t f32_to_f16(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;   // NaN
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // rounds to 65536 or above
  if (magnitude < 0x38800000U) {                        // below 2^-14: subnormal in f16
    // Adding 0.5 puts the last bit of a subnormal f16 (2^-24) at the last bit of the f32, so the
    // addition itself rounds to nearest even.
    const float shifted = bit_cast<float>(magnitude) + 0.5F;
    return sign | static_cast<uint16_t>(bit_cast<uint32_t>(shifted) - 0x3F000000U);
  }
  const uint32_t odd = (magnitude >> 13) & 1U;
  const uint32_t rounded = magnitude - ((127U - 15U) << 23) + 0xFFFU + odd;
  return sign | static_cast<uint16_t>(rounded >> 13);
}

uint16_t f32_to_bf16(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16) | 0x40U;
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

float bf16_to_f32(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace llm
