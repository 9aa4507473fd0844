#include "model.h"

#include <algorithm>

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
    case Args::Weights::kSuited:
      break;
  }
  return kAsInFile;
}

bool is_of_floats(const GgufTensor &tensor) {
  return tensor.type == TensorType::kF32 || tensor.type == TensorType::kF16 ||
         tensor.type == TensorType::kBF16;
}

// What a GPU is fast with: blocks as they are, floats in the type of what they multiply.
Args::Weights suited(const Gguf &gguf, Args::DType hidden) {
  const bool quantised = std::none_of(
      gguf.tensors().begin(), gguf.tensors().end(),
      [](const GgufTensor &tensor) { return tensor.shape.size() > 1 && is_of_floats(tensor); });
  if (quantised) return Args::Weights::kFile;
  return hidden == Args::DType::kF16 ? Args::Weights::kF16 : Args::Weights::kBf16;
}

// What a tensor takes as `dtype`.
uint64_t bytes_as(const GgufTensor &tensor, unsloth_dtype dtype) {
  if (dtype == kAsInFile) return tensor.bytes + tail_bytes(tensor.type);
  return tensor.elements * element_size(dtype);
}

}  // namespace

Model::Model(const Context &context, const ModelConfig &config, unsloth_dtype weight_dtype,
             unsloth_dtype hidden_dtype, uint32_t flags, const Ranks &ranks)
    : context_(&context),
      config_(config),
      ranks_(ranks),
      weight_dtype_(weight_dtype),
      hidden_dtype_(hidden_dtype),
      flags_(flags) {}

Model Model::load(const Context &context, const Gguf &gguf, const ModelConfig &config,
                  const Args &args, const Ranks &ranks) {
  Args::Weights weights = args.weights;
  if (weights == Args::Weights::kSuited) weights = suited(gguf, args.dtype);
  uint32_t flags = UNSLOTH_TENSOR_CONSTANT;
  if (args.int8_activations) flags |= UNSLOTH_TENSOR_INT8_ACTIVATIONS;
  Model model(context, config, dtype_of(weights), dtype_of(args.dtype), flags, ranks);
  model.read(gguf, config, nullptr);
  model.memory_ = Buffer(context, model.used_);
  model.used_ = model.weight_bytes_ = 0;
  if (ranks.is_first()) {
    ProgressBar bar("loading " + config.name, model.file_bytes_);
    model.read(gguf, config, &bar);
  } else {
    model.read(gguf, config, nullptr);
  }
  // From here on weights are constant.
  context.synchronize();
  return model;
}

void Model::read(const Gguf &gguf, const ModelConfig &whole, ProgressBar *bar) {
  const auto part = [&](const GgufTensor &tensor, unsloth_shard_kind kind, uint64_t unit = 0) {
    unsloth_shard_params of = UNSLOTH_SHARD_PARAMS_INIT;
    of.kind = kind;
    of.unit = static_cast<int64_t>(unit);
    of.num_heads = static_cast<int64_t>(whole.num_heads);
    of.num_kv_heads = static_cast<int64_t>(whole.num_kv_heads);
    of.head_dim = static_cast<int64_t>(whole.head_dim);
    return Part(tensor, ranks_.tensor, of);
  };
  const auto vector = [&](const std::string &name, uint64_t size) {
    return upload({&gguf.tensor(name, {size})}, UNSLOTH_DTYPE_F32, bar);
  };
  const auto optional_vector = [&](const std::string &name, uint64_t size) {
    return gguf.find_tensor(name) != nullptr ? vector(name, size) : unsloth_tensor{};
  };
  const uint64_t hidden = whole.hidden_size;
  const uint64_t intermediate = whole.intermediate_size;
  const auto of_vocabulary = [&](const std::string &name) {
    const GgufTensor &tensor = gguf.tensor(name + ".weight", {whole.vocab_size, hidden});
    const Part own = part(tensor, UNSLOTH_SHARD_KIND_VOCABULARY);
    vocabulary_.begin = static_cast<uint64_t>(own.shard().pieces[0].row);
    vocabulary_.rows = own.tensor().shape[0];
    vocabulary_.most = static_cast<uint64_t>(own.shard().rows);
    return upload({&own.tensor()}, weight_dtype_, bar);
  };

  layers_.clear();
  const Span own = span_of_layers(whole.num_layers, ranks_.pipeline);
  config_.num_layers = own.count;
  const bool makes_logits = ranks_.has_output();
  if (ranks_.has_embedding() || (makes_logits && whole.tied_embeddings)) {
    embedding_ = of_vocabulary("token_embd");
  }
  for (uint64_t i = own.begin; i < own.begin + own.count; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    const uint64_t q_size = whole.q_size();
    const uint64_t kv_size = whole.kv_size();
    LayerWeights layer = {};
    layer.attention_norm = vector(block + "attn_norm.weight", hidden);
    const Part q =
        part(gguf.tensor(block + "attn_q.weight", {q_size, hidden}), UNSLOTH_SHARD_KIND_QUERY);
    const Part k =
        part(gguf.tensor(block + "attn_k.weight", {kv_size, hidden}), UNSLOTH_SHARD_KIND_KEY);
    const Part v =
        part(gguf.tensor(block + "attn_v.weight", {kv_size, hidden}), UNSLOTH_SHARD_KIND_VALUE);
    config_.num_heads = static_cast<uint64_t>(q.shard().num_heads);
    config_.num_kv_heads = static_cast<uint64_t>(k.shard().num_kv_heads);
    const bool biased = gguf.find_tensor(block + "attn_q.bias") != nullptr;
    const auto bias = [&](const char *name, uint64_t size, unsloth_shard_kind kind) {
      return part(gguf.tensor(block + name, {size}), kind);
    };
    std::vector<Part> biases;
    if (biased) {
      biases.push_back(bias("attn_q.bias", q_size, UNSLOTH_SHARD_KIND_QUERY));
      biases.push_back(bias("attn_k.bias", kv_size, UNSLOTH_SHARD_KIND_KEY));
      biases.push_back(bias("attn_v.bias", kv_size, UNSLOTH_SHARD_KIND_VALUE));
    }
    // What has one scale for the whole of a matrix stays apart.
    const bool alike = q.tensor().type == k.tensor().type && k.tensor().type == v.tensor().type &&
                       tail_bytes(q.tensor().type) == 0;
    if (weight_dtype_ != kAsInFile || alike) {
      // One product in place of three.
      layer.qkv = upload({&q.tensor(), &k.tensor(), &v.tensor()}, weight_dtype_, bar);
      if (biased) {
        layer.qkv_bias = upload({&biases[0].tensor(), &biases[1].tensor(), &biases[2].tensor()},
                                UNSLOTH_DTYPE_F32, bar);
      }
    } else {
      layer.q = upload({&q.tensor()}, kAsInFile, bar);
      layer.k = upload({&k.tensor()}, kAsInFile, bar);
      layer.v = upload({&v.tensor()}, kAsInFile, bar);
      if (biased) {
        layer.q_bias = upload({&biases[0].tensor()}, UNSLOTH_DTYPE_F32, bar);
        layer.k_bias = upload({&biases[1].tensor()}, UNSLOTH_DTYPE_F32, bar);
        layer.v_bias = upload({&biases[2].tensor()}, UNSLOTH_DTYPE_F32, bar);
      }
    }
    const auto matrix = [&](const char *name, uint64_t rows, uint64_t columns,
                            unsloth_shard_kind kind, uint64_t unit) {
      const GgufTensor &tensor = gguf.tensor(block + name + ".weight", {rows, columns});
      const Part own = part(tensor, kind, unit);
      return upload({&own.tensor()}, weight_dtype_, bar);
    };
    layer.attention_output =
        matrix("attn_output", hidden, q_size, UNSLOTH_SHARD_KIND_ATTENTION_OUT, 0);
    layer.attention_output_bias = optional_vector(block + "attn_output.bias", hidden);
    layer.mlp_norm = vector(block + "ffn_norm.weight", hidden);
    // Rows of gate and up are columns of down, which has them in blocks.
    const GgufTensor &down = gguf.tensor(block + "ffn_down.weight", {hidden, intermediate});
    const uint64_t unit = block_elements(dtype_of_tensor(down.type));
    layer.gate = matrix("ffn_gate", intermediate, hidden, UNSLOTH_SHARD_KIND_COLUMN, unit);
    layer.up = matrix("ffn_up", intermediate, hidden, UNSLOTH_SHARD_KIND_COLUMN, unit);
    layer.down = matrix("ffn_down", hidden, intermediate, UNSLOTH_SHARD_KIND_ROW, unit);
    config_.intermediate_size = static_cast<uint64_t>(layer.gate.shape[0]);
    layers_.push_back(layer);
  }
  if (makes_logits) {
    output_norm_ = vector("output_norm.weight", hidden);
    output_ = whole.tied_embeddings ? embedding_ : of_vocabulary("output");
  }
  // Llama 3.1 and later stretch each frequency by a factor of its own, which the file lists.
  rope_factors_ = optional_vector("rope_freqs.weight", whole.rotary_dim / 2);
}

unsloth_tensor Model::upload(const std::vector<const GgufTensor *> &sources, unsloth_dtype dtype,
                             ProgressBar *bar) {
  unsloth_tensor view = {};
  if (memory_.bytes() > 0) {
    if (dtype != kAsInFile) {
      view = upload_tensors(sources, dtype, &memory_, used_, bar);
    } else if (sources[0]->type == TensorType::kI2_S) {
      view = upload_ternary(*context_, *sources[0], &memory_, used_, &quantizations_.emplace_back(),
                            bar);
    } else {
      view = upload_as_they_are(sources, &memory_, used_, bar);
    }
    view.flags |= flags_;
  } else {
    view.shape[0] = static_cast<int64_t>(sources[0]->shape[0]);
  }
  uint64_t bytes = 0;
  for (const GgufTensor *source : sources) {
    bytes += bytes_as(*source, dtype);
    if (memory_.bytes() == 0) file_bytes_ += source->bytes;
  }
  weight_bytes_ += bytes;
  used_ = aligned(used_ + bytes);
  return view;
}

}  // namespace llm
