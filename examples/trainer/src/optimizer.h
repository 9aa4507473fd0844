// AdamW over all trained weights, in the library: its handle and its state.
#pragma once

#include <cstdint>
#include <vector>

#include "args.h"
#include "device.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

class Optimizer {
 public:
  struct Options {
    double clip;
    double weight_decay;
    Args::LossScale loss_scaling;
    double loss_scale;
    unsloth_dtype dtype;  // of weights and activations
    uint64_t seed;
    // Ranks that have a share of the parameters each, and make one update.
    Group shares = {};
  };

  // Takes the memory that the state needs. Weights and gradients outlive it.
  Optimizer(const Context &context, const std::vector<Parameter> &parameters,
            const Options &options);

  // Where weights of this dtype are kept more precisely: beside 16-bit ones the rest of an f32. f16
  // has no such form, so all of it.
  static unsloth_master master(unsloth_dtype dtype);
  // f32 [1] on the device: what the loss's gradient is to be.
  unsloth_tensor loss_scale() const;
  // For the updates that follow, those of captured graphs too.
  void set_learning_rate(double learning_rate);
  // Queues an update by the gradients, which are zero after it, but where ranks share it: the
  // next pass is to overwrite them, of which a rank has more. May be captured into a graph.
  void queue_step();
  // Of the last step. Waits for it.
  unsloth_optimizer_status status() const;

  std::vector<std::byte> save() const;
  // Throws for what another kind of training has saved.
  void load(const std::vector<std::byte> &saved);

 private:
  const Context *context_;
  double weight_decay_;
  Buffer state_;
  unsloth::Optimizer optimizer_;
};

}  // namespace llm
