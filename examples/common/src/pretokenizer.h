// Pre-tokenizers: how a text is cut into words before byte-pair encoding, which never merges across
// the cuts. GGUF names the rule in `tokenizer.ggml.pre`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llm {

class PreTokenizer {
 public:
  // Throws for a name that is not known: a wrong rule would give wrong tokens in silence.
  static PreTokenizer by_name(const std::string &name);

  // The words of `text` in order; together they are the whole text.
  std::vector<std::string_view> split(std::string_view text) const;

  // Models of the Llama 3 kind take a word that is a token as it is, without merging, and begin a
  // text with BOS unless the file says otherwise.
  bool whole_words_first() const { return rule_ == Rule::kLlama3; }
  bool adds_bos_by_default() const { return rule_ == Rule::kLlama3; }

 private:
  enum class Rule { kGpt2, kSmolLm, kLlama3, kQwen2 };
  explicit PreTokenizer(Rule rule) : rule_(rule) {}

  Rule rule_;
};

}  // namespace llm
