#include "step.h"

#include <algorithm>

#include "error.h"
#include "upload.h"

// With h the hidden states of all tokens of a batch:
//
//   h = embedding[ids]
//   for each layer:  h = layer(h)
//   loss = cross_entropy(rms_norm(h) output^T, targets)
//
// and back in the opposite order. The gradient of the logits is found together with the loss, and
// neither of them is ever stored whole. When all batches of a step have added their gradients, the
// optimizer makes its update. Where ranks have some of the batches each, a layer's gradients are
// added up over ranks when the last batch of each has gone back through it, while the layers before
// it follow. So are they where ranks have some of every batch's tokens each. Where ranks have some
// of the layers each, passes through these come in the order of a schedule, between transfers of
// hidden states and of their gradients; a rank holds several batches' hidden states then.
//
// Ranks that share the optimizer (ZeRO's first stage, arXiv:1910.02054) get sums of gradients for
// their shares of the weights alone, and give each other what these have become.

namespace llm {

Step::Step(const Context &context, const ModelConfig &config, const Weights &weights, Lora *lora,
           const Options &options, Optimizer *optimizer)
    : context_(&context),
      config_(config),
      weights_(&weights),
      lora_(lora),
      options_(options),
      optimizer_(optimizer) {
  if (narrows_gradients() && options.batches != 1) {
    throw Error("gradients that are not f32 are of one batch, not " +
                std::to_string(options.batches));
  }
  reserve();
  const bool alone = options.group.size == 1 && options.pipeline == nullptr;
  if (options.group.size > 1) reducer_ = std::make_unique<Reducer>(context, options.group);
  // Ranks are threads here, and graphs of several GPUs that one process launches may wait for each
  // other.
  if (options.use_graph && alone && context.backend() == UNSLOTH_BACKEND_CUDA) {
    driver_ = std::make_unique<CudaDriver>();
  }
}

void Step::reserve() {
  const uint64_t states = options_.tokens * config_.hidden_size * element_size(options_.dtype);
  const auto inputs = [this](uint64_t count) {
    return Buffer(*context_, options_.batches * aligned(count * sizeof(int32_t)));
  };
  ids_ = inputs(options_.tokens);
  targets_ = inputs(options_.tokens);
  positions_ = inputs(options_.tokens);
  cu_seqlens_ = inputs(options_.max_sequences + 1);
  const uint64_t slots = options_.pipeline != nullptr ? options_.pipeline->num_slots() : 1;
  if (options_.divides_tokens) cu_seqlens_k_ = inputs(options_.max_sequences + 1);
  hidden_ = Buffer(*context_, slots * (num_layers() + 1) * aligned(states));
  if (has_output()) normalized_ = Buffer(*context_, states);
  gradient_ = Buffer(*context_, states);
  losses_ = Buffer(*context_, options_.batches * sizeof(float));
  denominator_ = Buffer(*context_, sizeof(float));

  size_t workspace = lora_ != nullptr ? lora_->workspace_size() : 0;
  const auto need = [&workspace](size_t size) { workspace = std::max(workspace, size); };
  size_t size = 0;
  const bool full = lora_ == nullptr;
  // Layers have the same shapes, so that one's answers hold for all.
  Layer::Common common = {};
  common.positions = per_token(positions_, 0);
  common.cu_seqlens = cu_seqlens(cu_seqlens_, 0);
  common.rope_factors = weights_->rope_factors();
  common.checkpointing = options_.checkpointing;
  common.dtype = options_.dtype;
  common.deterministic = options_.deterministic;
  common.overwrites = options_.shares_optimizer;
  if (options_.divides_tokens) {
    common.context = options_.group;
    common.cu_seqlens_k = cu_seqlens(cu_seqlens_k_, 0);
  }
  // A LoRA's matrices may be of another dtype when they are merged, which products differ by.
  layer_.emplace(*context_, config_, full ? weights_->tensors().layers[0] : lora_->like_merged(),
                 full ? weights_->gradients().layers[0] : lora_->gradients(),
                 adds_in_layers(options_.batches), common);
  saved_ = Buffer(*context_, slots * num_layers() * layer_->saved_size());
  need(layer_->workspace_size());
  // The first batch may overwrite what the others add to.
  for (const size_t batch : {size_t{0}, static_cast<size_t>(options_.batches - 1)}) {
    if (has_output()) {
      const auto loss = loss_params(batch, true);
      check(unsloth_linear_cross_entropy_workspace_size(context_->get(), &loss, &size));
      need(size);
      const auto norm = norm_backward_params(batch, 0);
      check(unsloth_rms_norm_backward_workspace_size(context_->get(), &norm, &size));
      need(size);
    }
    if (full && has_embedding()) {
      const auto embedding = embedding_backward_params(batch);
      check(unsloth_embedding_backward_workspace_size(context_->get(), &embedding, &size));
      need(size);
    }
  }
  if (shares_embedding()) options_.pipeline->reserve(weights_->gradients().embedding);
  workspace_ = Buffer(*context_, workspace);
  layer_->set_workspace(workspace_.data());
  if (lora_ != nullptr) lora_->set_workspace(workspace_);
}

void Step::set_denominator(uint64_t learned) {
  // Where nothing is learned losses are zero, whatever divides them.
  const auto value = static_cast<float>(std::max<uint64_t>(learned, 1));
  denominator_.upload(&value, sizeof(value));
}

double Step::run(const std::vector<Batch> &batches) {
  if (batches.size() != options_.batches) throw Error("a step has another number of batches");
  for (size_t i = 0; i < batches.size(); ++i) upload(batches[i], i);
  if (driver_ == nullptr || !has_run_) {
    // Before the first graph, too: libraries of the driver load kernels at their first use.
    queue();
    has_run_ = true;
  } else {
    // All batches have the same shapes, and those of every step the same addresses.
    if (!graph_) {
      graph_ = std::make_unique<CudaGraph>(*driver_, context_->stream(), [this] { queue(); });
    }
    graph_->launch(context_->stream());
  }
  double sum = 0;
  for (const float loss : read_losses()) sum += static_cast<double>(loss);
  return sum;
}

void Step::queue() {
  if (options_.pipeline != nullptr) {
    queue_pipeline();
    return;
  }
  for (size_t batch = 0; batch < options_.batches; ++batch) {
    queue_forward(batch, 0);
    queue_loss(batch, 0, true);
    queue_backward(batch, 0);
  }
  if (reducer_) reducer_->join();
  if (optimizer_ != nullptr) optimizer_->queue_step();
  if (!options_.shares_optimizer) return;
  reducer_->share(*weights_, weights_->pieces_before_layers());
  for (size_t i = 0; i < num_layers(); ++i) {
    reducer_->share(*weights_, weights_->pieces_of_layer(i));
  }
  reducer_->share(*weights_, weights_->pieces_behind_layers());
}

void Step::add_up_layer(size_t layer) {
  if (options_.shares_optimizer) {
    reducer_->scatter(*weights_, weights_->pieces_of_layer(layer));
  } else {
    reducer_->add(tensors_of(weights_->gradients().layers[layer]));
  }
}

void Step::add_up_others() {
  if (options_.shares_optimizer) {
    reducer_->scatter(*weights_, weights_->pieces_before_layers());
    reducer_->scatter(*weights_, weights_->pieces_behind_layers());
    return;
  }
  // Layers lie between the embedding and what is behind them.
  const ModelTensors &gradients = weights_->gradients();
  reducer_->add({gradients.embedding});
  reducer_->add({gradients.output_norm, gradients.output});
}

void Step::queue_pipeline() {
  Pipeline &pipeline = *options_.pipeline;
  for (const unsloth_pipeline_action &action : pipeline.actions()) {
    const auto batch = static_cast<size_t>(action.micro_batch);
    // What is sent of a gradient is in no slot.
    const auto slot = static_cast<size_t>(std::max(action.slot, 0));
    if (action.step == UNSLOTH_PIPELINE_STEP_FORWARD) {
      queue_forward(batch, slot);
    } else if (action.step == UNSLOTH_PIPELINE_STEP_BACKWARD) {
      if (has_output()) queue_loss(batch, slot, true);
      queue_backward(batch, slot);
    } else {
      pipeline.transfer(action, hidden(slot, 0), hidden(slot, num_layers()), states(gradient_, 0));
    }
  }
  if (shares_embedding()) pipeline.add_to_first(weights_->gradients().embedding);
  if (optimizer_ == nullptr) return;
  options_.norm->exchange();
  optimizer_->queue_step();
  if (shares_embedding()) pipeline.share_first(weights_->tensors().embedding);
}

float Step::evaluate(const Batch &batch) {
  upload(batch, 0);
  queue_forward(0, 0);
  queue_loss(0, 0, false);
  return read_losses()[0];
}

void Step::upload(const Batch &batch, size_t index) {
  const auto write = [index](const auto &values, Buffer *buffer) {
    const size_t bytes = values.size() * sizeof(values[0]);
    buffer->upload(values.data(), bytes, index * aligned(bytes));
  };
  write(batch.ids, &ids_);
  write(batch.targets, &targets_);
  write(batch.positions, &positions_);
  write(batch.cu_seqlens, &cu_seqlens_);
  if (options_.divides_tokens) write(batch.cu_seqlens_k, &cu_seqlens_k_);
}

void Step::set_sequences(size_t batch) {
  layer_->set_sequences(
      per_token(positions_, batch), cu_seqlens(cu_seqlens_, batch),
      options_.divides_tokens ? cu_seqlens(cu_seqlens_k_, batch) : unsloth_tensor{});
}

void Step::queue_forward(size_t batch, size_t slot) {
  set_sequences(batch);
  if (has_embedding()) {
    const auto embedding = embedding_params(batch, slot);
    check(unsloth_embedding_forward(context_->get(), &embedding, context_->stream()));
  }
  for (size_t i = 0; i < num_layers(); ++i) {
    const LayerTensors weights = lora_ != nullptr ? lora_->merge(i) : weights_->tensors().layers[i];
    layer_->forward(weights, hidden(slot, i), hidden(slot, i + 1), saved(slot, i));
  }
}

void Step::queue_loss(size_t batch, size_t slot, bool with_gradients) {
  const auto norm = norm_params(slot);
  check(unsloth_rms_norm_forward(context_->get(), &norm, context_->stream()));
  const auto loss = loss_params(batch, with_gradients);
  check(unsloth_linear_cross_entropy_forward(context_->get(), &loss, context_->stream()));
}

void Step::queue_backward(size_t batch, size_t slot) {
  const bool adds_up = reducer_ && batch + 1 == options_.batches;
  set_sequences(batch);
  if (has_output()) {
    const auto norm = norm_backward_params(batch, slot);
    check(unsloth_rms_norm_backward(context_->get(), &norm, context_->stream()));
  }
  for (size_t i = num_layers(); i-- > 0;) {
    if (lora_ == nullptr) {
      layer_->backward(weights_->tensors().layers[i], weights_->gradients().layers[i],
                       adds_in_layers(batch), hidden(slot, i), states(gradient_, 0),
                       saved(slot, i));
      if (adds_up) add_up_layer(i);
      continue;
    }
    // What a LoRA makes of a layer is in memory that the layers after it have used since, and the
    // gradients of whole matrices are those of one layer and one batch.
    layer_->backward(lora_->merge(i), lora_->gradients(), false, hidden(slot, i),
                     states(gradient_, 0), saved(slot, i));
    lora_->add_gradients(i);
    if (adds_up) reducer_->add(lora_->gradients_of(i));
  }
  if (lora_ != nullptr || !has_embedding()) return;
  const auto embedding = embedding_backward_params(batch);
  check(unsloth_embedding_backward(context_->get(), &embedding, context_->stream()));
  if (adds_up) add_up_others();
}

std::vector<float> Step::read_losses() {
  if (reducer_) return reducer_->gather(losses_, options_.batches);
  if (options_.pipeline != nullptr) {
    options_.pipeline->share_last(
        unsloth::tensor(losses_.data(), UNSLOTH_DTYPE_F32, {options_.batches}));
  }
  std::vector<float> losses(options_.batches);
  losses_.download(losses.data(), losses.size() * sizeof(float));
  return losses;
}

unsloth_embedding_params Step::embedding_params(size_t batch, size_t slot) const {
  auto params = unsloth::make<unsloth_embedding_params>();
  params.table = weights_->tensors().embedding;
  params.ids = per_token(ids_, batch);
  params.out = hidden(slot, 0);
  return params;
}

// A tied embedding has the gradient of the output projection already.
unsloth_embedding_backward_params Step::embedding_backward_params(size_t batch) const {
  auto params = unsloth::make<unsloth_embedding_backward_params>();
  const bool tied = weights_->tensors().output.rank == 0;
  params.accumulate = tied || adds(batch) ? 1 : 0;
  params.dout = states(gradient_, 0);
  params.ids = per_token(ids_, batch);
  params.dweight = weights_->gradients().embedding;
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_rms_norm_params Step::norm_params(size_t slot) const {
  auto params = unsloth::make<unsloth_rms_norm_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.x = hidden(slot, num_layers());
  params.weight = weights_->tensors().output_norm;
  params.out = states(normalized_, 0);
  return params;
}

unsloth_rms_norm_backward_params Step::norm_backward_params(size_t batch, size_t slot) const {
  auto params = unsloth::make<unsloth_rms_norm_backward_params>();
  params.epsilon = static_cast<float>(config_.rms_norm_epsilon);
  params.accumulate = adds(batch) ? 1 : 0;
  params.x = hidden(slot, num_layers());
  params.dout = states(gradient_, 0);
  params.weight = weights_->tensors().output_norm;
  params.dweight = weights_->gradients().output_norm;
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_linear_cross_entropy_params Step::loss_params(size_t batch, bool with_gradients) const {
  const ModelTensors &weights = weights_->tensors();
  const ModelTensors &gradients = weights_->gradients();
  const bool tied = weights.output.rank == 0;
  auto params = unsloth::make<unsloth_linear_cross_entropy_params>();
  params.reduction = UNSLOTH_REDUCTION_MEAN;
  params.x = states(normalized_, 0);
  params.weight = tied ? weights.embedding : weights.output;
  params.targets = per_token(targets_, batch);
  params.loss =
      unsloth::tensor(static_cast<float *>(losses_.data()) + batch, UNSLOTH_DTYPE_F32, {1});
  params.denominator = unsloth::tensor(denominator_.data(), UNSLOTH_DTYPE_F32, {1});
  if (with_gradients) {
    if (optimizer_ != nullptr) params.dloss = optimizer_->loss_scale();
    params.dx = states(gradient_, 0);
    if (lora_ == nullptr) {
      // The gradient of an embedding that is updated elsewhere begins anew here.
      const bool is_anew = weights_->borrows_embedding() && batch == 0;
      params.accumulate = adds(batch) && !is_anew ? 1 : 0;
      params.dweight = tied ? gradients.embedding : gradients.output;
    }
  }
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

unsloth_tensor Step::input(const Buffer &buffer, size_t batch, uint64_t count) const {
  char *const data = static_cast<char *>(buffer.data()) + batch * aligned(count * sizeof(int32_t));
  return unsloth::tensor(data, UNSLOTH_DTYPE_I32, {count});
}

unsloth_tensor Step::per_token(const Buffer &buffer, size_t batch) const {
  return input(buffer, batch, options_.tokens);
}

unsloth_tensor Step::cu_seqlens(const Buffer &buffer, size_t batch) const {
  return input(buffer, batch, options_.max_sequences + 1);
}

unsloth_tensor Step::hidden(size_t slot, size_t layer) const {
  return states(hidden_, slot * (num_layers() + 1) + layer);
}

unsloth_tensor Step::states(const Buffer &buffer, size_t index) const {
  const uint64_t bytes =
      aligned(options_.tokens * config_.hidden_size * element_size(options_.dtype));
  return unsloth::tensor(static_cast<char *>(buffer.data()) + index * bytes, options_.dtype,
                         {options_.tokens, config_.hidden_size});
}

void *Step::saved(size_t slot, size_t layer) const {
  return static_cast<char *>(saved_.data()) + (slot * num_layers() + layer) * layer_->saved_size();
}

}  // namespace llm
