#include "session.h"

#include <algorithm>

#include "upload.h"

// The layers of a step. Few tokens take as few kernels as there can be: one rank lets the product
// behind a norm compute it, and ranks that divide the weights the sum before it.

namespace llm {

void Session::queue_layers(size_t count) {
  const Ranks &ranks = model_->ranks();
  const unsloth_tensor hidden = hidden_rows(0, count);
  const unsloth_tensor normalized = normalized_rows(0, count);
  if (ranks.has_embedding()) {
    queue_embedding(count);
  } else {
    receive(context(), ranks.pipeline, hidden, ranks.pipeline.rank - 1);
  }
  if (norms_in_sums(count)) {
    queue_layers_and_sums(count);
  } else {
    for (size_t i = 0; i < model_->layers().size(); ++i) queue_layer(i, count);
    if (ranks.has_output()) rms_norm(hidden, model_->output_norm(), normalized);
  }
  if (!ranks.has_output()) send(context(), ranks.pipeline, hidden, ranks.pipeline.rank + 1);
}

void Session::queue_layer(size_t i, size_t count) {
  const unsloth_tensor hidden = hidden_rows(0, count);
  const unsloth_tensor normalized = normalized_rows(0, count);
  const LayerWeights &weights = model_->layers()[i];
  const bool few = norms_in_products(count);
  if (!few) rms_norm(hidden, weights.attention_norm, normalized);
  if (divided_) {
    divided_->attend(i, call(count));
  } else {
    const unsloth_attention_block_params attention = attention_params(i, count);
    check(unsloth_attention_block_forward(context().get(), &attention, context().stream()));
  }
  if (!few) rms_norm(hidden, weights.mlp_norm, normalized);
  // A chunk at a time, which bounds the workspace.
  const uint64_t most = chunk_limit(context());
  for (size_t first = 0; first < count; first += most) {
    const unsloth_mlp_params mlp = mlp_params(i, first, std::min<size_t>(most, count - first));
    check(unsloth_mlp_forward(context().get(), &mlp, context().stream()));
  }
}

// Each block gives this rank's part of a sum, which becomes the hidden states and what the next
// block takes in.
void Session::queue_layers_and_sums(size_t count) {
  const std::vector<LayerWeights> &layers = model_->layers();
  rms_norm(hidden_rows(0, count), layers[0].attention_norm, normalized_rows(0, count));
  for (size_t i = 0; i < layers.size(); ++i) {
    const unsloth_attention_block_params attention = attention_params(i, count);
    check(unsloth_attention_block_forward(context().get(), &attention, context().stream()));
    add_up(count, layers[i].mlp_norm);
    const unsloth_mlp_params mlp = mlp_params(i, 0, count);
    check(unsloth_mlp_forward(context().get(), &mlp, context().stream()));
    // The norm of what comes next. Nobody reads it behind the last layer of a rank without the
    // output.
    unsloth_tensor norm = {};
    if (i + 1 < layers.size()) {
      norm = layers[i + 1].attention_norm;
    } else if (model_->ranks().has_output()) {
      norm = model_->output_norm();
    }
    add_up(count, norm);
  }
}

// hidden += the parts of all ranks; normalized = rms_norm(hidden)
void Session::add_up(size_t count, unsloth_tensor weight) const {
  unsloth_all_reduce_rms_norm_params params = UNSLOTH_ALL_REDUCE_RMS_NORM_PARAMS_INIT;
  params.epsilon = static_cast<float>(model_->config().rms_norm_epsilon);
  params.comm = model_->ranks().tensor.comm;
  params.x = part_of_sum(count);
  params.out = normalized_rows(0, count);
  params.weight = weight;
  params.residual = hidden_rows(0, count);
  check(unsloth_all_reduce_rms_norm_forward(context().get(), &params, context().stream()));
}

void Session::rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const {
  unsloth_rms_norm_params params = UNSLOTH_RMS_NORM_PARAMS_INIT;
  params.epsilon = static_cast<float>(model_->config().rms_norm_epsilon);
  params.x = x;
  params.weight = weight;
  params.out = out;
  check(unsloth_rms_norm_forward(context().get(), &params, context().stream()));
}

// Whether the products of so many rows compute the norms before them, each in one kernel on a GPU.
bool Session::norms_in_products(size_t count) const {
  return count <= kFewRows && !divided_ && tensor_ranks() == 1;
}

// Whether the sums of so many rows over ranks compute the norms behind them.
bool Session::norms_in_sums(size_t count) const {
  return count <= kFewRows && !divided_ && tensor_ranks() > 1;
}

// hidden += attention(normalized), over the cache's pages of the layer.
unsloth_attention_block_params Session::attention_params(size_t layer, size_t count) const {
  const ModelConfig &config = model_->config();
  const LayerWeights &weights = model_->layers()[layer];
  unsloth_attention_block_params params = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  params.num_heads = static_cast<int64_t>(config.num_heads);
  params.num_kv_heads = static_cast<int64_t>(config.num_kv_heads);
  params.head_dim = static_cast<int64_t>(config.head_dim);
  params.rotate = 1;
  params.rotation = rotation(config, model_->rope_factors());
  params.cache = cache_.get();
  params.layer = static_cast<int64_t>(layer);
  params.x = normalized_rows(0, count);
  params.qkv_weight = weights.qkv;
  params.qkv_bias = weights.qkv_bias;
  params.q_weight = weights.q;
  params.k_weight = weights.k;
  params.v_weight = weights.v;
  params.q_bias = weights.q_bias;
  params.k_bias = weights.k_bias;
  params.v_bias = weights.v_bias;
  params.out_weight = weights.attention_output;
  params.out_bias = weights.attention_output_bias;
  params.residual = hidden_rows(0, count);
  params.out = params.residual;
  if (norms_in_products(count)) {
    params.x = params.residual;
    params.x_norm = weights.attention_norm;
    params.norm_epsilon = static_cast<float>(config.rms_norm_epsilon);
  }
  if (norms_in_sums(count)) {
    params.residual = {};
    params.out = part_of_sum(count);
    // All ranks have the bias, and one of them adds it.
    if (model_->ranks().tensor.rank > 0) params.out_bias = {};
  } else {
    params.parallel = model_->ranks().tensor.parallel();
  }
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

ContextParallel::Call Session::call(size_t rows) const {
  return {cache_.get(), normalized_rows(0, rows), hidden_rows(0, rows), workspace_.data(),
          workspace_.bytes()};
}

// hidden += mlp(normalized), of `count` rows from `first` on
unsloth_mlp_params Session::mlp_params(size_t layer, size_t first, size_t count) const {
  const LayerWeights &weights = model_->layers()[layer];
  unsloth_mlp_params params = UNSLOTH_MLP_PARAMS_INIT;
  params.activation = UNSLOTH_ACTIVATION_SILU;
  params.x = normalized_rows(first, count);
  params.gate_weight = weights.gate;
  params.up_weight = weights.up;
  params.down_weight = weights.down;
  params.residual = hidden_rows(first, count);
  params.out = params.residual;
  if (first == 0 && norms_in_products(count)) {
    params.x = params.residual;
    params.x_norm = weights.mlp_norm;
    params.x_norm_epsilon = static_cast<float>(model_->config().rms_norm_epsilon);
  }
  if (norms_in_sums(count)) {
    params.residual = {};
    params.out = part_of_sum(count);
  } else {
    params.parallel = model_->ranks().tensor.parallel();
  }
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_tensor Session::hidden_rows(size_t first, size_t count) const {
  return rows_of(hidden_.data(), first, count);
}

unsloth_tensor Session::normalized_rows(size_t first, size_t count) const {
  if (norms_in_sums(num_rows_)) return rows_of(sums_of_few_.data(), kFewRows + first, count);
  return rows_of(normalized_.data(), first, count);
}

unsloth_tensor Session::part_of_sum(size_t count) const {
  return rows_of(sums_of_few_.data(), 0, count);
}

// `count` rows of hidden states from row `first` on.
unsloth_tensor Session::rows_of(void *data, size_t first, size_t count) const {
  const uint64_t hidden = model_->config().hidden_size;
  char *start = static_cast<char *>(data) + first * hidden * element_size(dtype_);
  return unsloth::tensor(start, dtype_, {count, hidden});
}

}  // namespace llm
