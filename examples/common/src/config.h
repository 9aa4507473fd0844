// The shape of a Llama-family model, as the metadata of its GGUF file describe it.
#pragma once

#include <cstdint>
#include <string>

#include "gguf.h"

namespace llm {

struct ModelConfig {
  enum class RopeScaling { kNone, kLinear, kYarn };

  std::string name;
  uint64_t vocab_size = 0;  // rows of the embedding, which may have some to spare
  uint64_t num_tokens = 0;  // of the tokenizer
  uint64_t context_length = 0;
  uint64_t num_layers = 0;
  uint64_t hidden_size = 0;
  uint64_t intermediate_size = 0;
  uint64_t num_heads = 0;
  uint64_t num_kv_heads = 0;
  uint64_t head_dim = 0;
  uint64_t rotary_dim = 0;
  double rms_norm_epsilon = 0;
  double rope_theta = 0;
  RopeScaling rope_scaling = RopeScaling::kNone;
  double rope_scaling_factor = 1;
  uint64_t rope_original_context_length = 0;
  bool tied_embeddings = false;  // the output projection is the embedding

  uint64_t q_size() const { return num_heads * head_dim; }
  uint64_t kv_size() const { return num_kv_heads * head_dim; }
};

// Throws for an architecture other than llama, for what is not supported (mixtures of experts),
// and for sizes that do not fit each other.
ModelConfig read_config(const Gguf &gguf);

}  // namespace llm
