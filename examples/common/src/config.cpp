#include "config.h"

namespace llm {
namespace {

// Far above any model, and low enough that products of three sizes stay inside 64 bits.
constexpr uint64_t kMaxSize = uint64_t{1} << 20;

uint64_t bounded(const Gguf &gguf, const std::string &key, uint64_t value) {
  if (value < 1 || value > kMaxSize) {
    gguf.fail("metadata '" + key + "' is " + std::to_string(value) + ", outside 1 to " +
              std::to_string(kMaxSize));
  }
  return value;
}

}  // namespace

ModelConfig read_config(const Gguf &gguf) {
  const std::string &architecture = gguf.get_string("general.architecture");
  if (architecture != "llama") {
    gguf.fail("the architecture '" + architecture + "' is not supported (llama is)");
  }
  const auto size = [&](const std::string &key) {
    return bounded(gguf, "llama." + key, gguf.get_uint("llama." + key));
  };
  const auto size_or = [&](const std::string &key, uint64_t fallback) {
    return bounded(gguf, "llama." + key, gguf.get_uint("llama." + key, fallback));
  };
  if (gguf.get_uint("llama.expert_count", 0) > 0) {
    gguf.fail("a mixture of experts is not supported");
  }

  ModelConfig config;
  config.name = gguf.get_string("general.name", "unnamed");
  config.context_length = size("context_length");
  config.num_layers = size("block_count");
  config.hidden_size = size("embedding_length");
  config.intermediate_size = size("feed_forward_length");
  config.num_heads = size("attention.head_count");
  config.num_kv_heads = size_or("attention.head_count_kv", config.num_heads);
  if (config.num_heads % config.num_kv_heads != 0) {
    gguf.fail("llama.attention.head_count " + std::to_string(config.num_heads) +
              " is not a multiple of llama.attention.head_count_kv " +
              std::to_string(config.num_kv_heads));
  }
  config.head_dim = size_or("attention.key_length", config.hidden_size / config.num_heads);
  if (size_or("attention.value_length", config.head_dim) != config.head_dim) {
    gguf.fail("value heads of another size than key heads are not supported");
  }
  config.rotary_dim = size_or("rope.dimension_count", config.head_dim);
  if (config.rotary_dim > config.head_dim || config.rotary_dim % 2 != 0) {
    gguf.fail("llama.rope.dimension_count " + std::to_string(config.rotary_dim) +
              " is odd or above the head size " + std::to_string(config.head_dim));
  }
  config.rms_norm_epsilon = gguf.get_float("llama.attention.layer_norm_rms_epsilon");
  config.rope_theta = gguf.get_float("llama.rope.freq_base", 10000.0);

  const std::string scaling = gguf.get_string("llama.rope.scaling.type", "none");
  if (scaling == "linear") {
    config.rope_scaling = ModelConfig::RopeScaling::kLinear;
  } else if (scaling == "yarn") {
    config.rope_scaling = ModelConfig::RopeScaling::kYarn;
  } else if (scaling != "none") {
    gguf.fail("llama.rope.scaling.type '" + scaling + "' is not supported (linear and yarn are)");
  }
  if (config.rope_scaling != ModelConfig::RopeScaling::kNone) {
    config.rope_scaling_factor = gguf.get_float("llama.rope.scaling.factor");
    config.rope_original_context_length =
        size_or("rope.scaling.original_context_length", config.context_length);
  }

  const GgufTensor *embedding = gguf.find_tensor("token_embd.weight");
  if (embedding == nullptr) gguf.fail("tensor 'token_embd.weight' is missing");
  config.vocab_size = bounded(gguf, "size of token_embd.weight", embedding->shape[0]);
  config.num_tokens = gguf.get_strings("tokenizer.ggml.tokens").size();
  if (config.vocab_size < config.num_tokens) {
    gguf.fail("token_embd.weight has " + std::to_string(config.vocab_size) + " rows for " +
              std::to_string(config.num_tokens) + " tokens");
  }
  config.tied_embeddings = gguf.find_tensor("output.weight") == nullptr;
  return config;
}

}  // namespace llm
