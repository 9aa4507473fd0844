// Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): to a frozen matrix W [out, in] is added
// s B A, with A [rank, in], B [out, rank] and s = alpha / rank. A begins at random, B at zero.
//
// They are put together from the library's products. Each layer in turn gets its matrices
// W' = W + s B A in memory that one layer takes; the backward pass gives dW' there, and from that
// dA = s B^T dW' and dB = s dW' A^T.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "config.h"
#include "device.h"
#include "weights.h"

namespace llm {

class Lora {
 public:
  // `weights` outlive it. A follows from the seed. Merged matrices are of `dtype`.
  Lora(const Context &context, const ModelConfig &config, const Weights &weights,
       const LoraOptions &options, unsloth_dtype dtype, uint64_t seed);

  const LoraOptions &options() const { return options_; }
  std::vector<Parameter> parameters() const;
  // A and B of every layer that is here, under the names that adapter files have.
  const std::vector<FileTensor> &file_tensors() const { return file_tensors_; }

  // The tensors of the file that `merge` changes, where it leaves them.
  struct Merged {
    std::string name;
    size_t layer;
    unsloth_tensor tensor;
  };
  std::vector<Merged> merged_tensors() const;

  // The tensors of any layer as `merge` gives them, where addresses do not matter.
  LayerTensors like_merged() const;

  // Queues W' of a layer, and gives the layer's tensors with it. The memory is the same for all;
  // what is in that of `gradients` is lost.
  LayerTensors merge(size_t layer);
  // Where the backward pass of the layer writes dW'; what is not there has no gradient.
  LayerTensors gradients() const { return merged_gradients_; }
  // Elements of the matrices that `merge` makes of a layer.
  uint64_t merged_parameters() const;
  // Queues the addition to the gradients of A and B of what dW' gives.
  void add_gradients(size_t layer);
  // Those of a layer's A and B, behind each other.
  std::vector<unsloth_tensor> gradients_of(size_t layer) const;

  size_t workspace_size() const { return workspace_size_; }
  // At least as large; set before anything is queued.
  void set_workspace(const Buffer &workspace) { workspace_ = &workspace; }
  // A and B in one piece.
  Buffer *memory() { return &memory_; }
  const Buffer *memory() const { return &memory_; }

 private:
  // A target: rows of one of the four matrices that a layer keeps.
  struct Part {
    unsloth_tensor LayerTensors::*matrix;
    uint64_t first;
    uint64_t rows;
    uint64_t columns;
    const char *name;  // in the file
    bool trained;
  };
  struct Pair {
    unsloth_tensor a, b, da, db;
  };

  void plan(const ModelConfig &config);
  std::string name_in_file(const Part &part, size_t layer) const;
  void allocate(const Context &context, unsloth_dtype dtype, uint64_t seed);
  void multiply(const unsloth_tensor &x, const unsloth_tensor &weight,
                const unsloth_tensor &residual, const unsloth_tensor &out) const;
  // out = dout^T x, added to what is there if `accumulate`.
  void multiply_transposed(const unsloth_tensor &dout, const unsloth_tensor &x,
                           const unsloth_tensor &out, bool accumulate) const;
  void copy(const unsloth_tensor &from, const unsloth_tensor &to) const;
  void measure();

  const Context *context_;
  const Weights *weights_;
  LoraOptions options_;
  std::vector<Part> parts_;
  std::vector<std::vector<Pair>> pairs_;  // of each layer, for each trained part
  std::vector<FileTensor> file_tensors_;
  LayerTensors merged_ = {};
  LayerTensors merged_gradients_ = {};
  Buffer memory_;
  Buffer gradient_memory_;
  Buffer scratch_memory_;
  unsloth_tensor scaled_identity_ = {};  // [rank, rank]: s on its diagonal
  void *scaled_ = nullptr;               // s A, s A^T or s B of the largest part
  const Buffer *workspace_ = nullptr;
  size_t workspace_size_ = 0;
};

}  // namespace llm
