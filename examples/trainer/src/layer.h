// A decoder layer of the Llama family, forwards and backwards:
//
//   n1 = rms_norm(x)
//   q, k, v = n1 qkv^T, with q and k rotated
//   mid = x + attention(q, k, v) output^T
//   n2 = rms_norm(mid)
//   gate, up = n2 gate_up^T
//   out = mid + (silu(gate) * up) down^T
//
// The backward pass needs what stands on the left. Which of it is kept and which computed again
// from what is kept, by the same calls and so to the same bits, is the policy's to say.
#pragma once

#include <cstddef>
#include <cstdint>

#include "args.h"
#include "config.h"
#include "device.h"
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
    Policy policy;
    unsloth_dtype dtype;  // of activations
  };

  // The weights' shapes are those of every layer that is run.
  Layer(const Context &context, const ModelConfig &config, const LayerTensors &weights,
        const Common &common);

  // Bytes that a layer keeps from its forward to its backward pass, beside its input.
  size_t saved_size() const { return saved_size_; }
  // Bytes that either pass needs while it runs.
  size_t workspace_size() const { return workspace_size_; }
  // Of that size, aligned to 256; set before anything is queued.
  void set_workspace(void *workspace) { workspace_ = static_cast<char *>(workspace); }

  // Queues out = layer(x), both [tokens, hidden]. `saved` has saved_size() bytes, aligned to 256.
  void forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out, void *saved);
  // Queues the gradients: `dx` is that of `out` before, and of `x` after. Those of weights that are
  // there are written, or added to if `accumulate`.
  void backward(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate,
                unsloth_tensor x, unsloth_tensor dx, void *saved);

 private:
  enum Activation { kNorm1, kQkv, kAttended, kLse, kMid, kNorm2, kGateUp, kProduct, kActivations };
  // Gradients of activations, which live for one backward pass.
  enum Gradient { kDProduct, kDNorm, kDMid, kDAttended, kDQkv, kGradients };

  void place(const LayerTensors &weights);
  void measure(const LayerTensors &weights);
  void bind(void *saved);

  // Each computes one line of the above from the ones before.
  void norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const;
  void project(const LayerTensors &weights);
  void attend();
  void project_out(const LayerTensors &weights, unsloth_tensor x);
  void activate();
  unsloth_attention_params attention_params() const;
  unsloth_attention_backward_params attention_backward_params() const;
  unsloth_rms_norm_backward_params norm_backward_params(unsloth_tensor x, unsloth_tensor weight,
                                                        unsloth_tensor residual, unsloth_tensor dx,
                                                        unsloth_tensor dweight,
                                                        bool accumulate) const;

  // out = x weight^T + bias + residual
  unsloth_linear_params product(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor bias,
                                unsloth_tensor residual, unsloth_tensor out) const;
  unsloth_linear_backward_params product_backward(unsloth_tensor dout, unsloth_tensor x,
                                                  unsloth_tensor weight, unsloth_tensor dx,
                                                  unsloth_tensor dweight, unsloth_tensor dbias,
                                                  bool accumulate) const;
  void run(const unsloth_linear_params &params) const;
  void run(const unsloth_linear_backward_params &params) const;
  void rotate(unsloth_tensor q, unsloth_tensor k, bool inverse) const;
  // Heads of queries (0), keys (1) or values (2), side by side in [tokens, columns].
  unsloth_tensor heads(const unsloth_tensor &columns, int which) const;
  // Gate (0) or up (1).
  unsloth_tensor half(const unsloth_tensor &gate_up, int which) const;

  bool keeps(Activation activation) const;
  void *scratch() const { return workspace_ + scratch_; }

  const Context *context_;
  ModelConfig config_;
  Common common_;
  int64_t tokens_;
  size_t saved_size_ = 0;
  size_t workspace_size_ = 0;
  size_t scratch_ = 0;       // where in the workspace the calls' own begins
  size_t scratch_size_ = 0;  // the most that one call needs
  char *workspace_ = nullptr;
  size_t offsets_[kActivations] = {};  // in the saved memory, or in the workspace
  unsloth_tensor activations_[kActivations] = {};
  unsloth_tensor gradients_[kGradients] = {};
  size_t gradient_offsets_[kGradients] = {};
};

}  // namespace llm
