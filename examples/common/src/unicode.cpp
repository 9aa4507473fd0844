#include "unicode.h"

#include <algorithm>
#include <iterator>

namespace llm {
namespace {

constexpr auto kLetter = CodePointClass::kLetter;
constexpr auto kNumber = CodePointClass::kNumber;
constexpr auto kSpace = CodePointClass::kSpace;

struct Range {
  char32_t first;
  char32_t last;
  CodePointClass kind;
};

constexpr Range kRanges[] = {
#include "unicode_table.inc"
};

// What the first byte of a sequence says: its length, and the bounds of the second byte that
// exclude overlong forms, surrogates and values above U+10FFFF (Unicode, table 3-7).
struct Lead {
  size_t length = 0;  // 0: no sequence starts with this byte
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xBF;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte < 0xC2) return {0};
  if (byte < 0xE0) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0};
}

// How many of the first bytes of `text` agree with the sequence that its first byte begins.
size_t matching_bytes(std::string_view text, const Lead &lead) {
  size_t count = 1;
  while (count < lead.length && count < text.size()) {
    const auto byte = static_cast<uint8_t>(text[count]);
    const bool second = count == 1;
    if (byte < (second ? lead.second_min : 0x80) || byte > (second ? lead.second_max : 0xBF)) break;
    ++count;
  }
  return count;
}

}  // namespace

CodePointClass classify(char32_t code_point) {
  const auto *range = std::lower_bound(
      std::begin(kRanges), std::end(kRanges), code_point,
      [](const Range &candidate, char32_t value) { return candidate.last < value; });
  const bool inside = range != std::end(kRanges) && range->first <= code_point;
  return inside ? range->kind : CodePointClass::kOther;
}

DecodedCodePoint decode_utf8(std::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  const Lead lead = lead_of(first);
  if (lead.length == 0 || matching_bytes(text, lead) < lead.length) return {0xFFFD, 1, false};
  if (lead.length == 1) return {first, 1, true};
  char32_t value = first & (0xFFU >> (lead.length + 1));
  for (size_t i = 1; i < lead.length; ++i) {
    value = value << 6 | (static_cast<uint8_t>(text[i]) & 0x3FU);
  }
  return {value, lead.length, true};
}

std::string encode_utf8(char32_t code_point) {
  const auto continuation = [code_point](int shift) {
    return static_cast<char>(0x80U | ((code_point >> shift) & 0x3FU));
  };
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  if (code_point < 0x800) return {static_cast<char>(0xC0U | code_point >> 6), continuation(0)};
  if (code_point < 0x10000) {
    return {static_cast<char>(0xE0U | code_point >> 12), continuation(6), continuation(0)};
  }
  return {static_cast<char>(0xF0U | code_point >> 18), continuation(12), continuation(6),
          continuation(0)};
}

size_t complete_utf8_prefix(std::string_view text) {
  const size_t longest_partial = std::min<size_t>(text.size(), 3);
  for (size_t tail = 1; tail <= longest_partial; ++tail) {
    const std::string_view end = text.substr(text.size() - tail);
    const Lead lead = lead_of(static_cast<uint8_t>(end[0]));
    if (lead.length > tail && matching_bytes(end, lead) == tail) return text.size() - tail;
  }
  return text.size();
}

std::string sanitize_utf8(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const DecodedCodePoint decoded = decode_utf8(text);
    clean += decoded.valid ? std::string(text.substr(0, decoded.bytes)) : encode_utf8(0xFFFD);
    text.remove_prefix(decoded.bytes);
  }
  return clean;
}

}  // namespace llm
