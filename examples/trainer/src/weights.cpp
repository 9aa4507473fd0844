#include "weights.h"

#include <cstdlib>

#include "progress.h"
#include "upload.h"

namespace llm {
namespace {

// Calls `visit` with each tensor of two sets of the same model, in one order.
template <typename One, typename Other, typename Visit>
void visit_pairs(One *one, Other *other, const Visit &visit) {
  visit(one->embedding, other->embedding);
  for (size_t i = 0; i < one->layers.size(); ++i) {
    auto &a = one->layers[i];
    auto &b = other->layers[i];
    visit(a.attention_norm, b.attention_norm);
    visit(a.qkv, b.qkv);
    visit(a.qkv_bias, b.qkv_bias);
    visit(a.output, b.output);
    visit(a.output_bias, b.output_bias);
    visit(a.mlp_norm, b.mlp_norm);
    visit(a.gate_up, b.gate_up);
    visit(a.down, b.down);
  }
  visit(one->output_norm, other->output_norm);
  visit(one->output, other->output);
}

}  // namespace

std::vector<unsloth_tensor> tensors_of(const LayerTensors &layer) {
  return {layer.attention_norm, layer.qkv,      layer.qkv_bias, layer.output,
          layer.output_bias,    layer.mlp_norm, layer.gate_up,  layer.down};
}

uint64_t element_count(const unsloth_tensor &tensor) {
  uint64_t count = tensor.rank > 0 ? 1 : 0;
  for (uint32_t i = 0; i < tensor.rank; ++i) count *= static_cast<uint64_t>(tensor.shape[i]);
  return count;
}

uint64_t byte_count(const unsloth_tensor &tensor) {
  return element_count(tensor) * element_size(tensor.dtype);
}

unsloth_tensor rows(const unsloth_tensor &tensor, uint64_t first, uint64_t count) {
  const uint64_t row = byte_count(tensor) / static_cast<uint64_t>(tensor.shape[0]);
  unsloth_tensor view = tensor;
  view.shape[0] = static_cast<int64_t>(count);
  if (tensor.data != nullptr) view.data = static_cast<char *>(tensor.data) + first * row;
  return view;
}

Weights Weights::load(const Context &context, const Gguf &gguf, const ModelConfig &config,
                      unsloth_dtype dtype, const Group &pipeline) {
  Weights weights;
  const Span span = span_of_layers(config.num_layers, pipeline);
  const bool is_first = pipeline.rank == 0;
  const bool is_last = pipeline.rank == pipeline.size - 1;
  weights.first_layer_ = span.begin;
  weights.borrows_embedding_ = config.tied_embeddings && is_last && !is_first;
  const auto is_here = [&](const std::string &name) {
    if (name.rfind("blk.", 0) == 0) {
      const uint64_t layer = std::strtoull(name.c_str() + 4, nullptr, 10);
      return layer >= span.begin && layer < span.begin + span.count;
    }
    if (name == "token_embd.weight") return is_first || weights.borrows_embedding_;
    return name == "rope_freqs.weight" || is_last;
  };
  uint64_t bytes = 0;
  uint64_t room = 0;
  for (const GgufTensor &tensor : gguf.tensors()) {
    if (!is_here(tensor.name)) continue;
    bytes += tensor.bytes;
    room += aligned(tensor.elements *
                    element_size(tensor.shape.size() > 1 ? dtype : UNSLOTH_DTYPE_F32));
  }
  weights.memory_ = Buffer(context, room);
  uint64_t used = 0;
  ProgressBar bar("loading " + config.name, bytes);

  struct Part {
    std::string name;
    uint64_t rows;
  };
  // The parts' rows, one after the other, of `columns` elements, or one where they are vectors.
  const auto load = [&](const std::vector<Part> &parts, uint64_t columns) {
    std::vector<const GgufTensor *> sources;
    for (const Part &part : parts) {
      const std::vector<uint64_t> shape = columns > 0 ? std::vector<uint64_t>{part.rows, columns}
                                                      : std::vector<uint64_t>{part.rows};
      sources.push_back(&gguf.tensor(part.name, shape));
    }
    const unsloth_dtype kept = columns > 0 ? dtype : UNSLOTH_DTYPE_F32;
    const unsloth_tensor tensor = upload_tensors(sources, kept, &weights.memory_, used, &bar);
    used = aligned(used + byte_count(tensor));
    uint64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      weights.file_tensors_.push_back(
          {parts[i].name, sources[i]->shape, rows(tensor, first, parts[i].rows)});
      first += parts[i].rows;
    }
    return tensor;
  };
  const auto optional = [&](const std::vector<Part> &parts) {
    return gguf.find_tensor(parts[0].name) != nullptr ? load(parts, 0) : unsloth_tensor{};
  };

  const uint64_t hidden = config.hidden_size;
  const uint64_t intermediate = config.intermediate_size;
  const uint64_t q_size = config.q_size();
  const uint64_t kv_size = config.kv_size();
  ModelTensors &model = weights.tensors_;
  if (is_first || weights.borrows_embedding_) {
    model.embedding = load({{"token_embd.weight", config.vocab_size}}, hidden);
  }
  // It is another rank that has it to give.
  if (weights.borrows_embedding_) weights.file_tensors_.clear();
  for (uint64_t i = span.begin; i < span.begin + span.count; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    LayerTensors layer = {};
    layer.attention_norm = load({{block + "attn_norm.weight", hidden}}, 0);
    layer.qkv = load({{block + "attn_q.weight", q_size},
                      {block + "attn_k.weight", kv_size},
                      {block + "attn_v.weight", kv_size}},
                     hidden);
    layer.qkv_bias = optional({{block + "attn_q.bias", q_size},
                               {block + "attn_k.bias", kv_size},
                               {block + "attn_v.bias", kv_size}});
    layer.output = load({{block + "attn_output.weight", hidden}}, q_size);
    layer.output_bias = optional({{block + "attn_output.bias", hidden}});
    layer.mlp_norm = load({{block + "ffn_norm.weight", hidden}}, 0);
    layer.gate_up =
        load({{block + "ffn_gate.weight", intermediate}, {block + "ffn_up.weight", intermediate}},
             hidden);
    layer.down = load({{block + "ffn_down.weight", hidden}}, intermediate);
    model.layers.push_back(layer);
  }
  if (is_last) model.output_norm = load({{"output_norm.weight", hidden}}, 0);
  if (is_last && !config.tied_embeddings)
    model.output = load({{"output.weight", config.vocab_size}}, hidden);
  // The factors are no weights: they are written out as they were read.
  if (gguf.find_tensor("rope_freqs.weight") != nullptr) {
    const GgufTensor &factors = gguf.tensor("rope_freqs.weight", {config.rotary_dim / 2});
    weights.rope_factors_ =
        upload_tensors({&factors}, UNSLOTH_DTYPE_F32, &weights.memory_, used, &bar);
  }
  return weights;
}

void Weights::add_gradients(const Context &context, unsloth_dtype of_layers) {
  gradients_.layers.resize(tensors_.layers.size());
  const auto dtype_of = [&](const unsloth_tensor &weight) {
    const bool is_of_layer = &weight != &tensors_.embedding && &weight != &tensors_.output_norm &&
                             &weight != &tensors_.output;
    return is_of_layer ? of_layers : UNSLOTH_DTYPE_F32;
  };
  uint64_t room = 0;
  visit_pairs(&tensors_, &gradients_, [&](const unsloth_tensor &weight, unsloth_tensor &) {
    room += aligned(element_count(weight) * element_size(dtype_of(weight)));
  });
  gradient_memory_ = Buffer(context, room);
  uint64_t used = 0;
  visit_pairs(&tensors_, &gradients_, [&](const unsloth_tensor &weight, unsloth_tensor &gradient) {
    if (weight.rank == 0) return;
    gradient = weight;
    gradient.dtype = dtype_of(weight);
    gradient.data = static_cast<char *>(gradient_memory_.data()) + used;
    used += aligned(byte_count(gradient));
  });
}

std::vector<Parameter> Weights::parameters() const {
  std::vector<Parameter> parameters;
  visit_pairs(&tensors_, &gradients_,
              [&](const unsloth_tensor &weight, const unsloth_tensor &gradient) {
                const bool borrowed = borrows_embedding_ && &weight == &tensors_.embedding;
                if (gradient.rank == 0 || borrowed) return;
                parameters.push_back({weight, gradient, weight.rank > 1});
              });
  return parameters;
}

}  // namespace llm
