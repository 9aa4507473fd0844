#include "tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "error.h"
#include "merge.h"
#include "unicode.h"

namespace llm {
namespace {

constexpr const char *kSpaceMark = "\xE2\x96\x81";  // U+2581, SentencePiece's space

// Byte-level BPE writes each byte as a printable code point: the printable bytes of Latin-1 as
// themselves, the others from U+0100 on (Radford et al., GPT-2).
std::array<char32_t, 256> byte_code_points() {
  std::array<char32_t, 256> code_points{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    code_points[byte] = printable ? byte : next++;
  }
  return code_points;
}

const std::unordered_map<char32_t, char> &code_point_bytes() {
  static const auto map = [] {
    std::unordered_map<char32_t, char> bytes;
    const auto code_points = byte_code_points();
    for (unsigned byte = 0; byte < 256; ++byte) bytes[code_points[byte]] = static_cast<char>(byte);
    return bytes;
  }();
  return map;
}

uint64_t merge_key(TokenId left, TokenId right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

}  // namespace

Tokenizer::Tokenizer(const Gguf &gguf) {
  load_vocabulary(gguf);
  byte_tokens_.fill(kNoToken);
  const std::string &model = gguf.get_string("tokenizer.ggml.model");
  bool add_bos = false;
  if (model == "gpt2") {
    pre_tokenizer_ = PreTokenizer::by_name(gguf.get_string("tokenizer.ggml.pre"));
    add_bos = pre_tokenizer_->adds_bos_by_default();
    load_merges(gguf);
  } else if (model == "llama") {
    scores_ = gguf.get_floats("tokenizer.ggml.scores");
    if (scores_.size() != texts_.size()) {
      gguf.fail("tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length");
    }
    add_bos = true;
    add_space_prefix_ = gguf.get_bool("tokenizer.ggml.add_space_prefix", true);
    for (unsigned byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      byte_tokens_[byte] = find(name).value_or(kNoToken);
    }
  } else {
    gguf.fail("tokenizer.ggml.model '" + model + "' is not supported (gpt2 and llama are)");
  }
  load_special_tokens(gguf);
  add_bos_ = gguf.get_bool("tokenizer.ggml.add_bos_token", add_bos) && bos_.has_value();
  add_eos_ = gguf.get_bool("tokenizer.ggml.add_eos_token", false) && eos_.has_value();
}

void Tokenizer::load_vocabulary(const Gguf &gguf) {
  texts_ = gguf.get_strings("tokenizer.ggml.tokens");
  if (texts_.size() > static_cast<size_t>(std::numeric_limits<TokenId>::max())) {
    gguf.fail("tokenizer.ggml.tokens has more tokens than 31 bits can number");
  }
  const std::vector<int64_t> kinds = gguf.get_ints("tokenizer.ggml.token_type");
  if (!kinds.empty() && kinds.size() != texts_.size()) {
    gguf.fail("tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length");
  }
  kinds_.assign(texts_.size(), Kind::kNormal);
  ids_.reserve(texts_.size());
  for (size_t id = 0; id < texts_.size(); ++id) {
    if (!kinds.empty()) {
      if (kinds[id] < 1 || kinds[id] > 6) {
        gguf.fail("token " + std::to_string(id) + " has the unknown type " +
                  std::to_string(kinds[id]));
      }
      kinds_[id] = static_cast<Kind>(kinds[id]);
    }
    ids_[texts_[id]] = static_cast<TokenId>(id);
    if (is_special(kinds_[id]) && !texts_[id].empty()) {
      specials_by_first_byte_[static_cast<uint8_t>(texts_[id][0])].push_back(
          static_cast<TokenId>(id));
    }
  }
  for (auto &specials : specials_by_first_byte_) {
    std::stable_sort(specials.begin(), specials.end(),
                     [this](TokenId a, TokenId b) { return texts_[a].size() > texts_[b].size(); });
  }
}

void Tokenizer::load_merges(const Gguf &gguf) {
  const auto code_points = byte_code_points();
  for (unsigned byte = 0; byte < 256; ++byte) {
    byte_tokens_[byte] = find(encode_utf8(code_points[byte])).value_or(kNoToken);
  }
  const std::vector<std::string> &merges = gguf.get_strings("tokenizer.ggml.merges");
  merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string &merge = merges[rank];
    const size_t space = merge.find(' ', 1);
    if (space == std::string::npos) gguf.fail("merge '" + merge + "' is not a pair");
    const auto left = find(merge.substr(0, space));
    const auto right = find(merge.substr(space + 1));
    const auto whole = find(merge.substr(0, space) + merge.substr(space + 1));
    if (!left || !right || !whole) gguf.fail("merge '" + merge + "' is not of known tokens");
    merges_.emplace(merge_key(*left, *right), RankedMerge{static_cast<uint32_t>(rank), *whole});
  }
}

void Tokenizer::load_special_tokens(const Gguf &gguf) {
  const auto load = [&](const char *name) -> std::optional<TokenId> {
    const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
    if (gguf.find(key) == nullptr) return std::nullopt;
    const uint64_t id = gguf.get_uint(key);
    if (id >= texts_.size()) {
      gguf.fail(key + " " + std::to_string(id) + " is outside the vocabulary of " +
                std::to_string(texts_.size()));
    }
    return static_cast<TokenId>(id);
  };
  bos_ = load("bos");
  eos_ = load("eos");
  unknown_ = load("unknown");
  for (const std::optional<TokenId> token : {eos_, load("eot"), load("eom")}) {
    if (token) end_tokens_.push_back(*token);
  }
  // Files name one end token, though models trained for chat end a turn with another one.
  for (const char *text :
       {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}) {
    const std::optional<TokenId> token = find(text);
    if (token && kinds_[*token] == Kind::kControl) end_tokens_.push_back(*token);
  }
}

bool Tokenizer::is_special(Kind kind) const {
  return kind == Kind::kControl || kind == Kind::kUserDefined || kind == Kind::kUnknown;
}

std::optional<TokenId> Tokenizer::find(const std::string &text) const {
  const auto found = ids_.find(text);
  return found != ids_.end() ? std::optional(found->second) : std::nullopt;
}

bool Tokenizer::ends_generation(TokenId token) const {
  return std::find(end_tokens_.begin(), end_tokens_.end(), token) != end_tokens_.end();
}

std::optional<TokenId> Tokenizer::special_at(std::string_view text, bool parse_special) const {
  for (const TokenId token : specials_by_first_byte_[static_cast<uint8_t>(text[0])]) {
    if (!parse_special && kinds_[token] != Kind::kUserDefined) continue;
    if (text.substr(0, texts_[token].size()) == texts_[token]) return token;
  }
  return std::nullopt;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<TokenId> tokens;
  if (options.add_special && add_bos_) tokens.push_back(*bos_);
  size_t start = 0;  // of the text not yet encoded
  bool after_special = true;
  for (size_t at = 0; at < text.size();) {
    const std::optional<TokenId> special = special_at(text.substr(at), options.parse_special);
    if (!special) {
      ++at;
      continue;
    }
    if (at > start) encode_text(text.substr(start, at - start), after_special, &tokens);
    tokens.push_back(*special);
    after_special = true;
    at += texts_[*special].size();
    start = at;
  }
  if (start < text.size()) encode_text(text.substr(start), after_special, &tokens);
  if (options.add_special && add_eos_) tokens.push_back(*eos_);
  return tokens;
}

void Tokenizer::encode_text(std::string_view text, bool after_special,
                            std::vector<TokenId> *tokens) const {
  if (pre_tokenizer_) {
    for (const std::string_view word : pre_tokenizer_->split(text)) encode_bpe_word(word, tokens);
    return;
  }
  const std::string prefix = add_space_prefix_ && after_special ? " " : "";
  encode_sentence_piece(replace_all(prefix + std::string(text), " ", kSpaceMark), tokens);
}

void Tokenizer::encode_bpe_word(std::string_view word, std::vector<TokenId> *tokens) const {
  if (pre_tokenizer_->whole_words_first()) {
    static const auto code_points = byte_code_points();
    std::string text;
    for (const char byte : word) text += encode_utf8(code_points[static_cast<uint8_t>(byte)]);
    if (const auto token = find(text)) {
      tokens->push_back(*token);
      return;
    }
  }
  std::vector<Symbol> symbols(word.size());
  for (size_t i = 0; i < word.size(); ++i) {
    symbols[i] = {i, 1, byte_tokens_[static_cast<uint8_t>(word[i])]};
  }
  const auto find_merge = [this](const Symbol &left, const Symbol &right) -> std::optional<Merge> {
    const auto found = merges_.find(merge_key(left.token, right.token));
    if (found == merges_.end()) return std::nullopt;
    return Merge{static_cast<double>(found->second.rank), found->second.token};
  };
  for (const Symbol &symbol : merge_symbols(std::move(symbols), find_merge)) {
    // A byte that the vocabulary lacks is dropped, as the tokenizers that made such files do.
    if (symbol.token != kNoToken) tokens->push_back(symbol.token);
  }
}

void Tokenizer::encode_sentence_piece(std::string_view text, std::vector<TokenId> *tokens) const {
  const auto lookup = [&](size_t offset, size_t length) {
    return find(std::string(text.substr(offset, length)));
  };
  std::vector<Symbol> symbols;
  for (size_t at = 0; at < text.size();) {
    const size_t length = decode_utf8(text.substr(at)).bytes;
    symbols.push_back({at, length, lookup(at, length).value_or(kNoToken)});
    at += length;
  }
  const auto find_merge = [&](const Symbol &left, const Symbol &right) -> std::optional<Merge> {
    const auto token = lookup(left.offset, left.length + right.length);
    if (!token) return std::nullopt;
    return Merge{-scores_[*token], *token};
  };
  for (const Symbol &symbol : merge_symbols(std::move(symbols), find_merge)) {
    if (symbol.token != kNoToken) {
      tokens->push_back(symbol.token);
      continue;
    }
    for (const char byte : text.substr(symbol.offset, symbol.length)) {
      const TokenId token = byte_tokens_[static_cast<uint8_t>(byte)];
      if (token != kNoToken) {
        tokens->push_back(token);
      } else if (unknown_) {
        tokens->push_back(*unknown_);
      }
    }
  }
}

std::string Tokenizer::decode(TokenId token) const {
  if (token < 0 || static_cast<size_t>(token) >= texts_.size()) {
    throw Error("token " + std::to_string(token) + " is outside the vocabulary");
  }
  const std::string &text = texts_[token];
  switch (kinds_[token]) {
    case Kind::kControl:
    case Kind::kUnknown:
    case Kind::kUnused:
      return "";
    case Kind::kUserDefined:
      return text;
    case Kind::kNormal:
    case Kind::kByte:
      break;
  }
  if (!pre_tokenizer_) {
    const auto byte = std::find(byte_tokens_.begin(), byte_tokens_.end(), token);
    if (byte != byte_tokens_.end()) return {static_cast<char>(byte - byte_tokens_.begin())};
    return replace_all(text, kSpaceMark, " ");
  }
  std::string bytes;
  for (std::string_view rest = text; !rest.empty();) {
    const DecodedCodePoint decoded = decode_utf8(rest);
    const auto byte = code_point_bytes().find(decoded.value);
    bytes += byte != code_point_bytes().end() ? std::string(1, byte->second)
                                              : std::string(rest.substr(0, decoded.bytes));
    rest.remove_prefix(decoded.bytes);
  }
  return bytes;
}

std::string TextStream::push(TokenId token) {
  pending_ += tokenizer_.decode(token);
  const size_t complete = complete_utf8_prefix(pending_);
  std::string text = sanitize_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string TextStream::finish() {
  const std::string text = pending_.empty() ? "" : encode_utf8(0xFFFD);
  pending_.clear();
  return text;
}

}  // namespace llm
