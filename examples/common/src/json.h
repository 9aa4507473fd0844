// A writer of JSON: commas, indentation and escapes are right whatever is written.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "unicode.h"

namespace llm {

class JsonWriter {
 public:
  enum class Style { kIndented, kOneLine };
  explicit JsonWriter(Style style = Style::kIndented) : one_line_(style == Style::kOneLine) {}

  JsonWriter &begin_object() { return open('{'); }
  JsonWriter &end_object() { return close('}'); }
  JsonWriter &begin_array() { return open('['); }
  JsonWriter &end_array() { return close(']'); }

  JsonWriter &key(std::string_view name) {
    separate();
    write_string(name);
    text_ += ": ";
    after_key_ = true;
    return *this;
  }

  JsonWriter &value(std::string_view text) {
    separate();
    write_string(text);
    return *this;
  }

  // The shortest text that reads back as the same number; JSON has no NaN or infinity, so null.
  JsonWriter &value(double number) {
    separate();
    if (!std::isfinite(number)) {
      text_ += "null";
      return *this;
    }
    return write_number(number);
  }

  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  JsonWriter &value(Integer number) {
    separate();
    if constexpr (std::is_same_v<Integer, bool>) {
      text_ += number ? "true" : "false";
      return *this;
    } else {
      return write_number(number);
    }
  }

  // On one line, however many.
  JsonWriter &value(const std::vector<int32_t> &numbers) {
    separate();
    text_ += '[';
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (i > 0) text_ += ", ";
      write_number(numbers[i]);
    }
    text_ += ']';
    return *this;
  }

  const std::string &text() const { return text_; }

 private:
  JsonWriter &open(char bracket) {
    separate();
    text_ += bracket;
    ++depth_;
    first_ = true;
    return *this;
  }

  JsonWriter &close(char bracket) {
    --depth_;
    if (!first_) new_line();
    text_ += bracket;
    first_ = false;
    return *this;
  }

  void separate() {
    if (after_key_) {
      after_key_ = false;
      return;
    }
    if (depth_ == 0) return;
    if (!first_) text_ += one_line_ ? ", " : ",";
    first_ = false;
    new_line();
  }

  void new_line() {
    if (one_line_) return;
    text_ += '\n';
    text_.append(2 * depth_, ' ');
  }

  template <typename Number>
  JsonWriter &write_number(Number number) {
    char digits[32];
    const auto end = std::to_chars(std::begin(digits), std::end(digits), number);
    text_.append(digits, end.ptr);
    return *this;
  }

  void write_string(std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    text_ += '"';
    for (const char c : sanitize_utf8(text)) {
      const auto byte = static_cast<unsigned char>(c);
      switch (c) {
        case '"':
          text_ += "\\\"";
          break;
        case '\\':
          text_ += "\\\\";
          break;
        case '\n':
          text_ += "\\n";
          break;
        case '\r':
          text_ += "\\r";
          break;
        case '\t':
          text_ += "\\t";
          break;
        default:
          if (byte < 0x20 || byte == 0x7F) {
            text_ += "\\u00";
            text_ += kHex[byte >> 4];
            text_ += kHex[byte & 0xF];
          } else {
            text_ += c;
          }
      }
    }
    text_ += '"';
  }

  bool one_line_;
  std::string text_;
  size_t depth_ = 0;
  bool first_ = true;
  bool after_key_ = false;
};

}  // namespace llm
