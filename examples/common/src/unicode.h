// UTF-8 and the three classes of code points that pre-tokenizers tell apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace llm {

enum class CodePointClass : uint8_t { kOther, kLetter, kNumber, kSpace };

// \p{L}, \p{N}, \s (White_Space), or none of them.
CodePointClass classify(char32_t code_point);

struct DecodedCodePoint {
  char32_t value;
  size_t bytes;  // 1 to 4
  bool valid;    // if not, value is U+FFFD and bytes is 1
};

// The code point at the start of `text`, which is not empty.
DecodedCodePoint decode_utf8(std::string_view text);

std::string encode_utf8(char32_t code_point);

// The length of the longest prefix of `text` that does not end inside a code point. A tail that can
// no longer become valid UTF-8 counts as complete.
size_t complete_utf8_prefix(std::string_view text);

// `text` with each byte that is not part of valid UTF-8 replaced by U+FFFD.
std::string sanitize_utf8(std::string_view text);

}  // namespace llm
