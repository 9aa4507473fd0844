#include "layer.h"

#include <algorithm>

#include "upload.h"

namespace llm {

Layer::Layer(const Context &context, const ModelConfig &config, const LayerTensors &weights,
             const Common &common)
    : context_(&context), config_(config), common_(common), tokens_(common.positions.shape[0]) {
  place(weights);
  measure(weights);
}

// The longer the list, the less is kept.
bool Layer::keeps(Activation activation) const {
  switch (activation) {
    case kNorm1:
    case kNorm2:
    case kProduct:
      return common_.policy < Policy::kElementwise;
    case kGateUp:
      return common_.policy < Policy::kMlp;
    case kQkv:
      return common_.policy < Policy::kProjections;
    default:
      return common_.policy < Policy::kFull;
  }
}

void Layer::place(const LayerTensors &weights) {
  const auto size = [](const unsloth_tensor &matrix, int i) { return matrix.shape[i]; };
  const int64_t hidden = size(weights.qkv, 1);
  const int64_t qkv = size(weights.qkv, 0);
  const int64_t attended = size(weights.output, 1);
  const int64_t gate_up = size(weights.gate_up, 0);
  const auto states = [this](int64_t columns) {
    return unsloth::tensor(nullptr, common_.dtype, {tokens_, columns});
  };
  activations_[kNorm1] = activations_[kNorm2] = activations_[kMid] = states(hidden);
  activations_[kQkv] = states(qkv);
  activations_[kAttended] = states(attended);
  activations_[kLse] = unsloth::tensor(nullptr, UNSLOTH_DTYPE_F32, {config_.num_heads, tokens_});
  activations_[kGateUp] = states(gate_up);
  activations_[kProduct] = states(gate_up / 2);
  gradients_[kDProduct] = states(gate_up / 2);
  gradients_[kDNorm] = gradients_[kDMid] = states(hidden);
  gradients_[kDAttended] = states(attended);
  gradients_[kDQkv] = states(qkv);

  for (int i = 0; i < kActivations; ++i) {
    size_t &end = keeps(static_cast<Activation>(i)) ? saved_size_ : scratch_;
    offsets_[i] = end;
    end = aligned(end + byte_count(activations_[i]));
  }
  for (int i = 0; i < kGradients; ++i) {
    gradient_offsets_[i] = scratch_;
    scratch_ = aligned(scratch_ + byte_count(gradients_[i]));
  }
}

// The addresses of a layer's activations; those of gradients are every layer's.
void Layer::bind(void *saved) {
  for (int i = 0; i < kActivations; ++i) {
    char *start = keeps(static_cast<Activation>(i)) ? static_cast<char *>(saved) : workspace_;
    activations_[i].data = start + offsets_[i];
  }
  for (int i = 0; i < kGradients; ++i) {
    gradients_[i].data = workspace_ + gradient_offsets_[i];
  }
}

void Layer::forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
                    void *saved) {
  bind(saved);
  norm(x, weights.attention_norm, activations_[kNorm1]);
  project(weights);
  attend();
  project_out(weights, x);
  norm(activations_[kMid], weights.mlp_norm, activations_[kNorm2]);
  run(product(activations_[kNorm2], weights.gate_up, {}, {}, activations_[kGateUp]));
  activate();
  run(product(activations_[kProduct], weights.down, {}, activations_[kMid], out));
}

void Layer::backward(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate,
                     unsloth_tensor x, unsloth_tensor dx, void *saved) {
  bind(saved);
  // What was not kept, by the calls that computed it.
  if (!keeps(kNorm1)) norm(x, weights.attention_norm, activations_[kNorm1]);
  if (!keeps(kQkv)) project(weights);
  if (!keeps(kAttended)) {
    attend();
    project_out(weights, x);
  }
  if (!keeps(kNorm2)) norm(activations_[kMid], weights.mlp_norm, activations_[kNorm2]);
  if (!keeps(kGateUp)) {
    run(product(activations_[kNorm2], weights.gate_up, {}, {}, activations_[kGateUp]));
  }
  if (!keeps(kProduct)) activate();

  // The MLP. Gradients of gate and up take their place.
  const unsloth_tensor gate_up = activations_[kGateUp];
  run(product_backward(dx, activations_[kProduct], weights.down, gradients_[kDProduct],
                       gradients.down, {}, accumulate));
  auto swiglu = unsloth::make<unsloth_swiglu_backward_params>();
  swiglu.activation = UNSLOTH_ACTIVATION_SILU;
  swiglu.gate = half(gate_up, 0);
  swiglu.up = half(gate_up, 1);
  swiglu.dout = gradients_[kDProduct];
  check(unsloth_swiglu_backward(context_->get(), &swiglu, context_->stream()));
  run(product_backward(gate_up, activations_[kNorm2], weights.gate_up, gradients_[kDNorm],
                       gradients.gate_up, {}, accumulate));
  auto norm2 = norm_backward_params(activations_[kMid], weights.mlp_norm, dx, gradients_[kDMid],
                                    gradients.mlp_norm, accumulate);
  check(unsloth_rms_norm_backward(context_->get(), &norm2, context_->stream()));

  // Attention.
  run(product_backward(gradients_[kDMid], activations_[kAttended], weights.output,
                       gradients_[kDAttended], gradients.output, gradients.output_bias,
                       accumulate));
  const auto attention = attention_backward_params();
  check(unsloth_attention_backward(context_->get(), &attention, context_->stream()));
  rotate(attention.dq, attention.dk, true);
  run(product_backward(gradients_[kDQkv], activations_[kNorm1], weights.qkv, gradients_[kDNorm],
                       gradients.qkv, gradients.qkv_bias, accumulate));
  auto norm1 = norm_backward_params(x, weights.attention_norm, gradients_[kDMid], dx,
                                    gradients.attention_norm, accumulate);
  check(unsloth_rms_norm_backward(context_->get(), &norm1, context_->stream()));
}

void Layer::norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const {
  auto params = unsloth::make<unsloth_rms_norm_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.x = x;
  params.weight = weight;
  params.out = out;
  check(unsloth_rms_norm_forward(context_->get(), &params, context_->stream()));
}

void Layer::project(const LayerTensors &weights) {
  const unsloth_tensor &qkv = activations_[kQkv];
  run(product(activations_[kNorm1], weights.qkv, weights.qkv_bias, {}, qkv));
  rotate(heads(qkv, 0), heads(qkv, 1), false);
}

void Layer::attend() {
  const auto params = attention_params();
  check(unsloth_attention_forward(context_->get(), &params, context_->stream()));
}

void Layer::project_out(const LayerTensors &weights, unsloth_tensor x) {
  run(product(activations_[kAttended], weights.output, weights.output_bias, x, activations_[kMid]));
}

void Layer::activate() {
  auto params = unsloth::make<unsloth_swiglu_params>();
  params.activation = UNSLOTH_ACTIVATION_SILU;
  params.gate = half(activations_[kGateUp], 0);
  params.up = half(activations_[kGateUp], 1);
  params.out = activations_[kProduct];
  check(unsloth_swiglu_forward(context_->get(), &params, context_->stream()));
}

unsloth_attention_params Layer::attention_params() const {
  const unsloth_tensor &attended = activations_[kAttended];
  auto params = unsloth::make<unsloth_attention_params>();
  params.causal = 1;
  params.q = heads(activations_[kQkv], 0);
  params.k = heads(activations_[kQkv], 1);
  params.v = heads(activations_[kQkv], 2);
  params.out =
      unsloth::tensor(attended.data, common_.dtype, {tokens_, config_.num_heads, config_.head_dim});
  params.lse = activations_[kLse];
  params.cu_seqlens_q = common_.cu_seqlens;
  params.cu_seqlens_k = common_.cu_seqlens;
  params.workspace = scratch();
  params.workspace_size = scratch_size_;
  return params;
}

unsloth_attention_backward_params Layer::attention_backward_params() const {
  const unsloth_attention_params forward = attention_params();
  auto params = unsloth::make<unsloth_attention_backward_params>();
  params.causal = 1;
  params.q = forward.q;
  params.k = forward.k;
  params.v = forward.v;
  params.out = forward.out;
  params.lse = forward.lse;
  params.cu_seqlens_q = common_.cu_seqlens;
  params.cu_seqlens_k = common_.cu_seqlens;
  params.dout = unsloth::tensor(gradients_[kDAttended].data, common_.dtype,
                                {tokens_, config_.num_heads, config_.head_dim});
  params.dq = heads(gradients_[kDQkv], 0);
  params.dk = heads(gradients_[kDQkv], 1);
  params.dv = heads(gradients_[kDQkv], 2);
  params.workspace = scratch();
  params.workspace_size = scratch_size_;
  return params;
}

// The gradient of what the norm gives is that of both norms in turn.
unsloth_rms_norm_backward_params Layer::norm_backward_params(
    unsloth_tensor x, unsloth_tensor weight, unsloth_tensor residual, unsloth_tensor dx,
    unsloth_tensor dweight, bool accumulate) const {
  auto params = unsloth::make<unsloth_rms_norm_backward_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.accumulate = accumulate && dweight.rank > 0 ? 1 : 0;
  params.x = x;
  params.dout = gradients_[kDNorm];
  params.dx = dx;
  params.dresidual = residual;
  params.weight = weight;
  params.dweight = dweight;
  params.workspace = scratch();
  params.workspace_size = scratch_size_;
  return params;
}

unsloth_linear_params Layer::product(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor bias,
                                     unsloth_tensor residual, unsloth_tensor out) const {
  auto params = unsloth::make<unsloth_linear_params>();
  params.x = x;
  params.weight = weight;
  params.bias = bias;
  params.residual = residual;
  params.out = out;
  params.workspace = scratch();
  params.workspace_size = scratch_size_;
  return params;
}

unsloth_linear_backward_params Layer::product_backward(unsloth_tensor dout, unsloth_tensor x,
                                                       unsloth_tensor weight, unsloth_tensor dx,
                                                       unsloth_tensor dweight, unsloth_tensor dbias,
                                                       bool accumulate) const {
  auto params = unsloth::make<unsloth_linear_backward_params>();
  params.accumulate = accumulate ? 1 : 0;
  params.dout = dout;
  params.x = x;
  params.weight = weight;
  params.dx = dx;
  params.dweight = dweight;
  params.dbias = dbias;
  params.workspace = scratch();
  params.workspace_size = scratch_size_;
  return params;
}

void Layer::run(const unsloth_linear_params &params) const {
  check(unsloth_linear_forward(context_->get(), &params, context_->stream()));
}

void Layer::run(const unsloth_linear_backward_params &params) const {
  check(unsloth_linear_backward(context_->get(), &params, context_->stream()));
}

// In place.
void Layer::rotate(unsloth_tensor q, unsloth_tensor k, bool inverse) const {
  auto params = unsloth::make<unsloth_rope_params>();
  params.inverse = inverse ? 1 : 0;
  params.rotation = rotation(config_, common_.rope_factors);
  params.q = q;
  params.k = k;
  params.positions = common_.positions;
  check(unsloth_rope_forward(context_->get(), &params, context_->stream()));
}

unsloth_tensor Layer::heads(const unsloth_tensor &columns, int which) const {
  const uint64_t first[] = {0, config_.q_size(), config_.q_size() + config_.kv_size()};
  const uint64_t count = which == 0 ? config_.num_heads : config_.num_kv_heads;
  char *start = static_cast<char *>(columns.data);
  return unsloth::tensor(start + first[which] * element_size(columns.dtype), columns.dtype,
                         {tokens_, count, config_.head_dim},
                         {columns.shape[1], config_.head_dim, 1});
}

unsloth_tensor Layer::half(const unsloth_tensor &gate_up, int which) const {
  const int64_t width = gate_up.shape[1] / 2;
  char *start = static_cast<char *>(gate_up.data);
  return unsloth::tensor(start + which * width * element_size(gate_up.dtype), gate_up.dtype,
                         {tokens_, width}, {gate_up.shape[1], 1});
}

// Each call's own workspace. All lie in one place, since the calls follow each other.
void Layer::measure(const LayerTensors &weights) {
  const auto need = [this](auto ask, const auto &params) {
    size_t size = 0;
    check(ask(context_->get(), &params, &size));
    scratch_size_ = std::max(scratch_size_, size);
  };
  // Addresses do not matter to these answers. Gradients are f32, and added to or not.
  const auto measure_product = [&](const unsloth_tensor &x, const unsloth_tensor &weight,
                                   const unsloth_tensor &bias, const unsloth_tensor &out,
                                   bool with_residual) {
    const auto forward = product(x, weight, bias, with_residual ? out : unsloth_tensor{}, out);
    need(unsloth_linear_workspace_size, forward);
    unsloth_tensor dweight = weight;
    dweight.dtype = UNSLOTH_DTYPE_F32;
    unsloth_tensor dbias = bias;
    dbias.dtype = UNSLOTH_DTYPE_F32;
    for (const bool accumulate : {false, true}) {
      auto backward = product_backward(out, x, weight, x, dweight, dbias, accumulate);
      need(unsloth_linear_backward_workspace_size, backward);
      backward.accumulate = 0;
      backward.dweight = backward.dbias = {};
      need(unsloth_linear_backward_workspace_size, backward);
    }
  };
  const unsloth_tensor &states = activations_[kMid];
  measure_product(states, weights.qkv, weights.qkv_bias, activations_[kQkv], false);
  measure_product(activations_[kAttended], weights.output, weights.output_bias, states, true);
  measure_product(states, weights.gate_up, {}, activations_[kGateUp], false);
  measure_product(activations_[kProduct], weights.down, {}, states, true);

  const auto forward = attention_params();
  need(unsloth_attention_workspace_size, forward);
  const auto backward = attention_backward_params();
  need(unsloth_attention_backward_workspace_size, backward);
  unsloth_tensor gain = weights.mlp_norm;
  gain.dtype = UNSLOTH_DTYPE_F32;
  for (const unsloth_tensor &dweight : {unsloth_tensor{}, gain}) {
    const auto norm = norm_backward_params(states, weights.mlp_norm, states, states, dweight, true);
    need(unsloth_rms_norm_backward_workspace_size, norm);
  }
  workspace_size_ = scratch_ + scratch_size_;
}

}  // namespace llm
