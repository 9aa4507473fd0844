#include "config.h"

#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "gguf_builder.h"

namespace llm {
namespace {

GgufBuilder llama() {
  GgufBuilder builder;
  builder.set("general.architecture", std::string("llama"));
  builder.set("llama.context_length", 2048U);
  builder.set("llama.block_count", 2U);
  builder.set("llama.embedding_length", 8U);
  builder.set("llama.feed_forward_length", 16U);
  builder.set("llama.attention.head_count", 4U);
  builder.entry("llama.attention.layer_norm_rms_epsilon", GgufBuilder::kFloat32,
                GgufBuilder::number(0.5F));
  builder.set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "c"});
  builder.tensors = {{"token_embd.weight", {8, 3}, 0, 0}};
  builder.data = std::string(96, '\0');
  return builder;
}

ModelConfig read(const GgufBuilder &builder) {
  const std::string file = builder.build();
  return read_config(
      Gguf::parse(reinterpret_cast<const std::byte *>(file.data()), file.size(), "test.gguf"));
}

void defaults() {
  const ModelConfig config = read(llama());
  CHECK_EQUAL(config.name, std::string("unnamed"));
  CHECK_EQUAL(config.vocab_size, 3U);
  CHECK_EQUAL(config.num_kv_heads, 4U);  // as many as query heads
  CHECK_EQUAL(config.head_dim, 2U);
  CHECK_EQUAL(config.rotary_dim, 2U);
  CHECK_EQUAL(config.rms_norm_epsilon, 0.5);
  CHECK_EQUAL(config.rope_theta, 10000.0);
  CHECK(config.rope_scaling == ModelConfig::RopeScaling::kNone);
  CHECK(config.tied_embeddings);
}

void what_the_file_says() {
  GgufBuilder builder = llama();
  builder.set("llama.attention.head_count_kv", 2U);
  builder.set("llama.attention.key_length", 6U);
  builder.set("llama.attention.value_length", 6U);
  builder.set("llama.rope.dimension_count", 4U);
  builder.set("llama.rope.scaling.type", std::string("yarn"));
  builder.entry("llama.rope.scaling.factor", GgufBuilder::kFloat32, GgufBuilder::number(4.0F));
  builder.set("llama.rope.scaling.original_context_length", 512U);
  builder.tensors.push_back({"output.weight", {8, 3}, 0, 0});
  const ModelConfig config = read(builder);
  CHECK_EQUAL(config.q_size(), 24U);
  CHECK_EQUAL(config.kv_size(), 12U);
  CHECK_EQUAL(config.rotary_dim, 4U);
  CHECK(config.rope_scaling == ModelConfig::RopeScaling::kYarn);
  CHECK_EQUAL(config.rope_scaling_factor, 4.0);
  CHECK_EQUAL(config.rope_original_context_length, 512U);
  CHECK(!config.tied_embeddings);
}

void refusals() {
  struct Case {
    const char *key;
    uint32_t value;
    const char *message;
  };
  const Case cases[] = {
      {"llama.expert_count", 8, "mixture of experts"},
      {"llama.attention.head_count_kv", 3, "is not a multiple of llama.attention.head_count_kv 3"},
      {"llama.attention.head_count_kv", 0, "'llama.attention.head_count_kv' is 0"},
      {"llama.attention.key_length", 0xFFFFFFFF, "'llama.attention.key_length' is 4294967295"},
      {"llama.attention.value_length", 4, "value heads of another size"},
      {"llama.rope.dimension_count", 1, "llama.rope.dimension_count 1 is odd"},
      {"llama.rope.dimension_count", 4, "above the head size 2"},
  };
  for (const Case &bad : cases) {
    CHECK_THROWS(Error, read(llama().set(bad.key, bad.value)), bad.message);
  }
  CHECK_THROWS(Error, read(llama().set("llama.rope.scaling.type", std::string("longrope"))),
               "llama.rope.scaling.type 'longrope' is not supported");
  CHECK_THROWS(Error, read(GgufBuilder().set("general.architecture", std::string("gemma"))),
               "the architecture 'gemma' is not supported");
  GgufBuilder few_rows = llama();
  few_rows.tensors[0].dimensions = {8, 2};
  CHECK_THROWS(Error, read(few_rows), "has 2 rows for 3 tokens");
  GgufBuilder no_embedding = llama();
  no_embedding.tensors.clear();
  CHECK_THROWS(Error, read(no_embedding), "tensor 'token_embd.weight' is missing");
}

}  // namespace
}  // namespace llm

int main() {
  llm::defaults();
  llm::what_the_file_says();
  llm::refusals();
  return check::result();
}
