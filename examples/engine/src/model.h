// The weights of a model on a device.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "args.h"
#include "config.h"
#include "device.h"
#include "gguf.h"
#include "ranks.h"

namespace llm {

class ProgressBar;

// Tensors are views of memory that the model owns; an absent one (rank 0) is not in the file.
// Matrices are [out, in], as GGUF and the library have them.
struct LayerWeights {
  unsloth_tensor attention_norm;
  // The rows of queries, keys and values, one after the other; where their types differ they are
  // apart, and this one is absent.
  unsloth_tensor qkv, qkv_bias;
  unsloth_tensor q, k, v;
  unsloth_tensor q_bias, k_bias, v_bias;
  unsloth_tensor attention_output, attention_output_bias;
  unsloth_tensor mlp_norm;
  unsloth_tensor gate, up, down;
};

// Which rows of the embedding and of the output projection a rank has.
struct VocabularyRows {
  uint64_t begin = 0;
  uint64_t rows = 0;
  uint64_t most = 0;  // of any rank
};

// What a rank is in each way of dividing the work: a part of every layer, some of the layers, some
// of the text's tokens.
struct Ranks {
  Group tensor;
  Group pipeline;
  Group context;
  bool are_processes = false;  // or threads of one

  bool is_first() const { return tensor.rank == 0 && pipeline.rank == 0 && context.rank == 0; }
  bool has_embedding() const { return pipeline.rank == 0; }
  bool has_output() const { return pipeline.rank == pipeline.size - 1; }
};

class Model {
 public:
  // Uploads every tensor: matrices as they are or decoded, as `args` says, the rest as f32. Of
  // what ranks divide only this rank's part is read: its layers, of these its heads, its rows of
  // gate and up and columns of down, its rows of the vocabulary.
  static Model load(const Context &context, const Gguf &gguf, const ModelConfig &config,
                    const Args &args, const Ranks &ranks);

  const Context &context() const { return *context_; }
  // With the layers, the heads and the intermediate size of this rank.
  const ModelConfig &config() const { return config_; }
  const Ranks &ranks() const { return ranks_; }
  const VocabularyRows &vocabulary() const { return vocabulary_; }
  // Of the matrices; none where they are as in the file.
  unsloth_dtype weight_dtype() const { return weight_dtype_; }
  uint64_t weight_bytes() const { return weight_bytes_; }  // of all tensors
  // What hidden states, keys and values should be kept as.
  unsloth_dtype hidden_dtype() const { return hidden_dtype_; }

  const std::vector<LayerWeights> &layers() const { return layers_; }
  unsloth_tensor embedding() const { return embedding_; }  // of the first layers' rank
  // Of the last layers' rank.
  unsloth_tensor output_norm() const { return output_norm_; }
  unsloth_tensor output() const { return output_; }
  unsloth_tensor rope_factors() const { return rope_factors_; }

 private:
  Model(const Context &context, const ModelConfig &config, unsloth_dtype weight_dtype,
        unsloth_dtype hidden_dtype, uint32_t flags, const Ranks &ranks);

  // Goes through all tensors; without memory they are only counted.
  void read(const Gguf &gguf, const ModelConfig &whole, ProgressBar *bar);

  // One tensor after the other, as one whose first size is the sum of theirs; as they are without a
  // dtype, of which one of I2_S is alone.
  unsloth_tensor upload(const std::vector<const GgufTensor *> &sources, unsloth_dtype dtype,
                        ProgressBar *bar);

  const Context *context_;
  ModelConfig config_;
  Ranks ranks_;
  VocabularyRows vocabulary_;
  unsloth_dtype weight_dtype_;
  unsloth_dtype hidden_dtype_;
  uint32_t flags_;  // of all tensors
  // All tensors in one piece: allocations of a GPU are rounded up to megabytes.
  Buffer memory_;
  uint64_t used_ = 0;
  uint64_t file_bytes_ = 0;  // of the file that are read
  uint64_t weight_bytes_ = 0;
  std::deque<unsloth_quantization> quantizations_;  // where tensors point to
  std::vector<LayerWeights> layers_;
  unsloth_tensor embedding_ = {};
  unsloth_tensor output_norm_ = {};
  unsloth_tensor output_ = {};
  unsloth_tensor rope_factors_ = {};
};

}  // namespace llm
