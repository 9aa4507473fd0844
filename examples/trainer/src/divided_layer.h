// A decoder layer where ranks have some of every batch's tokens each: what `Layer` does, made of
// the library's calls for the parts of a layer, since attention alone is over the tokens of others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "config.h"
#include "device.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

class DividedLayer {
 public:
  // What all layers have in common, of this rank's tokens.
  struct Common {
    Group group;
    unsloth_tensor positions;                   // i32 [tokens]
    unsloth_tensor cu_seqlens_q, cu_seqlens_k;  // as unsloth_context_parallel_packed_get has them
    unsloth_tensor rope_factors;
    bool recompute;  // in the backward pass what the forward pass did, in place of keeping it
    unsloth_dtype dtype;
    bool deterministic;
  };

  // As of `Layer`.
  DividedLayer(const Context &context, const ModelConfig &config, const LayerTensors &weights,
               const LayerTensors &gradients, bool accumulate, const Common &common);
  size_t saved_size() const { return common_.recompute ? 0 : kept_size_; }
  size_t workspace_size() const { return scratch_size_ + call_size_; }
  void set_sequences(unsloth_tensor positions, unsloth_tensor cu_seqlens_q,
                     unsloth_tensor cu_seqlens_k);
  void set_workspace(void *workspace);
  void forward(const LayerTensors &weights, unsloth_tensor x, unsloth_tensor out,
               void *saved) const;
  void backward(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate,
                unsloth_tensor x, unsloth_tensor dx, void *saved) const;

 private:
  // What the backward pass reads of the forward pass.
  struct Kept {
    unsloth_tensor normalized;  // what the projections take in
    unsloth_tensor projected;   // queries and keys, rotated, and values: [tokens, heads, head_dim]
    unsloth_tensor attended;    // [tokens, num_heads, head_dim]
    unsloth_tensor lse;         // f32 [num_heads, tokens]
    unsloth_tensor middle;      // behind attention, with the residual
    unsloth_tensor mlp_normalized;  // what the MLP takes in
    unsloth_tensor gate_up;
  };
  // Gradients of a layer's inside.
  struct Scratch {
    unsloth_tensor projected, attended, normalized;
  };

  Kept kept_in(void *memory, size_t *size) const;
  void to_mlp(const LayerTensors &weights, unsloth_tensor x, const Kept &kept) const;
  unsloth_linear_params projections(const LayerTensors &weights, const Kept &kept) const;
  unsloth_linear_params output(const LayerTensors &weights, unsloth_tensor x,
                               const Kept &kept) const;
  unsloth_context_parallel_attention_params attention(const Kept &kept) const;
  unsloth_context_parallel_attention_backward_params attention_backward(const Kept &kept) const;
  unsloth_mlp_params mlp(const LayerTensors &weights, const Kept &kept, unsloth_tensor out) const;
  unsloth_mlp_backward_params mlp_backward(const unsloth_mlp_params *forward,
                                           const LayerTensors &gradients, bool accumulate,
                                           unsloth_tensor dout, const Kept &kept) const;
  unsloth_linear_backward_params linear_backward(unsloth_tensor x, unsloth_tensor dout,
                                                 unsloth_tensor weight, unsloth_tensor dx,
                                                 unsloth_tensor dweight, unsloth_tensor dbias,
                                                 bool accumulate) const;
  unsloth_rms_norm_backward_params norm_backward(unsloth_tensor x, unsloth_tensor weight,
                                                 unsloth_tensor dweight, bool accumulate,
                                                 unsloth_tensor dout, unsloth_tensor past) const;
  void rotate(unsloth_tensor projected, bool back) const;
  void rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const;
  void measure(const LayerTensors &weights, const LayerTensors &gradients, bool accumulate);

  uint64_t tokens() const { return static_cast<uint64_t>(common_.positions.shape[0]); }
  uint64_t num_projected() const { return config_.num_heads + 2 * config_.num_kv_heads; }
  // A tensor's heads from `first` on, and its rows as matrices have them.
  unsloth_tensor heads(const unsloth_tensor &tensor, uint64_t first, uint64_t count) const;
  unsloth_tensor matrix(const unsloth_tensor &tensor) const;

  const Context *context_;
  ModelConfig config_;
  Common common_;
  size_t kept_size_ = 0;
  size_t scratch_size_ = 0;
  size_t call_size_ = 0;
  Scratch scratch_ = {};
  void *recomputed_ = nullptr;
  void *workspace_ = nullptr;  // of calls
};

}  // namespace llm
