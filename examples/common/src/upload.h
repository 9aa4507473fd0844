// Tensors of a file brought to a device, and what the library is told of the model's rotation.
#pragma once

#include <cstdint>
#include <vector>

#include "config.h"
#include "device.h"
#include "gguf.h"

namespace llm {

class ProgressBar;

// Where the next tensor of one piece of memory may begin.
inline uint64_t aligned(uint64_t offset) {
  constexpr uint64_t kAlignment = 256;
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

// One tensor after the other, decoded and written as `dtype` at `offset` of `memory`: a view of
// them as one tensor, whose first size is the sum of theirs. Their other sizes are the same. `bar`
// may be absent.
unsloth_tensor upload_tensors(const std::vector<const GgufTensor *> &sources, unsloth_dtype dtype,
                              Buffer *memory, uint64_t offset, ProgressBar *bar);

// The same of tensors of one type, not decoded.
unsloth_tensor upload_as_they_are(const std::vector<const GgufTensor *> &sources, Buffer *memory,
                                  uint64_t offset, ProgressBar *bar);

// A matrix of I2_S, in the library's order, with what says its scale: both are read by whatever
// multiplies by the view. It takes `tail_bytes` more than the tensor's blocks.
unsloth_tensor upload_ternary(const Context &context, const GgufTensor &source, Buffer *memory,
                              uint64_t offset, unsloth_quantization *quantization,
                              ProgressBar *bar);

// `factors` are those of the file, absent (rank 0) where it has none.
unsloth_rotation rotation(const ModelConfig &config, unsloth_tensor factors);

}  // namespace llm
