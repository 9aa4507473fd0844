#include "lora.h"

#include <algorithm>
#include <cmath>

#include "random.h"
#include "upload.h"

namespace llm {
namespace {

unsloth_tensor f32(const void *data, uint64_t rows, uint64_t columns) {
  return unsloth::tensor(data, UNSLOTH_DTYPE_F32, {rows, columns});
}

}  // namespace

Lora::Lora(const Context &context, const ModelConfig &config, const Weights &weights,
           const LoraOptions &options, unsloth_dtype dtype, uint64_t seed)
    : context_(&context), weights_(&weights), options_(options) {
  plan(config);
  allocate(context, dtype, seed);
  measure();
}

void Lora::plan(const ModelConfig &config) {
  const uint64_t hidden = config.hidden_size;
  const uint64_t intermediate = config.intermediate_size;
  const uint64_t q = config.q_size();
  const uint64_t kv = config.kv_size();
  using L = LayerTensors;
  parts_ = {
      {&L::qkv, 0, q, hidden, "attn_q", false},
      {&L::qkv, q, kv, hidden, "attn_k", false},
      {&L::qkv, q + kv, kv, hidden, "attn_v", false},
      {&L::output, 0, hidden, q, "attn_output", false},
      {&L::gate_up, 0, intermediate, hidden, "ffn_gate", false},
      {&L::gate_up, intermediate, intermediate, hidden, "ffn_up", false},
      {&L::down, 0, hidden, intermediate, "ffn_down", false},
  };
  for (const Target target : options_.targets) parts_[static_cast<size_t>(target)].trained = true;
}

void Lora::allocate(const Context &context, unsloth_dtype dtype, uint64_t seed) {
  const uint64_t rank = options_.rank;
  const size_t num_layers = weights_->tensors().layers.size();
  const LayerTensors &first = weights_->tensors().layers[0];

  // A and B, and as much for their gradients.
  uint64_t room = 0;
  uint64_t largest_side = 0;
  for (const Part &part : parts_) {
    if (!part.trained) continue;
    room +=
        aligned(rank * part.columns * sizeof(float)) + aligned(part.rows * rank * sizeof(float));
    largest_side = std::max({largest_side, part.rows, part.columns});
  }
  memory_ = Buffer(context, num_layers * room);
  gradient_memory_ = Buffer(context, num_layers * room);
  uint64_t used = 0;
  Random random(seed);
  std::vector<float> values;
  // What the layers of other ranks begin with comes first.
  for (const Part &part : parts_) {
    if (!part.trained) continue;
    for (uint64_t i = 0; i < weights_->first_layer() * rank * part.columns; ++i) random.uniform();
  }
  for (size_t layer = 0; layer < num_layers; ++layer) {
    std::vector<Pair> pairs;
    for (const Part &part : parts_) {
      if (!part.trained) continue;
      Pair pair = {};
      const auto place = [&](uint64_t rows, uint64_t columns, unsloth_tensor *weight,
                             unsloth_tensor *gradient) {
        *weight = f32(static_cast<char *>(memory_.data()) + used, rows, columns);
        *gradient = f32(static_cast<char *>(gradient_memory_.data()) + used, rows, columns);
      };
      place(rank, part.columns, &pair.a, &pair.da);
      // Uniform within 1 / sqrt(in), as linear layers begin in PyTorch.
      values.resize(rank * part.columns);
      const double bound = 1.0 / std::sqrt(static_cast<double>(part.columns));
      for (float &value : values)
        value = static_cast<float>((2.0 * random.uniform() - 1.0) * bound);
      memory_.upload(values.data(), values.size() * sizeof(float), used);
      used += aligned(byte_count(pair.a));
      place(part.rows, rank, &pair.b, &pair.db);
      used += aligned(byte_count(pair.b));
      const std::string name = name_in_file(part, layer) + ".lora_";
      file_tensors_.push_back({name + "a", {rank, part.columns}, pair.a});
      file_tensors_.push_back({name + "b", {part.rows, rank}, pair.b});
      pairs.push_back(pair);
    }
    pairs_.push_back(std::move(pairs));
  }

  // One layer's matrices, their gradients, and what the products need in between.
  uint64_t scratch = 0;
  const auto reserve = [&scratch](uint64_t bytes) {
    const uint64_t offset = scratch;
    scratch = aligned(scratch + bytes);
    return offset;
  };
  struct Place {
    unsloth_tensor LayerTensors::*matrix;
    uint64_t merged;
    uint64_t gradient;
  };
  std::vector<Place> places;
  for (const Part &part : parts_) {
    const bool placed = std::any_of(places.begin(), places.end(), [&](const Place &place) {
      return place.matrix == part.matrix;
    });
    if (!part.trained || placed) continue;
    unsloth_tensor matrix = first.*part.matrix;
    matrix.dtype = dtype;
    const uint64_t merged = reserve(byte_count(matrix));
    places.push_back({part.matrix, merged, reserve(element_count(matrix) * sizeof(float))});
  }
  const uint64_t identity = reserve(rank * rank * sizeof(float));
  const uint64_t scaled = reserve(largest_side * rank * sizeof(float));
  scratch_memory_ = Buffer(context, scratch);
  char *start = static_cast<char *>(scratch_memory_.data());
  for (const Place &place : places) {
    unsloth_tensor &merged = merged_.*place.matrix;
    merged = first.*place.matrix;
    merged.dtype = dtype;
    merged.data = start + place.merged;
    unsloth_tensor &gradient = merged_gradients_.*place.matrix;
    gradient = first.*place.matrix;
    gradient.dtype = UNSLOTH_DTYPE_F32;
    gradient.data = start + place.gradient;
  }
  scaled_ = start + scaled;
  scaled_identity_ = f32(start + identity, rank, rank);
  values.assign(rank * rank, 0.0F);
  for (uint64_t i = 0; i < rank; ++i) {
    values[i * rank + i] = static_cast<float>(options_.scale());
  }
  scratch_memory_.upload(values.data(), values.size() * sizeof(float), identity);
}

std::string Lora::name_in_file(const Part &part, size_t layer) const {
  return "blk." + std::to_string(weights_->first_layer() + layer) + "." + part.name + ".weight";
}

std::vector<Parameter> Lora::parameters() const {
  std::vector<Parameter> parameters;
  for (const std::vector<Pair> &pairs : pairs_) {
    for (const Pair &pair : pairs) {
      parameters.push_back({pair.a, pair.da, true});
      parameters.push_back({pair.b, pair.db, true});
    }
  }
  return parameters;
}

std::vector<Lora::Merged> Lora::merged_tensors() const {
  std::vector<Merged> tensors;
  for (size_t layer = 0; layer < pairs_.size(); ++layer) {
    for (const Part &part : parts_) {
      if (!part.trained) continue;
      tensors.push_back(
          {name_in_file(part, layer), layer, rows(merged_.*part.matrix, part.first, part.rows)});
    }
  }
  return tensors;
}

LayerTensors Lora::like_merged() const {
  LayerTensors tensors = weights_->tensors().layers[0];
  for (const Part &part : parts_) {
    const unsloth_tensor &merged = merged_.*part.matrix;
    if (merged.rank != 0) tensors.*part.matrix = merged;
  }
  return tensors;
}

uint64_t Lora::merged_parameters() const {
  const LayerTensors &m = merged_;
  return element_count(m.qkv) + element_count(m.output) + element_count(m.gate_up) +
         element_count(m.down);
}

LayerTensors Lora::merge(size_t layer) {
  const LayerTensors &base = weights_->tensors().layers[layer];
  LayerTensors tensors = base;
  size_t pair = 0;
  for (const Part &part : parts_) {
    const unsloth_tensor &merged = merged_.*part.matrix;
    if (merged.rank == 0) continue;
    tensors.*part.matrix = merged;
    const unsloth_tensor from = rows(base.*part.matrix, part.first, part.rows);
    const unsloth_tensor to = rows(merged, part.first, part.rows);
    if (!part.trained) {
      copy(from, to);
      continue;
    }
    const Pair &lora = pairs_[layer][pair++];
    // s A^T, since a product takes its second matrix by rows.
    const unsloth_tensor transposed = f32(scaled_, part.columns, options_.rank);
    multiply_transposed(lora.a, scaled_identity_, transposed, false);
    // The sum is f32, and rounded once where that is not what is asked for. The gradient's place
    // is free: it is written when the layer has used W'.
    const bool in_place = to.dtype == UNSLOTH_DTYPE_F32;
    const unsloth_tensor gradient = merged_gradients_.*part.matrix;
    const unsloth_tensor sum = in_place ? to : rows(gradient, part.first, part.rows);
    copy(from, sum);
    multiply(lora.b, transposed, sum, sum);
    if (!in_place) copy(sum, to);
  }
  return tensors;
}

std::vector<unsloth_tensor> Lora::gradients_of(size_t layer) const {
  std::vector<unsloth_tensor> gradients;
  for (const Pair &pair : pairs_[layer]) {
    gradients.push_back(pair.da);
    gradients.push_back(pair.db);
  }
  return gradients;
}

void Lora::add_gradients(size_t layer) {
  size_t pair = 0;
  for (const Part &part : parts_) {
    if (!part.trained) continue;
    const Pair &lora = pairs_[layer][pair++];
    const unsloth_tensor gradient = rows(merged_gradients_.*part.matrix, part.first, part.rows);
    const unsloth_tensor scaled_b = f32(scaled_, part.rows, options_.rank);
    multiply(lora.b, scaled_identity_, unsloth_tensor{}, scaled_b);
    multiply_transposed(scaled_b, gradient, lora.da, true);
    const unsloth_tensor scaled_a = f32(scaled_, options_.rank, part.columns);
    multiply_transposed(scaled_identity_, lora.a, scaled_a, false);
    multiply(gradient, scaled_a, lora.db, lora.db);
  }
}

// out = x weight^T + residual
void Lora::multiply(const unsloth_tensor &x, const unsloth_tensor &weight,
                    const unsloth_tensor &residual, const unsloth_tensor &out) const {
  auto params = unsloth::make<unsloth_linear_params>();
  params.x = x;
  params.weight = weight;
  params.residual = residual;
  params.out = out;
  params.workspace = workspace_->data();
  params.workspace_size = workspace_->bytes();
  check(unsloth_linear_forward(context_->get(), &params, context_->stream()));
}

void Lora::multiply_transposed(const unsloth_tensor &dout, const unsloth_tensor &x,
                               const unsloth_tensor &out, bool accumulate) const {
  auto params = unsloth::make<unsloth_linear_backward_params>();
  params.accumulate = accumulate ? 1 : 0;
  params.dout = dout;
  params.x = x;
  params.dweight = out;
  params.workspace = workspace_->data();
  params.workspace_size = workspace_->bytes();
  check(unsloth_linear_backward(context_->get(), &params, context_->stream()));
}

void Lora::copy(const unsloth_tensor &from, const unsloth_tensor &to) const {
  auto params = unsloth::make<unsloth_cast_params>();
  params.x = from;
  params.out = to;
  check(unsloth_cast_forward(context_->get(), &params, context_->stream()));
}

// Of every product above; forward products do with less.
void Lora::measure() {
  const auto forward = [&](const unsloth_tensor &x, const unsloth_tensor &weight,
                           const unsloth_tensor &out, bool adds) {
    auto params = unsloth::make<unsloth_linear_params>();
    params.x = x;
    params.weight = weight;
    params.out = out;
    if (adds) params.residual = out;
    size_t size = 0;
    check(unsloth_linear_workspace_size(context_->get(), &params, &size));
    workspace_size_ = std::max(workspace_size_, size);
  };
  const auto backward = [&](const unsloth_tensor &dout, const unsloth_tensor &x,
                            const unsloth_tensor &out, bool accumulate) {
    auto params = unsloth::make<unsloth_linear_backward_params>();
    params.accumulate = accumulate ? 1 : 0;
    params.dout = dout;
    params.x = x;
    params.dweight = out;
    size_t size = 0;
    check(unsloth_linear_backward_workspace_size(context_->get(), &params, &size));
    workspace_size_ = std::max(workspace_size_, size);
  };
  const uint64_t rank = options_.rank;
  for (const Part &part : parts_) {
    if (!part.trained) continue;
    const unsloth_tensor a = f32(nullptr, rank, part.columns);
    const unsloth_tensor b = f32(nullptr, part.rows, rank);
    const unsloth_tensor matrix = f32(nullptr, part.rows, part.columns);
    const unsloth_tensor identity = f32(nullptr, rank, rank);
    const unsloth_tensor transposed = f32(nullptr, part.columns, rank);
    backward(a, identity, transposed, false);
    forward(b, transposed, matrix, true);
    forward(b, identity, b, false);
    backward(b, matrix, a, true);
    backward(identity, a, a, false);
    forward(matrix, a, b, true);
  }
}

}  // namespace llm
