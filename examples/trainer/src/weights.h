// The weights of a model, laid out for training.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config.h"
#include "device.h"
#include "gguf.h"
#include "ranks.h"

namespace llm {

// The tensors of a layer, or their gradients. An absent one (rank 0) is not in the model, or not
// trained. Matrices are [out, in].
struct LayerTensors {
  unsloth_tensor attention_norm;
  unsloth_tensor qkv, qkv_bias;  // the rows of queries, keys and values, one after the other
  unsloth_tensor output, output_bias;
  unsloth_tensor mlp_norm;
  unsloth_tensor gate_up;  // the rows of gate, then those of up
  unsloth_tensor down;
};

struct ModelTensors {
  unsloth_tensor embedding = {};
  unsloth_tensor output_norm = {};
  unsloth_tensor output = {};  // absent if it is the embedding
  std::vector<LayerTensors> layers;
};

// A weight and its gradient, as an optimizer takes them.
struct Parameter {
  unsloth_tensor weight;
  unsloth_tensor gradient;
  bool decays;  // matrices do, gains and biases do not
};

// Weights that lie behind each other in one dtype, and their gradients, as vectors in which every
// weight has the same place. All ranks that share an optimizer have as many elements of it each.
struct Piece {
  unsloth_tensor weights;
  unsloth_tensor gradients;
};

// Rows of a tensor on the device that are a tensor of the file.
struct FileTensor {
  std::string name;
  std::vector<uint64_t> shape;
  unsloth_tensor tensor;
};

class Weights {
 public:
  // Decodes every tensor and uploads it: matrices as `dtype` says, the rest as f32. A rank of a
  // pipeline has its layers, the first one the embedding, the last one what is behind the layers.
  // Ranks that share an optimizer have all, of which `shares` says who updates what.
  static Weights load(const Context &context, const Gguf &gguf, const ModelConfig &config,
                      unsloth_dtype dtype, const Group &pipeline = {}, const Group &shares = {});

  const ModelTensors &tensors() const { return tensors_; }
  uint64_t first_layer() const { return first_layer_; }  // its number in the model
  // Whether the embedding is here as the output projection alone, and updated on another rank.
  bool borrows_embedding() const { return borrows_embedding_; }
  unsloth_tensor rope_factors() const { return rope_factors_; }
  const std::vector<FileTensor> &file_tensors() const { return file_tensors_; }

  // Takes memory for gradients of all weights, which is zero. Those of layers are `of_layers`. The
  // rest is f32: a table's gradient is added to, as that of the head and of the tokens' rows.
  void add_gradients(const Context &context, unsloth_dtype of_layers);
  // Absent tensors without `add_gradients`.
  const ModelTensors &gradients() const { return gradients_; }
  // Those that are updated here; of ranks that share an optimizer the parts that are this one's.
  std::vector<Parameter> parameters() const;
  // With gradients: of a layer, of what is before the layers, or of what is behind them.
  const std::vector<Piece> &pieces_of_layer(size_t layer) const { return pieces_[layer + 1]; }
  const std::vector<Piece> &pieces_before_layers() const { return pieces_.front(); }
  const std::vector<Piece> &pieces_behind_layers() const { return pieces_.back(); }
  // A rank's elements of a piece, or of its gradients.
  unsloth_tensor share(const unsloth_tensor &of_piece) const;

  // All weights in one piece.
  Buffer *memory() { return &memory_; }
  const Buffer *memory() const { return &memory_; }

 private:
  // The piece that has a weight.
  const Piece &piece_of(const unsloth_tensor &weight) const;

  Group shares_;
  std::vector<std::vector<Piece>> pieces_;  // before the layers, of each layer, behind them
  Buffer memory_;
  Buffer gradient_memory_;
  ModelTensors tensors_;
  ModelTensors gradients_;
  unsloth_tensor rope_factors_ = {};
  uint64_t first_layer_ = 0;
  bool borrows_embedding_ = false;
  std::vector<FileTensor> file_tensors_;
};

// In the order in which they lie in memory.
std::vector<unsloth_tensor> tensors_of(const LayerTensors &layer);
uint64_t element_count(const unsloth_tensor &tensor);
uint64_t byte_count(const unsloth_tensor &tensor);
// Rows `first` to before `first + count` of a matrix, or elements of a vector, without gaps.
unsloth_tensor rows(const unsloth_tensor &tensor, uint64_t first, uint64_t count);

}  // namespace llm
