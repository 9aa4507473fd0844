// A training step: the loss of a batch, and its gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "config.h"
#include "cuda_graph.h"
#include "data.h"
#include "device.h"
#include "layer.h"
#include "lora.h"
#include "weights.h"

namespace llm {

class Step {
 public:
  struct Options {
    uint64_t tokens;         // of every batch
    uint64_t max_sequences;  // of every batch
    unsloth_checkpointing checkpointing;
    unsloth_dtype dtype;  // of activations
    bool use_graph;       // on a GPU, queue the launches of a batch as one CUDA graph
  };

  // Takes all memory that batches need. `lora` is null where the weights themselves are trained;
  // these and it outlive the step. `loss_scale`, f32 [1] on the device, multiplies gradients.
  Step(const Context &context, const ModelConfig &config, const Weights &weights, Lora *lora,
       const Options &options, unsloth_tensor loss_scale);

  // How many targets the losses of the batches to come are divided by: those of all batches whose
  // gradients are added up.
  void set_denominator(uint64_t learned);
  // Adds the gradients of the batch to those that are there, and gives its loss: the sum over
  // learned targets, divided by the denominator. Waits for it.
  float run(const Batch &batch);
  // The loss alone.
  float evaluate(const Batch &batch);

 private:
  void reserve();
  void upload(const Batch &batch);
  void queue_passes();
  void queue_forward();
  void queue_loss(bool with_gradients);
  void queue_backward();
  float read_loss() const;

  unsloth_embedding_params embedding_params() const;
  unsloth_embedding_backward_params embedding_backward_params() const;
  unsloth_rms_norm_params norm_params() const;
  unsloth_rms_norm_backward_params norm_backward_params() const;
  unsloth_linear_cross_entropy_params loss_params(bool with_gradients) const;

  unsloth_tensor ids() const;
  unsloth_tensor hidden(
      size_t layer) const;  // what the layer takes in; behind the last, its output
  unsloth_tensor states(const Buffer &buffer, size_t index) const;
  void *saved(size_t layer) const;

  const Context *context_;
  ModelConfig config_;
  const Weights *weights_;
  Lora *lora_;
  Options options_;
  unsloth_tensor loss_scale_;

  Buffer ids_, targets_, positions_, cu_seqlens_;
  Buffer hidden_;      // of every layer
  Buffer normalized_;  // the last layer's output, normalised; then its gradient
  Buffer gradient_;    // of hidden states
  Buffer saved_;       // what layers keep between the passes
  std::optional<Layer> layer_;
  Buffer workspace_;
  Buffer loss_, denominator_;

  std::unique_ptr<CudaDriver> driver_;
  std::unique_ptr<CudaGraph> graph_;  // the passes of a batch
  bool has_run_ = false;
};

}  // namespace llm
