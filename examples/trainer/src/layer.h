// A decoder layer of the Llama family, forwards and backwards, in the library's own calls for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "config.h"
#include "device.h"
#include "divided_layer.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

class Layer {
 public:
  // What all layers have in common. `positions`, i32 [tokens], and `cu_seqlens`, i32, are on the
  // device; the memory that the tensors point to outlives the layer.
  struct Common {
    unsloth_tensor positions;
    unsloth_tensor cu_seqlens;
    unsloth_tensor rope_factors;
    unsloth_checkpointing checkpointing;
    unsloth_dtype dtype;  // of activations
    bool deterministic;   // the same bits in every run on a GPU
    // Whether a pass may write gradients that others add to; not where ranks have some tokens each.
    bool overwrites = false;
    // Ranks that have some of the tokens each, and where sequences begin among those of all.
    Group context = {};
    unsloth_tensor cu_seqlens_k = {};
  };

  // The weights' shapes are those of every layer that is run. `gradients` are those that will be
  // asked for, added to what is there if `accumulate`.
  Layer(const Context &context, const ModelConfig &config, const LayerTensors &weights,
        const LayerTensors &gradients, bool accumulate, const Common &common);

  // Bytes that a layer keeps from its forward to its backward pass, beside its input.
  size_t saved_size() const { return saved_size_; }
  // Bytes that either pass needs while it runs.
  size_t workspace_size() const { return workspace_size_; }
  // Where tokens stand, and where their sequences begin; shaped as those before.
  void set_sequences(unsloth_tensor positions, unsloth_tensor cu_seqlens,
                     unsloth_tensor cu_seqlens_k);
  // Of that size, aligned to 256; set before anything is queued.
  void set_workspace(void *workspace);

  // Queues out = layer(x), both [tokens, hidden]. `saved` has saved_size() bytes, aligned to 256.
  void forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
               void *saved) const;
  // Queues the gradients: `dx` is that of `out` before, and of `x` after. Those of weights that are
  // there are written, or added to if `accumulate`.
  void backward(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate,
                unsloth_tensor x, unsloth_tensor dx, void *saved) const;

 private:
  struct Call;

  void set_forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out, void *saved,
                   Call *call) const;
  void set_backward(const LayerTensors &gradients, bool accumulate, unsloth_tensor dx,
                    Call *call) const;

  const Context *context_;
  ModelConfig config_;
  Common common_;
  size_t saved_size_ = 0;
  size_t workspace_size_ = 0;
  void *workspace_ = nullptr;
  std::unique_ptr<DividedLayer> divided_;  // where ranks have some of the tokens each
};

}  // namespace llm
