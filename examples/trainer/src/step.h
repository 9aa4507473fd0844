// A training step: the loss of a batch, and its gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "config.h"
#include "cuda_graph.h"
#include "data.h"
#include "device.h"
#include "layer.h"
#include "lora.h"
#include "optimizer.h"
#include "pipeline.h"
#include "ranks.h"
#include "reducer.h"
#include "shared_norm.h"
#include "weights.h"

namespace llm {

class Step {
 public:
  struct Options {
    uint64_t batches;        // whose gradients a step adds up
    uint64_t tokens;         // of every batch
    uint64_t max_sequences;  // of every batch
    unsloth_checkpointing checkpointing;
    unsloth_dtype dtype;  // of activations
    bool deterministic;   // on a GPU, the same bits in every run
    bool use_graph;       // on a GPU, queue the launches of a step as one CUDA graph
    // Ranks that have as many batches of a step each, and add up their gradients.
    Group group = {};
    // Whether they have as many tokens of every batch each in place of that.
    bool divides_tokens = false;
    // Whether these share the optimizer: each updates a part of the weights.
    bool shares_optimizer = false;
    // Or where ranks have some of the layers each: the order in which batches pass through this
    // one's, and the norm of all ranks' gradients. They outlive the step.
    Pipeline *pipeline = nullptr;
    SharedNorm *norm = nullptr;
  };

  // Takes all memory that batches need. `lora` is null where the weights themselves are trained,
  // `optimizer` where there is no update, and gradients stay; all of them outlive the step.
  Step(const Context &context, const ModelConfig &config, const Weights &weights, Lora *lora,
       const Options &options, Optimizer *optimizer);

  // How many targets the losses of the batches to come are divided by: those of all batches whose
  // gradients are added up.
  void set_denominator(uint64_t learned);
  // Adds the gradients of so many batches as the options say to those that are there, makes an
  // update, and gives the loss of the batches of all ranks: the sum over learned targets, divided
  // by the denominator. Waits for it. Gradients of layers that are not f32 take the place of what
  // is there, so there is one batch then.
  double run(const std::vector<Batch> &batches);
  // What is asked for while a pass runs, and what layers keep.
  size_t workspace_size() const { return workspace_.bytes(); }
  size_t saved_size() const { return saved_.bytes(); }
  // The loss alone.
  float evaluate(const Batch &batch);

 private:
  void reserve();
  void upload(const Batch &batch, size_t index);
  void set_sequences(size_t batch);
  void queue();
  void queue_pipeline();
  // A batch's hidden states are in one of the slots.
  void queue_forward(size_t batch, size_t slot);
  void queue_loss(size_t batch, size_t slot, bool with_gradients);
  void queue_backward(size_t batch, size_t slot);
  std::vector<float> read_losses();

  unsloth_embedding_params embedding_params(size_t batch, size_t slot) const;
  unsloth_embedding_backward_params embedding_backward_params(size_t batch) const;
  unsloth_rms_norm_params norm_params(size_t slot) const;
  unsloth_rms_norm_backward_params norm_backward_params(size_t batch, size_t slot) const;
  unsloth_linear_cross_entropy_params loss_params(size_t batch, bool with_gradients) const;

  // Integers of a batch.
  unsloth_tensor input(const Buffer &buffer, size_t batch, uint64_t count) const;
  unsloth_tensor per_token(const Buffer &buffer, size_t batch) const;
  unsloth_tensor cu_seqlens(const Buffer &buffer, size_t batch) const;
  // What the layer takes in; behind the last, its output.
  unsloth_tensor hidden(size_t slot, size_t layer) const;
  unsloth_tensor states(const Buffer &buffer, size_t index) const;
  void *saved(size_t slot, size_t layer) const;
  bool shares_embedding() const {
    return options_.pipeline != nullptr && config_.tied_embeddings && lora_ == nullptr;
  }
  // Whether gradients of weights are added to what is there. Of ranks that share the optimizer the
  // first batch overwrites what is left of another rank's share, which nobody zeroes.
  bool adds(size_t batch) const {
    return lora_ == nullptr && !(options_.shares_optimizer && batch == 0);
  }
  // The same of a layer's, as its calls take it.
  bool adds_in_layers(size_t batch) const {
    return adds(batch) && weights_->gradients().layers[0].qkv.dtype == UNSLOTH_DTYPE_F32;
  }
  bool narrows_gradients() const {
    return lora_ == nullptr && weights_->gradients().layers[0].qkv.dtype != UNSLOTH_DTYPE_F32;
  }
  // Queues sums over ranks of a layer's gradients, and of those of other weights.
  void add_up_layer(size_t layer);
  void add_up_others();
  size_t num_layers() const { return weights_->tensors().layers.size(); }
  bool has_embedding() const {
    return options_.pipeline == nullptr || options_.pipeline->is_first();
  }
  bool has_output() const { return options_.pipeline == nullptr || options_.pipeline->is_last(); }

  const Context *context_;
  ModelConfig config_;
  const Weights *weights_;
  Lora *lora_;
  Options options_;
  Optimizer *optimizer_;

  Buffer ids_, targets_, positions_, cu_seqlens_, cu_seqlens_k_;  // of every batch
  Buffer hidden_;                                                 // of every slot and layer
  Buffer normalized_;  // the last layer's output, normalised; then its gradient
  Buffer gradient_;    // of hidden states
  Buffer saved_;       // what layers keep between the passes
  std::optional<Layer> layer_;
  Buffer workspace_;
  Buffer losses_;  // of every batch
  Buffer denominator_;

  std::unique_ptr<Reducer> reducer_;  // where there are several ranks
  std::unique_ptr<CudaDriver> driver_;
  std::unique_ptr<CudaGraph> graph_;  // of a step
  bool has_run_ = false;
};

}  // namespace llm
