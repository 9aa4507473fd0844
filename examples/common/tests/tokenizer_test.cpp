#include "tokenizer.h"

#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "gguf_builder.h"
#include "merge.h"
#include "pretokenizer.h"
#include "unicode.h"

namespace llm {
namespace {

constexpr int32_t kNormal = 1;
constexpr int32_t kControl = 3;
constexpr int32_t kUserDefined = 4;

// All 256 bytes as tokens 0 to 255 in the order of GPT-2's code points, then a few merges and
// specials.
struct TinyVocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> kinds;
  std::vector<std::string> merges;

  TinyVocabulary() {
    for (unsigned byte = 0; byte < 256; ++byte) add(byte_text(byte), kNormal);
  }

  int32_t add(const std::string &text, int32_t kind) {
    tokens.push_back(text);
    kinds.push_back(kind);
    return static_cast<int32_t>(tokens.size() - 1);
  }

  int32_t merge(const std::string &left, const std::string &right) {
    merges.push_back(left + " " + right);
    return add(left + right, kNormal);
  }

  GgufBuilder gguf(const std::string &pre = "gpt-2") const {
    GgufBuilder builder;
    builder.set("tokenizer.ggml.model", std::string("gpt2"));
    builder.set("tokenizer.ggml.pre", pre);
    builder.set("tokenizer.ggml.tokens", tokens);
    builder.set("tokenizer.ggml.token_type", kinds);
    builder.set("tokenizer.ggml.merges", merges);
    return builder;
  }

  static std::string byte_text(unsigned byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    if (printable) return encode_utf8(byte);
    const unsigned rank = byte <= 32 ? byte : byte <= 160 ? byte - 127 + 33 : 67;
    return encode_utf8(0x100 + rank);
  }
};

Tokenizer load(const GgufBuilder &builder) {
  const std::string file = builder.build();
  return Tokenizer(
      Gguf::parse(reinterpret_cast<const std::byte *>(file.data()), file.size(), "test.gguf"));
}

std::vector<TokenId> bytes_of(const std::string &text) {
  std::vector<TokenId> tokens;
  for (const char byte : text) tokens.push_back(static_cast<uint8_t>(byte));
  return tokens;
}

void merges_by_rank_then_from_the_left() {
  TinyVocabulary vocabulary;
  const TokenId bc = vocabulary.merge("b", "c");
  const TokenId ab = vocabulary.merge("a", "b");
  const TokenId abc = vocabulary.merge("ab", "c");
  const TokenId aa = vocabulary.merge("a", "a");
  const TokenId aaaa = vocabulary.merge("aa", "aa");
  const Tokenizer tokenizer = load(vocabulary.gguf());
  const auto encode = [&](const std::string &text) { return tokenizer.encode(text, {}); };
  CHECK_EQUAL(encode("abc"), (std::vector<TokenId>{'a', bc}));  // "b c" outranks "a b"
  CHECK_EQUAL(encode("abd"), (std::vector<TokenId>{ab, 'd'}));
  CHECK_EQUAL(encode("aaa"), (std::vector<TokenId>{aa, 'a'}));
  CHECK_EQUAL(encode("aaaaaaa"), (std::vector<TokenId>{aaaa, aa, 'a'}));
  CHECK_EQUAL(encode("a a"), (std::vector<TokenId>{'a', ' ', 'a'}));  // never across words
  CHECK_EQUAL(encode(""), std::vector<TokenId>{});
  CHECK_EQUAL(encode("\xC3\xA9\xFF"), bytes_of("\xC3\xA9\xFF"));  // not UTF-8: still its bytes
  CHECK(tokenizer.find("abc") == abc);
  // A long word takes n log n steps, not n^2.
  CHECK_EQUAL(encode(std::string(1 << 20, 'a')).size(), size_t{1} << 18);
}

// Llama 3 takes a word that is a token without merging; GPT-2 only what the merges reach.
void whole_words() {
  TinyVocabulary vocabulary;
  const TokenId xyz = vocabulary.add("xyz", kNormal);
  CHECK_EQUAL(load(vocabulary.gguf("gpt-2")).encode("xyz", {}), bytes_of("xyz"));
  CHECK_EQUAL(load(vocabulary.gguf("llama-bpe")).encode("xyz", {}), (std::vector<TokenId>{xyz}));
}

void special_tokens() {
  TinyVocabulary vocabulary;
  const TokenId end = vocabulary.add("<|end|>", kControl);
  const TokenId longer = vocabulary.add("<|end|>>", kControl);
  const TokenId user = vocabulary.add("<user>", kUserDefined);
  GgufBuilder builder = vocabulary.gguf();
  builder.set("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(longer));
  builder.set("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(end));
  const Tokenizer tokenizer = load(builder);
  const auto encode = [&](const std::string &text, bool parse) {
    return tokenizer.encode(text, {false, parse});
  };
  CHECK_EQUAL(encode("a<|end|>b<|end|>>", true), (std::vector<TokenId>{'a', end, 'b', longer}));
  CHECK_EQUAL(encode("a<|end|>", false), bytes_of("a<|end|>"));
  CHECK_EQUAL(encode("<user><", false), (std::vector<TokenId>{user, '<'}));
  CHECK_EQUAL(tokenizer.decode(end), std::string());
  CHECK_EQUAL(tokenizer.decode(user), std::string("<user>"));
  CHECK(tokenizer.ends_generation(end));
  CHECK(!tokenizer.ends_generation(user));
  CHECK_THROWS(Error, tokenizer.decode(-1), "outside the vocabulary");
  CHECK_THROWS(Error, tokenizer.decode(user + 1), "outside the vocabulary");

  CHECK_EQUAL(tokenizer.encode("a", {}), (std::vector<TokenId>{'a'}));
  builder.set("tokenizer.ggml.add_bos_token", true);
  builder.set("tokenizer.ggml.add_eos_token", true);
  const Tokenizer adding = load(builder);
  CHECK_EQUAL(adding.encode("a", {}), (std::vector<TokenId>{longer, 'a', end}));
  CHECK_EQUAL(adding.encode("a", {false, false}), (std::vector<TokenId>{'a'}));
}

void streams_whole_code_points() {
  TinyVocabulary vocabulary;
  const Tokenizer tokenizer = load(vocabulary.gguf());
  TextStream stream(tokenizer);
  const std::string text = "a\xC3\xA9\xF0\x9F\x8D\x95";
  std::vector<std::string> pieces;
  for (const TokenId token : bytes_of(text)) pieces.push_back(stream.push(token));
  CHECK_EQUAL(pieces, (std::vector<std::string>{"a", "", "\xC3\xA9", "", "", "", text.substr(3)}));
  CHECK_EQUAL(stream.finish(), std::string());

  CHECK_EQUAL(stream.push(0xE2), std::string());  // broken off by a letter
  CHECK_EQUAL(stream.push('x'), std::string("\xEF\xBF\xBDx"));
  CHECK_EQUAL(stream.push(0xE2), std::string());  // broken off by the end
  CHECK_EQUAL(stream.finish(), std::string("\xEF\xBF\xBD"));
  CHECK_EQUAL(stream.push(0xFF), std::string("\xEF\xBF\xBD"));  // never valid: not held back
}

void sentence_piece() {
  GgufBuilder builder;
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> kinds = {2, kControl, kControl};
  std::vector<float> scores = {0, 0, 0};
  for (unsigned byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    tokens.emplace_back(name);
    kinds.push_back(6);
    scores.push_back(0);
  }
  const auto add = [&](const std::string &text, float score) {
    tokens.push_back(text);
    kinds.push_back(kNormal);
    scores.push_back(score);
    return static_cast<TokenId>(tokens.size() - 1);
  };
  const std::string mark = "\xE2\x96\x81";
  const TokenId space = add(mark, -9);
  const TokenId a = add("a", -8);
  const TokenId b = add("b", -7);
  const TokenId ab = add("ab", -2);
  const TokenId space_a = add(mark + "a", -1);
  builder.set("tokenizer.ggml.model", std::string("llama"));
  builder.set("tokenizer.ggml.tokens", tokens);
  builder.set("tokenizer.ggml.token_type", kinds);
  builder.set("tokenizer.ggml.scores", scores);
  builder.set("tokenizer.ggml.bos_token_id", 1U);
  const Tokenizer tokenizer = load(builder);
  // The better score wins over the left pair; a space is put before the text.
  CHECK_EQUAL(tokenizer.encode("ab", {}), (std::vector<TokenId>{1, space_a, b}));
  CHECK_EQUAL(tokenizer.encode("bab", {false, false}), (std::vector<TokenId>{space, b, ab}));
  CHECK_EQUAL(tokenizer.encode("\xC3\xA9 a", {false, false}),
              (std::vector<TokenId>{space, 3 + 0xC3, 3 + 0xA9, space_a}));
  CHECK_EQUAL(tokenizer.decode(space_a), std::string(" a"));
  CHECK_EQUAL(tokenizer.decode(3 + 0xC3), std::string("\xC3"));
  CHECK_EQUAL(tokenizer.decode(a), std::string("a"));
}

void refuses_bad_files() {
  const TinyVocabulary vocabulary;
  CHECK_THROWS(Error, load(GgufBuilder()), "'tokenizer.ggml.tokens' is missing");
  CHECK_THROWS(Error, load(vocabulary.gguf("klingon")), "tokenizer.ggml.pre 'klingon'");
  CHECK_THROWS(Error, load(vocabulary.gguf().set("tokenizer.ggml.eos_token_id", 256U)),
               "tokenizer.ggml.eos_token_id 256 is outside the vocabulary of 256");
  for (const auto &[merge, message] : std::vector<std::pair<std::string, std::string>>{
           {"ab", "merge 'ab' is not a pair"},
           {"", "merge '' is not a pair"},
           {"a b", "merge 'a b' is not of known tokens"}}) {
    TinyVocabulary bad;
    bad.merges = {merge};
    CHECK_THROWS(Error, load(bad.gguf()), message);
  }
  TinyVocabulary kinds;
  kinds.kinds[5] = 9;
  CHECK_THROWS(Error, load(kinds.gguf()), "token 5 has the unknown type 9");
  kinds.kinds.pop_back();
  CHECK_THROWS(Error, load(kinds.gguf()), "differ in length");
  GgufBuilder other;
  other.set("tokenizer.ggml.model", std::string("bert"));
  other.set("tokenizer.ggml.tokens", std::vector<std::string>{"a"});
  CHECK_THROWS(Error, load(other), "tokenizer.ggml.model 'bert' is not supported");
}

struct SplitCase {
  const char *rule;
  std::string text;
  std::vector<std::string> words;
};

void splits_as_the_expressions_do() {
  const std::vector<SplitCase> cases = {
#include "pretokenizer_cases.inc"
  };
  for (const SplitCase &test : cases) {
    std::vector<std::string> words;
    for (const auto word : PreTokenizer::by_name(test.rule).split(test.text)) {
      words.emplace_back(word);
    }
    CHECK_EQUAL(words, test.words);
  }
}

void utf8() {
  for (char32_t code_point = 0; code_point <= 0x10FFFF; ++code_point) {
    if (code_point >= 0xD800 && code_point <= 0xDFFF) continue;
    const std::string text = encode_utf8(code_point);
    const DecodedCodePoint decoded = decode_utf8(text);
    if (!decoded.valid || decoded.value != code_point || decoded.bytes != text.size()) {
      CHECK_EQUAL(static_cast<uint32_t>(decoded.value), static_cast<uint32_t>(code_point));
    }
    for (size_t length = 1; length < text.size(); ++length) {
      if (complete_utf8_prefix("x" + text.substr(0, length)) != 1) {
        CHECK_EQUAL(static_cast<uint32_t>(code_point), 0xFFFFFFFFU);
      }
    }
  }
  // Overlong forms, surrogates, values above U+10FFFF and stray bytes are invalid, byte by byte.
  for (const char *text :
       {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\x80", "\xFF"}) {
    CHECK(!decode_utf8(text).valid);
    CHECK_EQUAL(complete_utf8_prefix(text), std::string(text).size());
  }
  CHECK_EQUAL(sanitize_utf8("a\xFF"
                            "b\xC3\xA9\xE2\x82"),
              std::string("a\xEF\xBF\xBD"
                          "b\xC3\xA9\xEF\xBF\xBD\xEF\xBF\xBD"));
}

}  // namespace
}  // namespace llm

int main() {
  llm::utf8();
  llm::splits_as_the_expressions_do();
  llm::merges_by_rank_then_from_the_left();
  llm::whole_words();
  llm::special_tokens();
  llm::streams_whole_code_points();
  llm::sentence_piece();
  llm::refuses_bad_files();
  return check::result();
}
