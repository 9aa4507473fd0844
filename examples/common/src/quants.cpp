#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"

namespace llm {
namespace {

constexpr uint64_t kBlock = 32;  // elements per quantised block of every type read here

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
      {35, "TQ2_0"},  {39, "MXFP4"},
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
    case TensorType::kQ8_0:
      return {kBlock, 2 + kBlock};
  }
  return {0, 0};
}

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
      throw Error("quantising to 4 bits is not supported");
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
