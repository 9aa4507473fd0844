#include "context_parallel.h"

#include <algorithm>

#include "upload.h"

namespace llm {
namespace {

// How ranks divide a prompt of `length` tokens.
unsloth_context_parallel_tokens_params division(const Group &group, uint64_t length) {
  unsloth_context_parallel_tokens_params params = UNSLOTH_CONTEXT_PARALLEL_TOKENS_PARAMS_INIT;
  params.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
  params.rank = group.rank;
  params.size = group.size;
  params.batch = 1;
  params.length = static_cast<int64_t>(length);
  return params;
}

// Of each rank, padding among them.
size_t rows_of_prompt(const Group &group, uint64_t length) {
  const unsloth_context_parallel_tokens_params params = division(group, length);
  int64_t rows = 0;
  check(unsloth_context_parallel_tokens_get(&params, &rows, nullptr, nullptr, 0));
  return static_cast<size_t>(rows);
}

}  // namespace

ContextParallel::ContextParallel(const Model &model, uint64_t capacity)
    : model_(&model),
      group_(model.ranks().context),
      dtype_(model.hidden_dtype()),
      capacity_(capacity),
      max_rows_(rows_of_prompt(group_, capacity)) {
  const Context &context = model.context();
  const uint64_t head_bytes = model.config().head_dim * element_size(dtype_);
  positions_ = Buffer(context, max_rows_ * sizeof(int32_t));
  projected_ = Buffer(context, max_rows_ * num_projected() * head_bytes);
  attended_ = Buffer(context, max_rows_ * model.config().num_heads * head_bytes);
  partials_ = Buffer(context, static_cast<uint64_t>(group_.size) * partial_size() * sizeof(float));
}

// A rank has at most two tokens more than its share of a prompt, since all have as many rows and
// these are even, and less than one more than its share of the tokens behind it.
uint64_t ContextParallel::max_kept() const {
  const auto size = static_cast<uint64_t>(group_.size);
  return (capacity_ + size - 1) / size + 2;
}

uint64_t ContextParallel::bytes() const {
  return positions_.bytes() + projected_.bytes() + attended_.bytes() + partials_.bytes();
}

void ContextParallel::begin(uint64_t length, size_t count) {
  tokens_.clear();
  std::vector<int32_t> positions;
  if (length > 0) {
    const bool keeps =
        length % static_cast<uint64_t>(group_.size) == static_cast<uint64_t>(group_.rank);
    positions.push_back(static_cast<int32_t>(length));
    tokens_.push_back(0);
    num_kept_ = keeps ? 1 : 0;
  } else {
    const size_t rows = rows_of_prompt(group_, count);
    const unsloth_context_parallel_tokens_params params = division(group_, count);
    std::vector<int64_t> ids(rows);
    int64_t number = 0;
    positions.resize(rows);
    check(
        unsloth_context_parallel_tokens_get(&params, &number, positions.data(), ids.data(), rows));
    for (const int64_t id : ids) {
      if (id >= 0) tokens_.push_back(static_cast<uint32_t>(id));
    }
    num_kept_ = tokens_.size();
    // Which of two chunks for every rank ends the prompt.
    const auto chunk = static_cast<int32_t>((count - 1) / (rows / 2));
    speaker_ = chunk < group_.size ? chunk : 2 * group_.size - 1 - chunk;
  }
  num_rows_ = positions.size();
  positions_.upload(positions.data(), positions.size() * sizeof(int32_t));
}

size_t ContextParallel::workspace_size(size_t layer, const Call &call) const {
  unsloth_context *const context = model_->context().get();
  size_t size = 0;
  size_t most = 0;
  for (const unsloth_linear_params &params : projections(layer, call)) {
    check(unsloth_linear_workspace_size(context, &params, &size));
    most = std::max(most, size);
  }
  const unsloth_linear_params out = output(layer, call);
  check(unsloth_linear_workspace_size(context, &out, &size));
  most = std::max(most, size);
  if (is_prompt()) {
    const unsloth_context_parallel_attention_params attention = over_prompt(call);
    check(unsloth_context_parallel_attention_workspace_size(context, &attention, &size));
  } else {
    const unsloth_attention_params attention = over_kept(layer, call);
    check(unsloth_attention_workspace_size(context, &attention, &size));
  }
  return std::max(most, size);
}

void ContextParallel::attend(size_t layer, const Call &call) const {
  const Context &context = model_->context();
  for (const unsloth_linear_params &params : projections(layer, call)) {
    check(unsloth_linear_forward(context.get(), &params, context.stream()));
  }
  rotate();
  if (num_kept_ > 0) keep(layer, call);
  if (is_prompt()) {
    const unsloth_context_parallel_attention_params params = over_prompt(call);
    check(unsloth_context_parallel_attention_forward(context.get(), &params, context.stream()));
  } else {
    const unsloth_attention_params params = over_kept(layer, call);
    check(unsloth_attention_forward(context.get(), &params, context.stream()));
    merge();
  }
  const unsloth_linear_params out = output(layer, call);
  check(unsloth_linear_forward(context.get(), &out, context.stream()));
}

std::vector<unsloth_linear_params> ContextParallel::projections(size_t layer,
                                                                const Call &call) const {
  const ModelConfig &config = model_->config();
  const LayerWeights &weights = model_->layers()[layer];
  std::vector<unsloth_linear_params> all;
  const auto add = [&](uint64_t first, uint64_t heads, unsloth_tensor weight, unsloth_tensor bias) {
    unsloth_linear_params params = UNSLOTH_LINEAR_PARAMS_INIT;
    params.x = call.normalized;
    params.weight = weight;
    params.bias = bias;
    const unsloth_tensor out = projected(first, heads, num_rows_);
    params.out = unsloth::tensor(out.data, dtype_, {num_rows_, heads * config.head_dim},
                                 {num_projected() * config.head_dim, uint64_t{1}});
    params.workspace = call.workspace;
    params.workspace_size = call.workspace_size;
    all.push_back(params);
  };
  if (weights.qkv.rank != 0) {
    add(0, num_projected(), weights.qkv, weights.qkv_bias);
  } else {
    add(0, config.num_heads, weights.q, weights.q_bias);
    add(config.num_heads, config.num_kv_heads, weights.k, weights.k_bias);
    add(config.num_heads + config.num_kv_heads, config.num_kv_heads, weights.v, weights.v_bias);
  }
  return all;
}

unsloth_linear_params ContextParallel::output(size_t layer, const Call &call) const {
  const ModelConfig &config = model_->config();
  const LayerWeights &weights = model_->layers()[layer];
  unsloth_linear_params params = UNSLOTH_LINEAR_PARAMS_INIT;
  params.x = unsloth::tensor(attended_.data(), dtype_, {num_rows_, config.q_size()});
  params.weight = weights.attention_output;
  params.bias = weights.attention_output_bias;
  params.residual = call.hidden;
  params.out = call.hidden;
  const Group &tensor = model_->ranks().tensor;
  params.parallel = tensor.parallel();
  if (tensor.size > 1) params.parallel.partition = UNSLOTH_PARTITION_ROW;
  params.workspace = call.workspace;
  params.workspace_size = call.workspace_size;
  return params;
}

unsloth_context_parallel_attention_params ContextParallel::over_prompt(const Call &call) const {
  const ModelConfig &config = model_->config();
  unsloth_context_parallel_attention_params params = UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
  params.method = UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
  params.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
  params.comm = group_.comm;
  params.causal = 1;
  params.q = sequence(0, config.num_heads);
  params.k = sequence(config.num_heads, config.num_kv_heads);
  params.v = sequence(config.num_heads + config.num_kv_heads, config.num_kv_heads);
  params.out = attended();
  params.workspace = call.workspace;
  params.workspace_size = call.workspace_size;
  return params;
}

// Of one token over what this rank has kept, into its part of what is merged. Only one rank's batch
// has the token, so that the query is given as a batch of its own; it is the last, and sees all.
unsloth_attention_params ContextParallel::over_kept(size_t layer, const Call &call) const {
  const ModelConfig &config = model_->config();
  unsloth_attention_params params = UNSLOTH_ATTENTION_PARAMS_INIT;
  check(unsloth_kv_cache_attention_prepare(call.cache, static_cast<int64_t>(layer), &params));
  params.cu_seqlens_q = unsloth_tensor{};
  params.max_seqlen_q = 0;
  params.causal = 0;
  params.q = sequence(0, config.num_heads);
  float *const own =
      static_cast<float *>(partials_.data()) + static_cast<uint64_t>(group_.rank) * partial_size();
  params.out = unsloth::tensor(own, UNSLOTH_DTYPE_F32, {1, 1, config.num_heads, config.head_dim});
  params.lse = unsloth::tensor(own + config.q_size(), UNSLOTH_DTYPE_F32, {1, config.num_heads, 1});
  params.workspace = call.workspace;
  params.workspace_size = call.workspace_size;
  return params;
}

void ContextParallel::rotate() const {
  const Context &context = model_->context();
  const ModelConfig &config = model_->config();
  unsloth_rope_params params = UNSLOTH_ROPE_PARAMS_INIT;
  params.rotation = rotation(config, model_->rope_factors());
  params.q = projected(0, config.num_heads, num_rows_);
  params.k = projected(config.num_heads, config.num_kv_heads, num_rows_);
  params.positions = unsloth::tensor(positions_.data(), UNSLOTH_DTYPE_I32, {num_rows_});
  check(unsloth_rope_forward(context.get(), &params, context.stream()));
}

// Padding is behind what is kept.
void ContextParallel::keep(size_t layer, const Call &call) const {
  const ModelConfig &config = model_->config();
  unsloth_kv_cache_append_params params = UNSLOTH_KV_CACHE_APPEND_PARAMS_INIT;
  params.layer = static_cast<int64_t>(layer);
  params.k = projected(config.num_heads, config.num_kv_heads, num_kept_);
  params.v = projected(config.num_heads + config.num_kv_heads, config.num_kv_heads, num_kept_);
  check(unsloth_kv_cache_append(call.cache, &params, model_->context().stream()));
}

void ContextParallel::merge() const {
  const Context &context = model_->context();
  const ModelConfig &config = model_->config();
  const auto size = static_cast<uint64_t>(group_.size);
  unsloth_all_gather_params gather = UNSLOTH_ALL_GATHER_PARAMS_INIT;
  gather.comm = group_.comm;
  gather.out = unsloth::tensor(partials_.data(), UNSLOTH_DTYPE_F32, {size, partial_size()});
  check(unsloth_all_gather_forward(context.get(), &gather, context.stream()));

  float *const partials = static_cast<float *>(partials_.data());
  unsloth_attention_merge_params params = UNSLOTH_ATTENTION_MERGE_PARAMS_INIT;
  params.outs = unsloth::tensor(
      partials, UNSLOTH_DTYPE_F32,
      {size, uint64_t{1}, uint64_t{1}, config.num_heads, config.head_dim},
      {partial_size(), config.q_size(), config.q_size(), config.head_dim, uint64_t{1}});
  params.lses = unsloth::tensor(partials + config.q_size(), UNSLOTH_DTYPE_F32,
                                {size, uint64_t{1}, config.num_heads, uint64_t{1}},
                                {partial_size(), config.num_heads, uint64_t{1}, uint64_t{1}});
  params.out = attended();
  check(unsloth_attention_merge_forward(context.get(), &params, context.stream()));
}

unsloth_tensor ContextParallel::projected(uint64_t first, uint64_t heads, size_t rows) const {
  const uint64_t head_dim = model_->config().head_dim;
  char *const data =
      static_cast<char *>(projected_.data()) + first * head_dim * element_size(dtype_);
  return unsloth::tensor(data, dtype_, {rows, heads, head_dim},
                         {num_projected() * head_dim, head_dim, uint64_t{1}});
}

unsloth_tensor ContextParallel::sequence(uint64_t first, uint64_t heads) const {
  const uint64_t head_dim = model_->config().head_dim;
  const uint64_t row = num_projected() * head_dim;
  return unsloth::tensor(projected(first, heads, num_rows_).data, dtype_,
                         {uint64_t{1}, num_rows_, heads, head_dim},
                         {num_rows_ * row, row, head_dim, uint64_t{1}});
}

unsloth_tensor ContextParallel::attended() const {
  const ModelConfig &config = model_->config();
  return unsloth::tensor(attended_.data(), dtype_,
                         {uint64_t{1}, num_rows_, config.num_heads, config.head_dim});
}

uint64_t ContextParallel::num_projected() const {
  return model_->config().num_heads + 2 * model_->config().num_kv_heads;
}

uint64_t ContextParallel::partial_size() const {
  const uint64_t size = model_->config().num_heads * (model_->config().head_dim + 1);
  return aligned(size * sizeof(float)) / sizeof(float);
}

}  // namespace llm
