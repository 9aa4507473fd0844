#include "weights.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "error.h"
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
    visit(a.qkv, b.qkv);
    visit(a.output, b.output);
    visit(a.gate_up, b.gate_up);
    visit(a.down, b.down);
    visit(a.attention_norm, b.attention_norm);
    visit(a.qkv_bias, b.qkv_bias);
    visit(a.output_bias, b.output_bias);
    visit(a.mlp_norm, b.mlp_norm);
  }
  visit(one->output_norm, other->output_norm);
  visit(one->output, other->output);
}

// Elements to which tensors are padded, so that they begin at multiples of 256 bytes in any dtype,
// and at the same element of a piece of weights as of one of gradients.
constexpr uint64_t kUnit = 128;

uint64_t padded(uint64_t elements, uint64_t unit = kUnit) {
  return (elements + unit - 1) / unit * unit;
}

unsloth_tensor span_of(const unsloth_tensor &vector, uint64_t first, uint64_t count) {
  char *const data = static_cast<char *>(vector.data) + first * element_size(vector.dtype);
  return unsloth::tensor(data, vector.dtype, {count});
}

// Elements of a vector before a tensor that lies in it.
uint64_t place_in(const unsloth_tensor &vector, const unsloth_tensor &tensor) {
  const auto bytes =
      static_cast<const char *>(tensor.data) - static_cast<const char *>(vector.data);
  return static_cast<uint64_t>(bytes) / element_size(vector.dtype);
}

// Hands out memory, and remembers the pieces.
class Layout {
 public:
  Layout(const Buffer &memory, uint64_t num_ranks) : memory_(memory), num_ranks_(num_ranks) {}

  // Offset of a tensor behind those before it, in the same piece if they are of its dtype.
  uint64_t place(uint64_t elements, unsloth_dtype dtype) {
    if (dtype != dtype_) end_piece();
    dtype_ = dtype;
    const uint64_t at = begin_ + elements_ * element_size(dtype);
    elements_ += padded(elements);
    return at;
  }
  // What was placed since the last call.
  std::vector<Piece> end_pieces() {
    end_piece();
    return std::exchange(pieces_, {});
  }
  // Where nothing was placed.
  uint64_t used() const { return begin_; }

 private:
  void end_piece() {
    if (elements_ == 0) return;
    elements_ = padded(elements_, kUnit * num_ranks_);
    char *const data = static_cast<char *>(memory_.data()) + begin_;
    pieces_.push_back({unsloth::tensor(data, dtype_, {elements_}), {}});
    begin_ += elements_ * element_size(dtype_);
    elements_ = 0;
  }

  const Buffer &memory_;
  uint64_t num_ranks_;
  uint64_t begin_ = 0;  // of a piece, and its elements
  uint64_t elements_ = 0;
  unsloth_dtype dtype_ = UNSLOTH_DTYPE_F32;
  std::vector<Piece> pieces_;
};

}  // namespace

std::vector<unsloth_tensor> tensors_of(const LayerTensors &layer) {
  return {layer.qkv,      layer.output,      layer.gate_up, layer.down, layer.attention_norm,
          layer.qkv_bias, layer.output_bias, layer.mlp_norm};
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
                      unsloth_dtype dtype, const Group &pipeline, const Group &shares) {
  Weights weights;
  weights.shares_ = shares;
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
    room +=
        padded(tensor.elements) * element_size(tensor.shape.size() > 1 ? dtype : UNSLOTH_DTYPE_F32);
  }
  // Matrices and vectors of a layer are a piece each, and two are before and behind the layers.
  const auto num_ranks = static_cast<uint64_t>(shares.size);
  room += (2 * span.count + 4) * (num_ranks - 1) * kUnit * sizeof(float);
  weights.memory_ = Buffer(context, room);
  Layout layout(weights.memory_, num_ranks);
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
    uint64_t elements = 0;
    for (const GgufTensor *source : sources) elements += source->elements;
    const uint64_t at = layout.place(elements, kept);
    const unsloth_tensor tensor = upload_tensors(sources, kept, &weights.memory_, at, &bar);
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
  weights.pieces_.push_back(layout.end_pieces());
  for (uint64_t i = span.begin; i < span.begin + span.count; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    LayerTensors layer = {};
    layer.qkv = load({{block + "attn_q.weight", q_size},
                      {block + "attn_k.weight", kv_size},
                      {block + "attn_v.weight", kv_size}},
                     hidden);
    layer.output = load({{block + "attn_output.weight", hidden}}, q_size);
    layer.gate_up =
        load({{block + "ffn_gate.weight", intermediate}, {block + "ffn_up.weight", intermediate}},
             hidden);
    layer.down = load({{block + "ffn_down.weight", hidden}}, intermediate);
    layer.attention_norm = load({{block + "attn_norm.weight", hidden}}, 0);
    layer.qkv_bias = optional({{block + "attn_q.bias", q_size},
                               {block + "attn_k.bias", kv_size},
                               {block + "attn_v.bias", kv_size}});
    layer.output_bias = optional({{block + "attn_output.bias", hidden}});
    layer.mlp_norm = load({{block + "ffn_norm.weight", hidden}}, 0);
    model.layers.push_back(layer);
    weights.pieces_.push_back(layout.end_pieces());
  }
  if (is_last) model.output_norm = load({{"output_norm.weight", hidden}}, 0);
  if (is_last && !config.tied_embeddings)
    model.output = load({{"output.weight", config.vocab_size}}, hidden);
  weights.pieces_.push_back(layout.end_pieces());
  // The factors are no weights: they are written out as they were read.
  if (gguf.find_tensor("rope_freqs.weight") != nullptr) {
    const GgufTensor &factors = gguf.tensor("rope_freqs.weight", {config.rotary_dim / 2});
    weights.rope_factors_ =
        upload_tensors({&factors}, UNSLOTH_DTYPE_F32, &weights.memory_, layout.used(), &bar);
  }
  return weights;
}

void Weights::add_gradients(const Context &context, unsloth_dtype of_layers) {
  gradients_.layers.resize(tensors_.layers.size());
  const auto dtype_of = [&](size_t group) {
    return group == 0 || group + 1 == pieces_.size() ? UNSLOTH_DTYPE_F32 : of_layers;
  };
  uint64_t room = 0;
  for (size_t group = 0; group < pieces_.size(); ++group) {
    for (const Piece &piece : pieces_[group]) {
      room += element_count(piece.weights) * element_size(dtype_of(group));
    }
  }
  gradient_memory_ = Buffer(context, room);
  uint64_t used = 0;
  for (size_t group = 0; group < pieces_.size(); ++group) {
    for (Piece &piece : pieces_[group]) {
      char *const data = static_cast<char *>(gradient_memory_.data()) + used;
      piece.gradients = unsloth::tensor(data, dtype_of(group), {element_count(piece.weights)});
      used += byte_count(piece.gradients);
    }
  }
  visit_pairs(&tensors_, &gradients_, [&](const unsloth_tensor &weight, unsloth_tensor &gradient) {
    if (weight.rank == 0) return;
    const Piece &piece = piece_of(weight);
    gradient = weight;
    gradient.dtype = piece.gradients.dtype;
    gradient.data = span_of(piece.gradients, place_in(piece.weights, weight), 0).data;
  });
}

const Piece &Weights::piece_of(const unsloth_tensor &weight) const {
  for (const auto &pieces : pieces_) {
    for (const Piece &piece : pieces) {
      const auto *const begin = static_cast<const char *>(piece.weights.data);
      if (weight.data >= begin && weight.data < begin + byte_count(piece.weights)) return piece;
    }
  }
  throw Error("a weight is in no piece");
}

unsloth_tensor Weights::share(const unsloth_tensor &of_piece) const {
  const uint64_t count = element_count(of_piece) / static_cast<uint64_t>(shares_.size);
  return span_of(of_piece, static_cast<uint64_t>(shares_.rank) * count, count);
}

std::vector<Parameter> Weights::parameters() const {
  std::vector<Parameter> parameters;
  visit_pairs(&tensors_, &gradients_,
              [&](const unsloth_tensor &weight, const unsloth_tensor &gradient) {
                const bool borrowed = borrows_embedding_ && &weight == &tensors_.embedding;
                if (gradient.rank == 0 || borrowed) return;
                const bool decays = weight.rank > 1;
                if (shares_.size == 1) {
                  parameters.push_back({weight, gradient, decays});
                  return;
                }
                // A share may begin and end within a weight.
                const Piece &piece = piece_of(weight);
                const unsloth_tensor own = share(piece.weights);
                const uint64_t own_begin = place_in(piece.weights, own);
                const uint64_t begin = place_in(piece.weights, weight);
                const uint64_t first = std::max(begin, own_begin);
                const uint64_t end =
                    std::min(begin + element_count(weight), own_begin + element_count(own));
                if (first >= end) return;
                parameters.push_back({span_of(piece.weights, first, end - first),
                                      span_of(piece.gradients, first, end - first), decays});
              });
  return parameters;
}

}  // namespace llm
