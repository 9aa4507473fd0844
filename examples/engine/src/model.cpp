#include "model.h"

#include "progress.h"
#include "upload.h"

namespace llm {
namespace {

constexpr unsloth_dtype kAsInFile = 0;

unsloth_dtype dtype_of(Args::DType hidden) {
  if (hidden == Args::DType::kF32) return UNSLOTH_DTYPE_F32;
  return hidden == Args::DType::kF16 ? UNSLOTH_DTYPE_F16 : UNSLOTH_DTYPE_BF16;
}

unsloth_dtype dtype_of(Args::Weights weights) {
  switch (weights) {
    case Args::Weights::kF32:
      return UNSLOTH_DTYPE_F32;
    case Args::Weights::kF16:
      return UNSLOTH_DTYPE_F16;
    case Args::Weights::kBf16:
      return UNSLOTH_DTYPE_BF16;
    case Args::Weights::kFile:
      break;
  }
  return kAsInFile;
}

// What a tensor takes as `dtype`.
uint64_t bytes_as(const GgufTensor &tensor, unsloth_dtype dtype) {
  return dtype == kAsInFile ? tensor.bytes : tensor.elements * element_size(dtype);
}

}  // namespace

Model::Model(const Context &context, const ModelConfig &config, unsloth_dtype weight_dtype,
             unsloth_dtype hidden_dtype)
    : context_(&context),
      config_(config),
      weight_dtype_(weight_dtype),
      hidden_dtype_(hidden_dtype) {}

Model Model::load(const Context &context, const Gguf &gguf, const ModelConfig &config,
                  Args::Weights weights, Args::DType hidden_dtype) {
  Model model(context, config, dtype_of(weights), dtype_of(hidden_dtype));
  uint64_t bytes = 0;
  uint64_t room = 0;
  for (const GgufTensor &tensor : gguf.tensors()) {
    bytes += tensor.bytes;
    const bool matrix = tensor.shape.size() > 1;
    const uint64_t size = bytes_as(tensor, matrix ? model.weight_dtype_ : UNSLOTH_DTYPE_F32);
    model.weight_bytes_ += size;
    room += aligned(size);
  }
  model.memory_ = Buffer(context, room);
  ProgressBar bar("loading " + config.name, bytes);

  const auto matrix = [&](const std::string &name, uint64_t rows, uint64_t columns) {
    return model.upload({&gguf.tensor(name + ".weight", {rows, columns})}, model.weight_dtype_,
                        &bar);
  };
  const auto vector = [&](const std::string &name, uint64_t size) {
    return model.upload({&gguf.tensor(name, {size})}, UNSLOTH_DTYPE_F32, &bar);
  };
  const auto optional_vector = [&](const std::string &name, uint64_t size) {
    return gguf.find_tensor(name) != nullptr ? vector(name, size) : unsloth_tensor{};
  };

  const uint64_t hidden = config.hidden_size;
  const uint64_t intermediate = config.intermediate_size;
  model.embedding_ = matrix("token_embd", config.vocab_size, hidden);
  for (uint64_t i = 0; i < config.num_layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    const uint64_t q_size = config.q_size();
    const uint64_t kv_size = config.kv_size();
    LayerWeights layer = {};
    layer.attention_norm = vector(block + "attn_norm.weight", hidden);
    const GgufTensor &q = gguf.tensor(block + "attn_q.weight", {q_size, hidden});
    const GgufTensor &k = gguf.tensor(block + "attn_k.weight", {kv_size, hidden});
    const GgufTensor &v = gguf.tensor(block + "attn_v.weight", {kv_size, hidden});
    const bool biased = gguf.find_tensor(block + "attn_q.bias") != nullptr;
    const bool alike = q.type == k.type && k.type == v.type;
    if (model.weight_dtype_ != kAsInFile || alike) {
      // One product in place of three.
      layer.qkv = model.upload({&q, &k, &v}, model.weight_dtype_, &bar);
      if (biased) {
        layer.qkv_bias = model.upload({&gguf.tensor(block + "attn_q.bias", {q_size}),
                                       &gguf.tensor(block + "attn_k.bias", {kv_size}),
                                       &gguf.tensor(block + "attn_v.bias", {kv_size})},
                                      UNSLOTH_DTYPE_F32, &bar);
      }
    } else {
      layer.q = model.upload({&q}, kAsInFile, &bar);
      layer.k = model.upload({&k}, kAsInFile, &bar);
      layer.v = model.upload({&v}, kAsInFile, &bar);
      if (biased) {
        layer.q_bias = vector(block + "attn_q.bias", q_size);
        layer.k_bias = vector(block + "attn_k.bias", kv_size);
        layer.v_bias = vector(block + "attn_v.bias", kv_size);
      }
    }
    layer.attention_output = matrix(block + "attn_output", hidden, q_size);
    layer.attention_output_bias = optional_vector(block + "attn_output.bias", hidden);
    layer.mlp_norm = vector(block + "ffn_norm.weight", hidden);
    layer.gate = matrix(block + "ffn_gate", intermediate, hidden);
    layer.up = matrix(block + "ffn_up", intermediate, hidden);
    layer.down = matrix(block + "ffn_down", hidden, intermediate);
    model.layers_.push_back(layer);
  }
  model.output_norm_ = vector("output_norm.weight", hidden);
  model.output_ =
      config.tied_embeddings ? model.embedding_ : matrix("output", config.vocab_size, hidden);
  // Llama 3.1 and later stretch each frequency by a factor of its own, which the file lists.
  model.rope_factors_ = optional_vector("rope_freqs.weight", config.rotary_dim / 2);
  return model;
}

unsloth_tensor Model::upload(const std::vector<const GgufTensor *> &sources, unsloth_dtype dtype,
                             ProgressBar *bar) {
  const unsloth_tensor view = dtype == kAsInFile
                                  ? upload_as_they_are(sources, &memory_, used_, bar)
                                  : upload_tensors(sources, dtype, &memory_, used_, bar);
  for (const GgufTensor *source : sources) used_ += bytes_as(*source, dtype);
  used_ = aligned(used_);
  return view;
}

}  // namespace llm
