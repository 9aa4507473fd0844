#include "step.h"

#include <algorithm>

#include "upload.h"

// With h the hidden states of all tokens of a batch:
//
//   h = embedding[ids]
//   for each layer:  h = layer(h)
//   loss = cross_entropy(rms_norm(h) output^T, targets)
//
// and back in the opposite order. The gradient of the logits is found together with the loss, and
// neither of them is ever stored whole.

namespace llm {

Step::Step(const Context &context, const ModelConfig &config, const Weights &weights, Lora *lora,
           const Options &options, unsloth_tensor loss_scale)
    : context_(&context),
      config_(config),
      weights_(&weights),
      lora_(lora),
      options_(options),
      loss_scale_(loss_scale) {
  reserve();
  if (options.use_graph && context.backend() == UNSLOTH_BACKEND_CUDA) {
    driver_ = std::make_unique<CudaDriver>();
  }
}

void Step::reserve() {
  const uint64_t states = options_.tokens * config_.hidden_size * element_size(options_.dtype);
  ids_ = Buffer(*context_, options_.tokens * sizeof(TokenId));
  targets_ = Buffer(*context_, options_.tokens * sizeof(int32_t));
  positions_ = Buffer(*context_, options_.tokens * sizeof(int32_t));
  cu_seqlens_ = Buffer(*context_, (options_.max_sequences + 1) * sizeof(int32_t));
  hidden_ = Buffer(*context_, (config_.num_layers + 1) * aligned(states));
  normalized_ = Buffer(*context_, states);
  gradient_ = Buffer(*context_, states);
  loss_ = Buffer(*context_, sizeof(float));
  denominator_ = Buffer(*context_, sizeof(float));

  size_t workspace = lora_ != nullptr ? lora_->workspace_size() : 0;
  const auto need = [&workspace](size_t size) { workspace = std::max(workspace, size); };
  size_t size = 0;
  const bool full = lora_ == nullptr;
  // Layers have the same shapes, so that one's answers hold for all.
  Layer::Common common = {};
  common.positions = unsloth::tensor(positions_.data(), UNSLOTH_DTYPE_I32, {options_.tokens});
  common.cu_seqlens =
      unsloth::tensor(cu_seqlens_.data(), UNSLOTH_DTYPE_I32, {options_.max_sequences + 1});
  common.rope_factors = weights_->rope_factors();
  common.checkpointing = options_.checkpointing;
  common.dtype = options_.dtype;
  // A LoRA's matrices may be of another dtype when they are merged, which products differ by.
  layer_.emplace(*context_, config_, full ? weights_->tensors().layers[0] : lora_->like_merged(),
                 full ? weights_->gradients().layers[0] : lora_->gradients(), full, common);
  saved_ = Buffer(*context_, config_.num_layers * layer_->saved_size());
  need(layer_->workspace_size());
  const auto loss = loss_params(true);
  check(unsloth_linear_cross_entropy_workspace_size(context_->get(), &loss, &size));
  need(size);
  const auto norm = norm_backward_params();
  check(unsloth_rms_norm_backward_workspace_size(context_->get(), &norm, &size));
  need(size);
  if (full) {
    const auto embedding = embedding_backward_params();
    check(unsloth_embedding_backward_workspace_size(context_->get(), &embedding, &size));
    need(size);
  }
  workspace_ = Buffer(*context_, workspace);
  layer_->set_workspace(workspace_.data());
  if (lora_ != nullptr) lora_->set_workspace(workspace_);
}

void Step::set_denominator(uint64_t learned) {
  // Where nothing is learned losses are zero, whatever divides them.
  const auto value = static_cast<float>(std::max<uint64_t>(learned, 1));
  denominator_.upload(&value, sizeof(value));
}

float Step::run(const Batch &batch) {
  upload(batch);
  if (driver_ == nullptr || !has_run_) {
    // Before the first graph, too: libraries of the driver load kernels at their first use.
    queue_passes();
    has_run_ = true;
  } else {
    // All batches have the same shapes and addresses.
    if (!graph_) {
      graph_ =
          std::make_unique<CudaGraph>(*driver_, context_->stream(), [this] { queue_passes(); });
    }
    graph_->launch(context_->stream());
  }
  return read_loss();
}

void Step::queue_passes() {
  queue_forward();
  queue_loss(true);
  queue_backward();
}

float Step::evaluate(const Batch &batch) {
  upload(batch);
  queue_forward();
  queue_loss(false);
  return read_loss();
}

void Step::upload(const Batch &batch) {
  const auto write = [](const auto &values, Buffer *buffer) {
    buffer->upload(values.data(), values.size() * sizeof(values[0]));
  };
  write(batch.ids, &ids_);
  write(batch.targets, &targets_);
  write(batch.positions, &positions_);
  write(batch.cu_seqlens, &cu_seqlens_);
}

void Step::queue_forward() {
  const auto embedding = embedding_params();
  check(unsloth_embedding_forward(context_->get(), &embedding, context_->stream()));
  for (size_t i = 0; i < config_.num_layers; ++i) {
    const LayerTensors weights = lora_ != nullptr ? lora_->merge(i) : weights_->tensors().layers[i];
    layer_->forward(weights, hidden(i), hidden(i + 1), saved(i));
  }
  const auto norm = norm_params();
  check(unsloth_rms_norm_forward(context_->get(), &norm, context_->stream()));
}

void Step::queue_loss(bool with_gradients) {
  const auto loss = loss_params(with_gradients);
  check(unsloth_linear_cross_entropy_forward(context_->get(), &loss, context_->stream()));
}

void Step::queue_backward() {
  const auto norm = norm_backward_params();
  check(unsloth_rms_norm_backward(context_->get(), &norm, context_->stream()));
  for (size_t i = config_.num_layers; i-- > 0;) {
    if (lora_ == nullptr) {
      layer_->backward(weights_->tensors().layers[i], weights_->gradients().layers[i], true,
                       hidden(i), states(gradient_, 0), saved(i));
      continue;
    }
    // What a LoRA makes of a layer is in memory that the layers after it have used since, and the
    // gradients of whole matrices are those of one layer and one batch.
    layer_->backward(lora_->merge(i), lora_->gradients(), false, hidden(i), states(gradient_, 0),
                     saved(i));
    lora_->add_gradients(i);
  }
  if (lora_ != nullptr) return;
  const auto embedding = embedding_backward_params();
  check(unsloth_embedding_backward(context_->get(), &embedding, context_->stream()));
}

float Step::read_loss() const {
  float loss = 0;
  loss_.download(&loss, sizeof(loss));
  return loss;
}

unsloth_embedding_params Step::embedding_params() const {
  auto params = unsloth::make<unsloth_embedding_params>();
  params.table = weights_->tensors().embedding;
  params.ids = ids();
  params.out = hidden(0);
  return params;
}

// A tied embedding has the gradient of the output projection already.
unsloth_embedding_backward_params Step::embedding_backward_params() const {
  auto params = unsloth::make<unsloth_embedding_backward_params>();
  params.accumulate = 1;
  params.dout = states(gradient_, 0);
  params.ids = ids();
  params.dweight = weights_->gradients().embedding;
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_rms_norm_params Step::norm_params() const {
  auto params = unsloth::make<unsloth_rms_norm_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.x = hidden(config_.num_layers);
  params.weight = weights_->tensors().output_norm;
  params.out = states(normalized_, 0);
  return params;
}

unsloth_rms_norm_backward_params Step::norm_backward_params() const {
  auto params = unsloth::make<unsloth_rms_norm_backward_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.accumulate = lora_ == nullptr ? 1 : 0;
  params.x = hidden(config_.num_layers);
  params.dout = states(gradient_, 0);
  params.weight = weights_->tensors().output_norm;
  params.dweight = weights_->gradients().output_norm;
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_linear_cross_entropy_params Step::loss_params(bool with_gradients) const {
  const ModelTensors &weights = weights_->tensors();
  const ModelTensors &gradients = weights_->gradients();
  const bool tied = weights.output.rank == 0;
  auto params = unsloth::make<unsloth_linear_cross_entropy_params>();
  params.reduction = UNSLOTH_REDUCTION_MEAN;
  params.x = states(normalized_, 0);
  params.weight = tied ? weights.embedding : weights.output;
  params.targets = unsloth::tensor(targets_.data(), UNSLOTH_DTYPE_I32, {options_.tokens});
  params.loss = unsloth::tensor(loss_.data(), UNSLOTH_DTYPE_F32, {1});
  params.denominator = unsloth::tensor(denominator_.data(), UNSLOTH_DTYPE_F32, {1});
  if (with_gradients) {
    params.dloss = loss_scale_;
    params.dx = states(gradient_, 0);
    if (lora_ == nullptr) {
      params.accumulate = 1;
      params.dweight = tied ? gradients.embedding : gradients.output;
    }
  }
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_tensor Step::ids() const {
  return unsloth::tensor(ids_.data(), UNSLOTH_DTYPE_I32, {options_.tokens});
}

unsloth_tensor Step::hidden(size_t layer) const { return states(hidden_, layer); }

unsloth_tensor Step::states(const Buffer &buffer, size_t index) const {
  const uint64_t bytes =
      aligned(options_.tokens * config_.hidden_size * element_size(options_.dtype));
  return unsloth::tensor(static_cast<char *>(buffer.data()) + index * bytes, options_.dtype,
                         {options_.tokens, config_.hidden_size});
}

void *Step::saved(size_t layer) const {
  return static_cast<char *>(saved_.data()) + layer * layer_->saved_size();
}

}  // namespace llm
