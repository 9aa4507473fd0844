// The tensor encodings of GGUF that are read here, and their decoding to f32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llm {

// Values are GGUF's (ggml_type).
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kI2_S = 36,  // of BitNet's files, not of GGUF; as its builds for x86 write it
  kQ2_0 = 42,
};

// How many consecutive elements one block holds and how many bytes it takes.
struct BlockLayout {
  uint64_t elements;
  uint64_t bytes;
};

// The name of any type that GGUF defines, readable or not; nullptr for an unknown number.
const char *tensor_type_name(uint32_t type);

// The layout of a type that is read here; {0, 0} for any other number.
BlockLayout block_layout(uint32_t type);

// Bytes behind a tensor's last block: those of I2_S begin with the f32 that scales all of it.
uint64_t tail_bytes(TensorType type);

// Decodes `elements` values (whole blocks) at `src`, which needs no alignment. Those of I2_S are
// codes, -1 to 1, which are still to be scaled.
void dequantize(TensorType type, const std::byte *src, uint64_t elements, float *dst);

// The inverse, for F32, F16, BF16 and Q8_0.
void encode(const float *src, uint64_t elements, TensorType type, std::byte *dst);

float f16_to_f32(uint16_t bits);
// Round to nearest, ties to even; overflow gives infinity.
uint16_t f32_to_f16(float value);
uint16_t f32_to_bf16(float value);
float bf16_to_f32(uint16_t bits);

}  // namespace llm
