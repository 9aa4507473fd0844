// The tokenizer stored in a GGUF file: byte-level BPE (`tokenizer.ggml.model` gpt2) or
// SentencePiece with byte fallback (llama).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf.h"
#include "pretokenizer.h"

namespace llm {

using TokenId = int32_t;

class Tokenizer {
 public:
  explicit Tokenizer(const Gguf &gguf);

  struct EncodeOptions {
    bool add_special = true;     // BOS and EOS where the model wants them
    bool parse_special = false;  // "<|im_end|>" in the text is that token, not its characters
  };
  std::vector<TokenId> encode(std::string_view text, EncodeOptions options) const;

  // The bytes that a token stands for, which may be part of a code point; none for a control token.
  std::string decode(TokenId token) const;

  size_t vocab_size() const { return texts_.size(); }
  std::optional<TokenId> find(const std::string &text) const;
  // What ends a text, if the file names it.
  std::optional<TokenId> end_of_text() const { return eos_; }
  // Whether generation stops at this token (end of text, of a turn or of a message).
  bool ends_generation(TokenId token) const;

 private:
  enum class Kind : uint8_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

  void load_vocabulary(const Gguf &gguf);
  void load_merges(const Gguf &gguf);
  void load_special_tokens(const Gguf &gguf);
  void encode_text(std::string_view text, bool after_special, std::vector<TokenId> *tokens) const;
  void encode_bpe_word(std::string_view word, std::vector<TokenId> *tokens) const;
  void encode_sentence_piece(std::string_view text, std::vector<TokenId> *tokens) const;
  std::optional<TokenId> special_at(std::string_view text, bool parse_special) const;
  bool is_special(Kind kind) const;

  std::vector<std::string> texts_;  // as the file writes them
  std::vector<Kind> kinds_;
  std::unordered_map<std::string, TokenId> ids_;
  std::array<std::vector<TokenId>, 256> specials_by_first_byte_;  // the longest first

  // Byte-level BPE.
  std::optional<PreTokenizer> pre_tokenizer_;
  struct RankedMerge {
    uint32_t rank;
    TokenId token;
  };
  std::unordered_map<uint64_t, RankedMerge> merges_;  // by left token << 32 | right token

  // SentencePiece.
  std::vector<double> scores_;
  bool add_space_prefix_ = false;

  std::array<TokenId, 256> byte_tokens_{};  // kNoToken where the vocabulary has none
  std::optional<TokenId> bos_;
  std::optional<TokenId> eos_;
  std::optional<TokenId> unknown_;
  bool add_bos_ = false;
  bool add_eos_ = false;
  std::vector<TokenId> end_tokens_;
};

// Turns a stream of tokens into text, holding back the bytes of a code point until it is whole.
class TextStream {
 public:
  explicit TextStream(const Tokenizer &tokenizer) : tokenizer_(tokenizer) {}

  // The text that `token` completes: valid UTF-8, possibly empty.
  std::string push(TokenId token);
  // What was held back at the end of the stream, as U+FFFD.
  std::string finish();

 private:
  const Tokenizer &tokenizer_;
  std::string pending_;
};

}  // namespace llm
