#include "session.h"

#include <algorithm>
#include <cmath>

#include "quants.h"

// One step of a Llama-family model:
//
//   hidden = embedding[tokens]
//   for each layer:
//     x = rms_norm(hidden);  q, k, v = x Wq, x Wk, x Wv;  q, k = rope(q, k)
//     append k, v to the layer's pages;  hidden += attention(q, pages) Wo
//     x = rms_norm(hidden);  hidden += (silu(x Wgate) * (x Wup)) Wdown
//   logits = rms_norm(hidden) Woutput

namespace engine {
namespace {

constexpr uint64_t kMaxChunk = 256;     // tokens of a step: bounds the activations
constexpr uint64_t kMaxLogitRows = 32;  // a row is the size of the vocabulary

unsloth_kv_cache_params cache_params(const ModelConfig &config, unsloth_dtype dtype,
                                     uint64_t capacity, uint64_t max_chunk) {
  constexpr uint64_t kPageSize = 16;
  unsloth_kv_cache_params params = UNSLOTH_KV_CACHE_PARAMS_INIT;
  params.dtype = dtype;
  params.num_layers = static_cast<int64_t>(config.num_layers);
  params.num_kv_heads = static_cast<int64_t>(config.num_kv_heads);
  params.head_dim = static_cast<int64_t>(config.head_dim);
  params.page_size = static_cast<int64_t>(kPageSize);
  params.num_pages = static_cast<int64_t>((capacity + kPageSize - 1) / kPageSize);
  params.max_batch_size = 1;
  params.max_batch_tokens = static_cast<int64_t>(max_chunk);
  return params;
}

unsloth_rotation rotation_of(const ModelConfig &config, unsloth_tensor factors) {
  unsloth_rotation rotation = {};
  // GGUF's converter reorders the rows of Wq and Wk so that pairs of components are neighbours.
  rotation.style = UNSLOTH_ROPE_STYLE_INTERLEAVED;
  rotation.rotary_dim = static_cast<uint32_t>(config.rotary_dim);
  rotation.theta = static_cast<float>(config.rope_theta);
  rotation.factor = static_cast<float>(config.rope_scaling_factor);
  rotation.freq_factors = factors;
  switch (config.rope_scaling) {
    case ModelConfig::RopeScaling::kNone:
      rotation.scaling = UNSLOTH_ROPE_SCALING_NONE;
      break;
    case ModelConfig::RopeScaling::kLinear:
      rotation.scaling = UNSLOTH_ROPE_SCALING_LINEAR;
      break;
    case ModelConfig::RopeScaling::kYarn:
      rotation.scaling = UNSLOTH_ROPE_SCALING_YARN;
      rotation.original_max_positions = static_cast<uint32_t>(config.rope_original_context_length);
      break;
  }
  return rotation;
}

}  // namespace

Session::Session(const Model &model, uint64_t capacity)
    : model_(&model),
      capacity_(capacity),
      max_chunk_(std::min(kMaxChunk, capacity)),
      max_logit_rows_(std::min(kMaxLogitRows, capacity)),
      dtype_(UNSLOTH_DTYPE_F32),
      rotation_(rotation_of(model.config(), model.rope_factors())),
      cache_(model.context(), cache_params(model.config(), dtype_, capacity, max_chunk_)) {
  const ModelConfig &config = model.config();
  const auto allocate = [&](uint64_t rows, uint64_t columns) {
    return Buffer(context(), rows * columns * sizeof(float));
  };
  ids_ = Buffer(context(), max_chunk_ * sizeof(TokenId));
  hidden_ = allocate(max_chunk_, config.hidden_size);
  normalized_ = allocate(max_chunk_, config.hidden_size);
  q_ = allocate(max_chunk_, config.q_size());
  k_ = allocate(max_chunk_, config.kv_size());
  v_ = allocate(max_chunk_, config.kv_size());
  attention_ = allocate(max_chunk_, config.q_size());
  logits_ = allocate(max_logit_rows_, config.vocab_size);
  host_logits_.resize(max_logit_rows_ * config.vocab_size);
  check(unsloth_kv_cache_sequence_create(cache_.get(), &sequence_));
  workspace_ = Buffer(context(), workspace_size());
  reset();
}

void Session::reset() {
  check(unsloth_kv_cache_sequence_truncate(cache_.get(), sequence_, 0));
  length_ = 0;
  last_count_ = 0;
}

void Session::forward(const TokenId *tokens, size_t count) {
  if (count < 1 || count > max_chunk_ || count > capacity_ - length_) {
    throw Error("a step of " + std::to_string(count) + " tokens does not fit the session");
  }
  extend(count);
  embed(tokens, count);
  for (size_t i = 0; i < model_->layers().size(); ++i) {
    attention_block(model_->layers()[i], i, count);
    mlp_block(model_->layers()[i], count);
  }
  const uint64_t hidden = model_->config().hidden_size;
  rms_norm(rows(hidden_, count, hidden), model_->output_norm(), rows(normalized_, count, hidden));
}

void Session::extend(size_t count) {
  const auto num_tokens = static_cast<int64_t>(count);
  check(unsloth_kv_cache_extend(cache_.get(), &sequence_, &num_tokens, 1, nullptr));
  check(unsloth_kv_cache_batch_get(cache_.get(), &batch_));
  length_ += count;
  last_count_ = count;
}

// The most that any step asks for. A largest step gives the shapes of the batch's tables, which all
// steps share.
size_t Session::workspace_size() {
  extend(max_chunk_);
  size_t largest = 0;
  for (size_t count = 1; count <= max_chunk_; ++count) {
    size_t size = 0;
    const unsloth_attention_params attention = attention_params(0, count);
    check(unsloth_attention_workspace_size(context().get(), &attention, &size));
    largest = std::max(largest, size);
    const unsloth_mlp_params mlp = mlp_params(model_->layers()[0], count);
    check(unsloth_mlp_workspace_size(context().get(), &mlp, &size));
    largest = std::max(largest, size);
  }
  return largest;
}

const float *Session::logits(size_t row, size_t rows) {
  const ModelConfig &config = model_->config();
  const size_t row_bytes = config.hidden_size * sizeof(float);
  char *first = static_cast<char *>(normalized_.data()) + row * row_bytes;
  linear(tensor(first, dtype_, {rows, config.hidden_size}), model_->output(), {}, {},
         tensor(logits_.data(), dtype_, {rows, config.vocab_size}));
  logits_.download(host_logits_.data(), rows * config.vocab_size * sizeof(float));
  return host_logits_.data();
}

void Session::embed(const TokenId *tokens, size_t count) {
  ids_.upload(tokens, count * sizeof(TokenId));
  unsloth_embedding_params params = UNSLOTH_EMBEDDING_PARAMS_INIT;
  params.table = model_->embedding();
  params.ids = tensor(ids_.data(), UNSLOTH_DTYPE_I32, {count});
  params.out = rows(hidden_, count, model_->config().hidden_size);
  check(unsloth_embedding_forward(context().get(), &params, nullptr));
}

void Session::attention_block(const LayerWeights &weights, size_t layer, size_t count) {
  const ModelConfig &config = model_->config();
  const unsloth_tensor hidden = rows(hidden_, count, config.hidden_size);
  const unsloth_tensor x = rows(normalized_, count, config.hidden_size);
  rms_norm(hidden, weights.attention_norm, x);
  linear(x, weights.q, weights.q_bias, {}, rows(q_, count, config.q_size()));
  linear(x, weights.k, weights.k_bias, {}, rows(k_, count, config.kv_size()));
  linear(x, weights.v, weights.v_bias, {}, rows(v_, count, config.kv_size()));

  unsloth_rope_params rope = UNSLOTH_ROPE_PARAMS_INIT;
  rope.rotation = rotation_;
  rope.q = heads(q_, count, config.num_heads);
  rope.k = heads(k_, count, config.num_kv_heads);
  rope.positions = batch_.positions;
  check(unsloth_rope_forward(context().get(), &rope, nullptr));

  unsloth_kv_cache_append_params append = UNSLOTH_KV_CACHE_APPEND_PARAMS_INIT;
  append.layer = static_cast<int64_t>(layer);
  append.k = rope.k;
  append.v = heads(v_, count, config.num_kv_heads);
  check(unsloth_kv_cache_append(cache_.get(), &append, nullptr));

  const unsloth_attention_params attention = attention_params(layer, count);
  check(unsloth_attention_forward(context().get(), &attention, nullptr));
  linear(rows(attention_, count, config.q_size()), weights.attention_output,
         weights.attention_output_bias, hidden, hidden);
}

void Session::mlp_block(const LayerWeights &weights, size_t count) {
  const uint64_t hidden = model_->config().hidden_size;
  rms_norm(rows(hidden_, count, hidden), weights.mlp_norm, rows(normalized_, count, hidden));
  const unsloth_mlp_params mlp = mlp_params(weights, count);
  check(unsloth_mlp_forward(context().get(), &mlp, nullptr));
}

void Session::rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) {
  unsloth_rms_norm_params params = UNSLOTH_RMS_NORM_PARAMS_INIT;
  params.epsilon = static_cast<float>(model_->config().rms_norm_epsilon);
  params.x = x;
  params.weight = weight;
  params.out = out;
  check(unsloth_rms_norm_forward(context().get(), &params, nullptr));
}

void Session::linear(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor bias,
                     unsloth_tensor residual, unsloth_tensor out) {
  unsloth_linear_params params = UNSLOTH_LINEAR_PARAMS_INIT;
  params.x = x;
  params.weight = weight;
  params.bias = bias;
  params.residual = residual;
  params.out = out;
  check(unsloth_linear_forward(context().get(), &params, nullptr));
}

unsloth_attention_params Session::attention_params(size_t layer, size_t count) {
  unsloth_attention_params params = UNSLOTH_ATTENTION_PARAMS_INIT;
  params.causal = 1;
  params.q = heads(q_, count, model_->config().num_heads);
  params.out = heads(attention_, count, model_->config().num_heads);
  check(
      unsloth_kv_cache_layer_get(cache_.get(), static_cast<int64_t>(layer), &params.k, &params.v));
  params.cu_seqlens_q = batch_.cu_seqlens;
  params.seq_lens_k = batch_.seq_lens;
  params.block_table = batch_.block_table;
  params.max_seqlen_q = static_cast<int64_t>(count);
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_mlp_params Session::mlp_params(const LayerWeights &weights, size_t count) {
  unsloth_mlp_params params = UNSLOTH_MLP_PARAMS_INIT;
  params.activation = UNSLOTH_ACTIVATION_SILU;
  params.x = rows(normalized_, count, model_->config().hidden_size);
  params.gate_weight = weights.gate;
  params.up_weight = weights.up;
  params.down_weight = weights.down;
  params.residual = rows(hidden_, count, model_->config().hidden_size);
  params.out = params.residual;
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_tensor Session::rows(const Buffer &buffer, size_t count, uint64_t columns) const {
  return tensor(buffer.data(), dtype_, {count, columns});
}

unsloth_tensor Session::heads(const Buffer &buffer, size_t count, uint64_t num_heads) const {
  return tensor(buffer.data(), dtype_, {count, num_heads, model_->config().head_dim});
}

}  // namespace engine
