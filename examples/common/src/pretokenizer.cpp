#include "pretokenizer.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "error.h"
#include "unicode.h"

// The rules are published as regular expressions with Unicode classes and look-ahead, which
// std::regex has not; each alternative is a function below that gives the length of its match at a
// position, or 0. As in a regular expression, the first alternative that matches wins.
//
//   gpt-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   smollm   \p{N} cut out one by one, then gpt-2 on each of the pieces between
//   llama3   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
//            | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   qwen2    llama3 with \p{N} in place of \p{N}{1,3}

namespace llm {
namespace {

using Class = CodePointClass;

struct CodePoint {
  char32_t value;
  Class kind;
  size_t offset;  // in bytes
};

// Code points of a text; reading past the end gives a class that no alternative accepts.
class Scanner {
 public:
  Scanner(const std::vector<CodePoint> &points, size_t begin, size_t end)
      : points_(points), begin_(begin), end_(end) {}

  size_t size() const { return end_ - begin_; }
  bool inside(size_t i) const { return i < size(); }
  bool is(size_t i, Class kind) const { return inside(i) && at(i).kind == kind; }
  bool is_value(size_t i, char32_t value) const { return inside(i) && at(i).value == value; }
  bool is_newline(size_t i) const { return is_value(i, '\r') || is_value(i, '\n'); }
  char32_t value(size_t i) const { return inside(i) ? at(i).value : U'\0'; }

  // How many code points from i on are of the class, up to `limit`.
  size_t run(size_t i, Class kind, size_t limit = SIZE_MAX) const {
    size_t count = 0;
    while (count < limit && is(i + count, kind)) ++count;
    return count;
  }

  size_t newline_run(size_t i) const {
    size_t count = 0;
    while (is_newline(i + count)) ++count;
    return count;
  }

 private:
  const CodePoint &at(size_t i) const { return points_[begin_ + i]; }

  const std::vector<CodePoint> &points_;
  size_t begin_;
  size_t end_;
};

// 's|'t|'re|'ve|'m|'ll|'d
size_t match_contraction(const Scanner &text, size_t i, bool ignore_case) {
  if (!text.is_value(i, U'\'')) return 0;
  const auto lower = [&](size_t k) {
    const char32_t value = text.value(k);
    return ignore_case && value >= U'A' && value <= U'Z' ? value + (U'a' - U'A') : value;
  };
  const char32_t first = lower(i + 1);
  if (first == U's' || first == U't' || first == U'm' || first == U'd') return 2;
  const char32_t second = lower(i + 2);
  const bool two = (first == U'r' && second == U'e') || (first == U'v' && second == U'e') ||
                   (first == U'l' && second == U'l');
  return two ? 3 : 0;
}

//  ?CLASS+
size_t match_spaced_run(const Scanner &text, size_t i, Class kind) {
  const size_t space = text.is_value(i, U' ') ? 1 : 0;
  const size_t run = text.run(i + space, kind);
  return run > 0 ? space + run : 0;
}

// \s+(?!\S)|\s+: a run of white space leaves its last one to the word that follows, if it can.
size_t match_spaces(const Scanner &text, size_t i) {
  const size_t run = text.run(i, Class::kSpace);
  return run > 1 && text.inside(i + run) ? run - 1 : run;
}

size_t match_gpt2(const Scanner &text, size_t i) {
  if (const size_t length = match_contraction(text, i, false)) return length;
  for (const Class kind : {Class::kLetter, Class::kNumber, Class::kOther}) {
    if (const size_t length = match_spaced_run(text, i, kind)) return length;
  }
  return match_spaces(text, i);
}

// [^\r\n\p{L}\p{N}]?\p{L}+
size_t match_prefixed_letters(const Scanner &text, size_t i) {
  const bool prefix =
      !text.is_newline(i) && !text.is(i, Class::kLetter) && !text.is(i, Class::kNumber);
  const size_t start = prefix ? 1 : 0;
  const size_t run = text.run(i + start, Class::kLetter);
  return run > 0 ? start + run : 0;
}

// \s*[\r\n]+ with back-tracking: up to the last newline of the run of white space.
size_t match_spaces_to_newline(const Scanner &text, size_t i) {
  size_t length = text.run(i, Class::kSpace);
  while (length > 0 && !text.is_newline(i + length - 1)) --length;
  return length;
}

size_t match_llama3(const Scanner &text, size_t i, size_t max_digits) {
  if (const size_t length = match_contraction(text, i, true)) return length;
  if (const size_t length = match_prefixed_letters(text, i)) return length;
  if (const size_t length = text.run(i, Class::kNumber, max_digits)) return length;
  if (const size_t length = match_spaced_run(text, i, Class::kOther)) {
    return length + text.newline_run(i + length);
  }
  if (const size_t length = match_spaces_to_newline(text, i)) return length;
  return match_spaces(text, i);
}

std::vector<CodePoint> decode(std::string_view text) {
  std::vector<CodePoint> points;
  points.reserve(text.size());
  for (size_t offset = 0; offset < text.size();) {
    const DecodedCodePoint decoded = decode_utf8(text.substr(offset));
    points.push_back({decoded.value, classify(decoded.value), offset});
    offset += decoded.bytes;
  }
  return points;
}

}  // namespace

PreTokenizer PreTokenizer::by_name(const std::string &name) {
  if (name == "gpt-2") return PreTokenizer(Rule::kGpt2);
  if (name == "smollm") return PreTokenizer(Rule::kSmolLm);
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    return PreTokenizer(Rule::kLlama3);
  }
  if (name == "qwen2" || name == "deepseek-r1-qwen") return PreTokenizer(Rule::kQwen2);
  throw Error("tokenizer.ggml.pre '" + name +
              "' is not known (gpt-2, smollm, llama-bpe and qwen2 are)");
}

std::vector<std::string_view> PreTokenizer::split(std::string_view text) const {
  const std::vector<CodePoint> points = decode(text);
  std::vector<std::string_view> words;
  const auto add = [&](size_t begin, size_t end) {
    const size_t from = points[begin].offset;
    const size_t to = end < points.size() ? points[end].offset : text.size();
    words.push_back(text.substr(from, to - from));
  };
  const auto add_matches = [&](size_t begin, size_t end, const auto &match) {
    const Scanner scanner(points, begin, end);
    for (size_t i = 0; i < scanner.size();) {
      const size_t length = std::max<size_t>(match(scanner, i), 1);
      add(begin + i, begin + i + length);
      i += length;
    }
  };

  switch (rule_) {
    case Rule::kGpt2:
      add_matches(0, points.size(), match_gpt2);
      break;
    case Rule::kSmolLm:
      for (size_t begin = 0; begin < points.size();) {
        size_t end = begin;
        while (end < points.size() && points[end].kind != Class::kNumber) ++end;
        add_matches(begin, end, match_gpt2);
        if (end < points.size()) add(end, end + 1);
        begin = end + 1;
      }
      break;
    case Rule::kLlama3:
    case Rule::kQwen2: {
      const size_t max_digits = rule_ == Rule::kLlama3 ? 3 : 1;
      add_matches(0, points.size(), [max_digits](const Scanner &scanner, size_t i) {
        return match_llama3(scanner, i, max_digits);
      });
      break;
    }
  }
  return words;
}

}  // namespace llm
