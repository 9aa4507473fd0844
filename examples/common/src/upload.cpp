#include "upload.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "progress.h"
#include "quants.h"

namespace llm {

namespace {

// A view without rows, of the shape of the first tensor otherwise.
unsloth_tensor empty_view(const GgufTensor &first, unsloth_dtype dtype, void *data) {
  unsloth_tensor view = {};
  view.data = data;
  view.dtype = dtype;
  for (const uint64_t size : first.shape) view.shape[view.rank++] = static_cast<int64_t>(size);
  view.shape[0] = 0;
  return view;
}

bool holds_floats(const GgufTensor &source) {
  return source.type == TensorType::kF32 || source.type == TensorType::kF16 ||
         source.type == TensorType::kBF16;
}

// Floats of a file as others, at `offset` of `memory`: the device rounds them, some at a time.
void upload_floats(const GgufTensor &source, unsloth_dtype dtype, Buffer *memory, uint64_t offset) {
  constexpr uint64_t kChunk = 1 << 22;  // elements
  const Context &context = memory->context();
  const unsloth_dtype from = dtype_of_tensor(source.type);
  const size_t element = element_size(from);
  if (from == dtype) {
    memory->upload(source.data, source.bytes, offset);
    return;
  }
  Buffer staged(context, std::min(kChunk, source.elements) * element);
  for (uint64_t start = 0; start < source.elements; start += kChunk) {
    const uint64_t count = std::min(kChunk, source.elements - start);
    staged.upload(source.data + start * element, count * element);
    auto cast = unsloth::make<unsloth_cast_params>();
    cast.x = unsloth::tensor(staged.data(), from, {count});
    cast.out = unsloth::tensor(static_cast<char *>(memory->data()) + offset, dtype, {count});
    check(unsloth_cast_forward(context.get(), &cast, context.stream()));
    offset += count * element_size(dtype);
  }
  context.synchronize();  // what is staged is read until then
}

}  // namespace

unsloth_tensor upload_as_they_are(const std::vector<const GgufTensor *> &sources, Buffer *memory,
                                  uint64_t offset, ProgressBar *bar) {
  const unsloth_dtype dtype = dtype_of_tensor(sources[0]->type);
  unsloth_tensor view =
      empty_view(*sources[0], dtype, static_cast<char *>(memory->data()) + offset);
  for (const GgufTensor *source : sources) {
    memory->upload(source->data, source->bytes, offset);
    offset += source->bytes;
    if (bar != nullptr) bar->advance(source->bytes);
    view.shape[0] += static_cast<int64_t>(source->shape[0]);
  }
  return view;
}

unsloth_tensor upload_ternary(const Context &context, const GgufTensor &source, Buffer *memory,
                              uint64_t offset, unsloth_quantization *quantization,
                              ProgressBar *bar) {
  // The scale goes behind the codes, as in the file, and stays there.
  std::array<std::byte, 32> tail = {};
  std::memcpy(tail.data(), &source.scale, sizeof(source.scale));
  memory->upload(source.data, source.bytes, offset);
  memory->upload(tail.data(), tail.size(), offset + source.bytes);
  if (bar != nullptr) bar->advance(source.bytes);
  char *const codes = static_cast<char *>(memory->data()) + offset;
  auto repack = unsloth::make<unsloth_weight_repack_params>();
  repack.format = UNSLOTH_WEIGHT_REPACK_I2_S;
  repack.packed = unsloth::tensor(codes, UNSLOTH_DTYPE_I8, {source.bytes + tail.size()});
  repack.out = unsloth::tensor(codes, UNSLOTH_DTYPE_TERNARY, {source.shape[0], source.shape[1]});
  check(unsloth_weight_repack_forward(context.get(), &repack, context.stream()));
  *quantization = UNSLOTH_QUANTIZATION_INIT;
  quantization->scale = unsloth::tensor(codes + source.bytes, UNSLOTH_DTYPE_F32, {1});
  unsloth_tensor view = repack.out;
  view.quantization = quantization;
  return view;
}

unsloth_tensor upload_tensors(const std::vector<const GgufTensor *> &sources, unsloth_dtype dtype,
                              Buffer *memory, uint64_t offset, ProgressBar *bar) {
  constexpr uint64_t kChunk = 1 << 18;  // elements decoded at a time: whole blocks of every type
  const size_t element = element_size(dtype);
  unsloth_tensor view =
      empty_view(*sources[0], dtype, static_cast<char *>(memory->data()) + offset);
  std::vector<float> values;
  std::vector<std::byte> encoded;
  for (const GgufTensor *source : sources) {
    view.shape[0] += static_cast<int64_t>(source->shape[0]);
    if (holds_floats(*source)) {
      upload_floats(*source, dtype, memory, offset);
      offset += source->elements * element;
      if (bar != nullptr) bar->advance(source->bytes);
      continue;
    }
    const BlockLayout layout = block_layout(static_cast<uint32_t>(source->type));
    values.resize(std::min(kChunk, source->elements));
    encoded.resize(values.size() * element);
    for (uint64_t start = 0; start < source->elements; start += kChunk) {
      const uint64_t count = std::min(kChunk, source->elements - start);
      const uint64_t source_bytes = count / layout.elements * layout.bytes;
      source->decode(start, count, values.data());
      encode(values.data(), count, tensor_type(dtype), encoded.data());
      memory->upload(encoded.data(), count * element, offset);
      offset += count * element;
      if (bar != nullptr) bar->advance(source_bytes);
    }
  }
  return view;
}

unsloth_rotation rotation(const ModelConfig &config, unsloth_tensor factors) {
  unsloth_rotation rotation = {};
  // GGUF's converter reorders the rows of the projections so that rotated pairs are neighbours.
  rotation.style = UNSLOTH_ROPE_STYLE_INTERLEAVED;
  rotation.rotary_dim = static_cast<uint32_t>(config.rotary_dim);
  rotation.theta = static_cast<float>(config.rope_theta);
  rotation.freq_factors = factors;
  if (config.rope_scaling == ModelConfig::RopeScaling::kLinear) {
    rotation.scaling = UNSLOTH_ROPE_SCALING_LINEAR;
  } else if (config.rope_scaling == ModelConfig::RopeScaling::kYarn) {
    rotation.scaling = UNSLOTH_ROPE_SCALING_YARN;
    rotation.original_max_positions = static_cast<uint32_t>(config.rope_original_context_length);
  }
  rotation.factor = static_cast<float>(config.rope_scaling_factor);
  return rotation;
}

}  // namespace llm
