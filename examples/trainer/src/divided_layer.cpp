#include "divided_layer.h"

#include <algorithm>

#include "upload.h"

namespace llm {
namespace {

// Tensors one behind the other in one piece of memory, or their size where there is none.
class Places {
 public:
  explicit Places(void *memory) : memory_(static_cast<char *>(memory)) {}

  unsloth_tensor take(unsloth_dtype dtype, const unsloth::Sizes &shape) {
    void *const data = memory_ != nullptr ? memory_ + used_ : nullptr;
    const unsloth_tensor tensor = unsloth::tensor(data, dtype, shape);
    used_ = aligned(used_ + byte_count(tensor));
    return tensor;
  }
  size_t used() const { return used_; }

 private:
  char *memory_;
  size_t used_ = 0;
};

}  // namespace

DividedLayer::DividedLayer(const Context &context, const ModelConfig &config,
                           const LayerTensors &weights, const LayerTensors &gradients,
                           bool accumulate, const Common &common)
    : context_(&context), config_(config), common_(common) {
  kept_in(nullptr, &kept_size_);
  set_workspace(nullptr);
  measure(weights, gradients, accumulate);
}

DividedLayer::Kept DividedLayer::kept_in(void *memory, size_t *size) const {
  const uint64_t n = tokens();
  const unsloth_dtype dtype = common_.dtype;
  Places places(memory);
  Kept kept = {};
  kept.normalized = places.take(dtype, {n, config_.hidden_size});
  kept.projected = places.take(dtype, {n, num_projected(), config_.head_dim});
  kept.attended = places.take(dtype, {n, config_.num_heads, config_.head_dim});
  kept.lse = places.take(UNSLOTH_DTYPE_F32, {config_.num_heads, n});
  kept.middle = places.take(dtype, {n, config_.hidden_size});
  kept.mlp_normalized = places.take(dtype, {n, config_.hidden_size});
  // Its backward pass computes gate and up again where they are not kept.
  if (!common_.recompute) kept.gate_up = places.take(dtype, {n, 2 * config_.intermediate_size});
  if (size != nullptr) *size = places.used();
  return kept;
}

void DividedLayer::set_sequences(unsloth_tensor positions, unsloth_tensor cu_seqlens_q,
                                 unsloth_tensor cu_seqlens_k) {
  common_.positions = positions;
  common_.cu_seqlens_q = cu_seqlens_q;
  common_.cu_seqlens_k = cu_seqlens_k;
}

void DividedLayer::set_workspace(void *workspace) {
  const uint64_t n = tokens();
  Places places(workspace);
  scratch_.projected = places.take(common_.dtype, {n, num_projected(), config_.head_dim});
  scratch_.attended = places.take(common_.dtype, {n, config_.num_heads, config_.head_dim});
  scratch_.normalized = places.take(common_.dtype, {n, config_.hidden_size});
  scratch_size_ = places.used() + (common_.recompute ? kept_size_ : 0);
  if (workspace == nullptr) return;
  recomputed_ = static_cast<char *>(workspace) + places.used();
  workspace_ = static_cast<char *>(workspace) + scratch_size_;
}

// What calls need of the workspace; none of these answers depends on addresses.
void DividedLayer::measure(const LayerTensors &weights, const LayerTensors &gradients,
                           bool accumulate) {
  unsloth_context *const context = context_->get();
  const Kept kept = kept_in(nullptr, nullptr);
  const unsloth_tensor states = kept.normalized;
  size_t size = 0;
  const auto need = [&](unsloth_status status) {
    check(status);
    call_size_ = std::max(call_size_, size);
  };
  const auto qkv = projections(weights, kept);
  need(unsloth_linear_workspace_size(context, &qkv, &size));
  const auto over_all = attention(kept);
  need(unsloth_context_parallel_attention_workspace_size(context, &over_all, &size));
  const auto out = output(weights, states, kept);
  need(unsloth_linear_workspace_size(context, &out, &size));
  const auto forward = mlp(weights, kept, states);
  need(unsloth_mlp_workspace_size(context, &forward, &size));
  const auto back = mlp_backward(&forward, gradients, accumulate, states, kept);
  need(unsloth_mlp_backward_workspace_size(context, &back, &size));
  const auto norm = norm_backward(states, weights.mlp_norm, gradients.mlp_norm, accumulate,
                                  scratch_.normalized, states);
  need(unsloth_rms_norm_backward_workspace_size(context, &norm, &size));
  const auto out_back =
      linear_backward(matrix(kept.attended), states, weights.output, matrix(scratch_.attended),
                      gradients.output, gradients.output_bias, accumulate);
  need(unsloth_linear_backward_workspace_size(context, &out_back, &size));
  const auto over_all_back = attention_backward(kept);
  need(unsloth_context_parallel_attention_backward_workspace_size(context, &over_all_back, &size));
  const auto qkv_back =
      linear_backward(states, matrix(scratch_.projected), weights.qkv, scratch_.normalized,
                      gradients.qkv, gradients.qkv_bias, accumulate);
  need(unsloth_linear_backward_workspace_size(context, &qkv_back, &size));
}

void DividedLayer::forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
                           void *saved) const {
  const Kept kept = kept_in(common_.recompute ? recomputed_ : saved, nullptr);
  to_mlp(weights, x, kept);
  const auto params = mlp(weights, kept, out);
  check(unsloth_mlp_forward(context_->get(), &params, context_->stream()));
}

void DividedLayer::to_mlp(const LayerTensors &weights, unsloth_tensor x, const Kept &kept) const {
  unsloth_context *const context = context_->get();
  rms_norm(x, weights.attention_norm, kept.normalized);
  const auto qkv = projections(weights, kept);
  check(unsloth_linear_forward(context, &qkv, context_->stream()));
  rotate(kept.projected, false);
  const auto over_all = attention(kept);
  check(unsloth_context_parallel_attention_forward(context, &over_all, context_->stream()));
  const auto out = output(weights, x, kept);
  check(unsloth_linear_forward(context, &out, context_->stream()));
  rms_norm(kept.middle, weights.mlp_norm, kept.mlp_normalized);
}

// `dx` is the gradient of the layer's output, then of what the projections take in, then of `x`;
// that of `middle` is where the MLP leaves the gradient of what it takes in.
void DividedLayer::backward(const LayerTensors &weights, const LayerTensors &gradients,
                            bool accumulate, unsloth_tensor x, unsloth_tensor dx,
                            void *saved) const {
  unsloth_context *const context = context_->get();
  const Kept kept = kept_in(common_.recompute ? recomputed_ : saved, nullptr);
  if (common_.recompute) to_mlp(weights, x, kept);
  const auto forward = mlp(weights, kept, dx);
  const auto mlp_back = mlp_backward(&forward, gradients, accumulate, dx, kept);
  check(unsloth_mlp_backward(context, &mlp_back, context_->stream()));
  const auto mlp_norm = norm_backward(kept.middle, weights.mlp_norm, gradients.mlp_norm, accumulate,
                                      scratch_.normalized, dx);
  check(unsloth_rms_norm_backward(context, &mlp_norm, context_->stream()));

  const auto out_back = linear_backward(matrix(kept.attended), scratch_.normalized, weights.output,
                                        matrix(scratch_.attended), gradients.output,
                                        gradients.output_bias, accumulate);
  check(unsloth_linear_backward(context, &out_back, context_->stream()));
  const auto over_all = attention_backward(kept);
  check(unsloth_context_parallel_attention_backward(context, &over_all, context_->stream()));
  rotate(scratch_.projected, true);
  const auto qkv_back = linear_backward(kept.normalized, matrix(scratch_.projected), weights.qkv,
                                        dx, gradients.qkv, gradients.qkv_bias, accumulate);
  check(unsloth_linear_backward(context, &qkv_back, context_->stream()));
  const auto norm = norm_backward(x, weights.attention_norm, gradients.attention_norm, accumulate,
                                  dx, scratch_.normalized);
  check(unsloth_rms_norm_backward(context, &norm, context_->stream()));
}

unsloth_linear_params DividedLayer::projections(const LayerTensors &weights,
                                                const Kept &kept) const {
  auto params = unsloth::make<unsloth_linear_params>();
  params.x = kept.normalized;
  params.weight = weights.qkv;
  params.bias = weights.qkv_bias;
  params.out = matrix(kept.projected);
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_linear_params DividedLayer::output(const LayerTensors &weights, unsloth_tensor x,
                                           const Kept &kept) const {
  auto params = unsloth::make<unsloth_linear_params>();
  params.x = matrix(kept.attended);
  params.weight = weights.output;
  params.bias = weights.output_bias;
  params.residual = x;
  params.out = kept.middle;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_context_parallel_attention_params DividedLayer::attention(const Kept &kept) const {
  const uint64_t q = config_.num_heads;
  const uint64_t kv = config_.num_kv_heads;
  auto params = unsloth::make<unsloth_context_parallel_attention_params>();
  params.method = UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
  params.comm = common_.group.comm;
  params.causal = 1;
  params.q = heads(kept.projected, 0, q);
  params.k = heads(kept.projected, q, kv);
  params.v = heads(kept.projected, q + kv, kv);
  params.out = kept.attended;
  params.lse = kept.lse;
  params.cu_seqlens_q = common_.cu_seqlens_q;
  params.cu_seqlens_k = common_.cu_seqlens_k;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_context_parallel_attention_backward_params DividedLayer::attention_backward(
    const Kept &kept) const {
  const uint64_t q = config_.num_heads;
  const uint64_t kv = config_.num_kv_heads;
  const auto forward = attention(kept);
  auto params = unsloth::make<unsloth_context_parallel_attention_backward_params>();
  params.method = forward.method;
  params.comm = forward.comm;
  params.causal = forward.causal;
  params.deterministic = common_.deterministic ? 1 : 0;
  params.q = forward.q;
  params.k = forward.k;
  params.v = forward.v;
  params.out = forward.out;
  params.lse = forward.lse;
  params.cu_seqlens_q = forward.cu_seqlens_q;
  params.cu_seqlens_k = forward.cu_seqlens_k;
  params.dout = scratch_.attended;
  params.dq = heads(scratch_.projected, 0, q);
  params.dk = heads(scratch_.projected, q, kv);
  params.dv = heads(scratch_.projected, q + kv, kv);
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_mlp_params DividedLayer::mlp(const LayerTensors &weights, const Kept &kept,
                                     unsloth_tensor out) const {
  auto params = unsloth::make<unsloth_mlp_params>();
  params.activation = UNSLOTH_ACTIVATION_SILU;
  params.x = kept.mlp_normalized;
  params.gate_up_weight = weights.gate_up;
  params.down_weight = weights.down;
  params.residual = kept.middle;
  params.out = out;
  params.gate_up_out = kept.gate_up;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_mlp_backward_params DividedLayer::mlp_backward(const unsloth_mlp_params *forward,
                                                       const LayerTensors &gradients,
                                                       bool accumulate, unsloth_tensor dout,
                                                       const Kept &kept) const {
  auto params = unsloth::make<unsloth_mlp_backward_params>();
  params.accumulate = accumulate ? 1 : 0;
  params.forward = forward;
  params.gate_up = kept.gate_up;
  params.dout = dout;
  params.dx = scratch_.normalized;
  params.dgate_up_weight = gradients.gate_up;
  params.ddown_weight = gradients.down;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

unsloth_linear_backward_params DividedLayer::linear_backward(
    unsloth_tensor x, unsloth_tensor dout, unsloth_tensor weight, unsloth_tensor dx,
    unsloth_tensor dweight, unsloth_tensor dbias, bool accumulate) const {
  auto params = unsloth::make<unsloth_linear_backward_params>();
  params.accumulate = accumulate ? 1 : 0;
  params.dout = dout;
  params.x = x;
  params.weight = weight;
  params.dx = dx;
  params.dweight = dweight;
  params.dbias = dbias;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

// `dout` becomes the gradient of `x`, which `past` reaches past the block.
unsloth_rms_norm_backward_params DividedLayer::norm_backward(unsloth_tensor x,
                                                             unsloth_tensor weight,
                                                             unsloth_tensor dweight,
                                                             bool accumulate, unsloth_tensor dout,
                                                             unsloth_tensor past) const {
  auto params = unsloth::make<unsloth_rms_norm_backward_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.accumulate = accumulate ? 1 : 0;
  params.x = x;
  params.dout = dout;
  params.dresidual = past;
  params.weight = weight;
  params.dweight = dweight;
  params.workspace = workspace_;
  params.workspace_size = call_size_;
  return params;
}

// Queries and keys, or their gradients back.
void DividedLayer::rotate(unsloth_tensor projected, bool back) const {
  auto params = unsloth::make<unsloth_rope_params>();
  params.inverse = back ? 1 : 0;
  params.rotation = rotation(config_, common_.rope_factors);
  params.q = heads(projected, 0, config_.num_heads);
  params.k = heads(projected, config_.num_heads, config_.num_kv_heads);
  params.positions = common_.positions;
  check(unsloth_rope_forward(context_->get(), &params, context_->stream()));
}

void DividedLayer::rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const {
  auto params = unsloth::make<unsloth_rms_norm_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.x = x;
  params.weight = weight;
  params.out = out;
  check(unsloth_rms_norm_forward(context_->get(), &params, context_->stream()));
}

unsloth_tensor DividedLayer::heads(const unsloth_tensor &tensor, uint64_t first,
                                   uint64_t count) const {
  const auto all = static_cast<uint64_t>(tensor.shape[1]);
  const uint64_t offset = first * config_.head_dim * element_size(tensor.dtype);
  void *const data = tensor.data != nullptr ? static_cast<char *>(tensor.data) + offset : nullptr;
  return unsloth::tensor(data, tensor.dtype, {tokens(), count, config_.head_dim},
                         {all * config_.head_dim, config_.head_dim, uint64_t{1}});
}

unsloth_tensor DividedLayer::matrix(const unsloth_tensor &tensor) const {
  const auto columns = static_cast<uint64_t>(tensor.shape[1] * tensor.shape[2]);
  return unsloth::tensor(tensor.data, tensor.dtype, {tokens(), columns});
}

}  // namespace llm
