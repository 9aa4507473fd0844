#include "layer.h"

#include <algorithm>

#include "upload.h"

namespace llm {

// The arguments of both passes, which point at each other.
struct Layer::Call {
  Call() = default;
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;

  unsloth_attention_block_params attention;
  unsloth_mlp_params mlp;
  unsloth_decoder_layer_params forward;
  unsloth_attention_block_backward_params attention_backward;
  unsloth_mlp_backward_params mlp_backward;
  unsloth_decoder_layer_backward_params backward;
};

Layer::Layer(const Context &context, const ModelConfig &config, const LayerTensors &weights,
             const LayerTensors &gradients, bool accumulate, const Common &common)
    : context_(&context), config_(config), common_(common) {
  if (common.context.size > 1) {
    const DividedLayer::Common divided = {
        common.context,      common.positions,
        common.cu_seqlens,   common.cu_seqlens_k,
        common.rope_factors, common.checkpointing != UNSLOTH_CHECKPOINTING_NONE,
        common.dtype,        common.deterministic};
    divided_ =
        std::make_unique<DividedLayer>(context, config, weights, gradients, accumulate, divided);
    saved_size_ = divided_->saved_size();
    workspace_size_ = divided_->workspace_size();
    return;
  }
  // Addresses do not matter to these answers.
  const unsloth_tensor states =
      unsloth::tensor(nullptr, common.dtype, {common.positions.shape[0], config.hidden_size});
  Call call;
  set_forward(weights, states, states, nullptr, &call);
  check(unsloth_decoder_layer_saved_size(context.get(), &call.forward, &saved_size_));
  saved_size_ = aligned(saved_size_);
  check(unsloth_decoder_layer_workspace_size(context.get(), &call.forward, &workspace_size_));
  for (const bool adds : {accumulate, accumulate && !common.overwrites}) {
    set_backward(gradients, adds, states, &call);
    size_t size = 0;
    check(unsloth_decoder_layer_backward_workspace_size(context.get(), &call.backward, &size));
    workspace_size_ = std::max(workspace_size_, size);
  }
}

void Layer::set_sequences(unsloth_tensor positions, unsloth_tensor cu_seqlens,
                          unsloth_tensor cu_seqlens_k) {
  common_.positions = positions;
  common_.cu_seqlens = cu_seqlens;
  if (divided_) divided_->set_sequences(positions, cu_seqlens, cu_seqlens_k);
}

void Layer::set_workspace(void *workspace) {
  workspace_ = workspace;
  if (divided_) divided_->set_workspace(workspace);
}

void Layer::forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
                    void *saved) const {
  if (divided_) return divided_->forward(weights, x, out, saved);
  Call call;
  set_forward(weights, x, out, saved, &call);
  check(unsloth_decoder_layer_forward(context_->get(), &call.forward, context_->stream()));
}

void Layer::backward(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate,
                     unsloth_tensor x, unsloth_tensor dx, void *saved) const {
  if (divided_) return divided_->backward(weights, gradients, accumulate, x, dx, saved);
  Call call;
  set_forward(weights, x, {}, saved, &call);
  set_backward(gradients, accumulate, dx, &call);
  check(unsloth_decoder_layer_backward(context_->get(), &call.backward, context_->stream()));
}

void Layer::set_forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
                        void *saved, Call *call) const {
  auto &attention = call->attention = unsloth::make<unsloth_attention_block_params>();
  attention.num_heads = static_cast<int64_t>(config_.num_heads);
  attention.num_kv_heads = static_cast<int64_t>(config_.num_kv_heads);
  attention.head_dim = static_cast<int64_t>(config_.head_dim);
  attention.rotate = 1;
  attention.rotation = rotation(config_, common_.rope_factors);
  attention.positions = common_.positions;
  attention.cu_seqlens = common_.cu_seqlens;
  attention.qkv_weight = weights.qkv;
  attention.qkv_bias = weights.qkv_bias;
  attention.out_weight = weights.output;
  attention.out_bias = weights.output_bias;

  auto &mlp = call->mlp = unsloth::make<unsloth_mlp_params>();
  mlp.activation = UNSLOTH_ACTIVATION_SILU;
  mlp.gate_up_weight = weights.gate_up;
  mlp.down_weight = weights.down;

  auto &forward = call->forward = unsloth::make<unsloth_decoder_layer_params>();
  forward.checkpointing = common_.checkpointing;
  forward.norm_epsilon = static_cast<float>(config_.rms_norm_epsilon);
  forward.attention = &attention;
  forward.mlp = &mlp;
  forward.x = x;
  forward.attention_norm = weights.attention_norm;
  forward.mlp_norm = weights.mlp_norm;
  forward.out = out;
  forward.saved = saved;
  forward.saved_size = saved_size_;
  forward.workspace = workspace_;
  forward.workspace_size = workspace_size_;
}

void Layer::set_backward(const LayerTensors &gradients, bool accumulate, unsloth_tensor dx,
                         Call *call) const {
  auto &attention = call->attention_backward =
      unsloth::make<unsloth_attention_block_backward_params>();
  attention.dqkv_weight = gradients.qkv;
  attention.dqkv_bias = gradients.qkv_bias;
  attention.dout_weight = gradients.output;
  attention.dout_bias = gradients.output_bias;
  auto &mlp = call->mlp_backward = unsloth::make<unsloth_mlp_backward_params>();
  mlp.dgate_up_weight = gradients.gate_up;
  mlp.ddown_weight = gradients.down;

  auto &backward = call->backward = unsloth::make<unsloth_decoder_layer_backward_params>();
  backward.accumulate = accumulate ? 1 : 0;
  backward.deterministic = common_.deterministic ? 1 : 0;
  backward.forward = &call->forward;
  backward.attention = &attention;
  backward.mlp = &mlp;
  backward.dout = dx;
  backward.dattention_norm = gradients.attention_norm;
  backward.dmlp_norm = gradients.mlp_norm;
  backward.workspace = workspace_;
  backward.workspace_size = workspace_size_;
}

}  // namespace llm
