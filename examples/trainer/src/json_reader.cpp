#include "json_reader.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "unicode.h"

namespace llm {
namespace {

constexpr int kMaxDepth = 64;  // of arrays and objects inside each other

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse_value(0);
    skip_space();
    if (at_ < text_.size()) fail("nothing may follow the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string &message) const {
    throw JsonError(message + ", at character " + std::to_string(at_ + 1));
  }

  void skip_space() {
    while (at_ < text_.size() &&
           std::string_view(" \t\r\n").find(text_[at_]) != std::string::npos) {
      ++at_;
    }
  }

  bool take(char expected) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != expected) return false;
    ++at_;
    return true;
  }

  void expect(char expected) {
    if (!take(expected)) fail(std::string("'") + expected + "' is missing");
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json parse_value(int depth) {
    skip_space();
    if (at_ >= text_.size()) fail("a value is missing");
    if (depth > kMaxDepth) fail("values are nested too deep");
    Json json;
    const char c = text_[at_];
    if (c == '{') {
      parse_object(&json, depth);
    } else if (c == '[') {
      parse_array(&json, depth);
    } else if (c == '"') {
      json.kind = Json::Kind::kString;
      json.string = parse_string();
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      json.kind = Json::Kind::kNumber;
      json.number = parse_number();
    } else if (take_word("true")) {
      json.kind = Json::Kind::kBool;
      json.boolean = true;
    } else if (take_word("false")) {
      json.kind = Json::Kind::kBool;
    } else if (!take_word("null")) {
      fail("a value is missing");
    }
    return json;
  }

  void parse_object(Json *json, int depth) {
    json->kind = Json::Kind::kObject;
    expect('{');
    if (take('}')) return;
    do {
      skip_space();
      if (at_ >= text_.size() || text_[at_] != '"') fail("a key in quotes is missing");
      std::string key = parse_string();
      if (json->find(key) != nullptr) fail("the key '" + key + "' appears twice");
      expect(':');
      json->members.emplace_back(std::move(key), parse_value(depth + 1));
    } while (take(','));
    expect('}');
  }

  void parse_array(Json *json, int depth) {
    json->kind = Json::Kind::kArray;
    expect('[');
    if (take(']')) return;
    do {
      json->items.push_back(parse_value(depth + 1));
    } while (take(','));
    expect(']');
  }

  double parse_number() {
    const size_t start = at_;
    const auto digits = [&] {
      const size_t first = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      if (at_ == first) fail("a digit is missing");
    };
    if (text_[at_] == '-') ++at_;
    if (at_ < text_.size() && text_[at_] == '0') {
      ++at_;
    } else {
      digits();
    }
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      digits();
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      digits();
    }
    return std::strtod(std::string(text_.substr(start, at_ - start)).c_str(), nullptr);
  }

  std::string parse_string() {
    ++at_;  // the quote
    std::string out;
    while (true) {
      if (at_ >= text_.size()) fail("a string has no end");
      const char c = text_[at_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < 0x20) fail("a string has a control character");
      ++at_;
      if (c == '\\') {
        parse_escape(&out);
      } else {
        out += c;
      }
    }
    ++at_;
    return out;
  }

  void parse_escape(std::string *out) {
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    if (at_ >= text_.size()) fail("a string has no end");
    const char name = text_[at_];
    if (name == 'u') {
      ++at_;
      uint32_t point = parse_hex();
      if (point >= 0xD800 && point < 0xDC00 && take_word("\\u")) {
        const uint32_t low = parse_hex();
        if (low < 0xDC00 || low > 0xDFFF) fail("half of a surrogate pair is missing");
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
      }
      if (point >= 0xD800 && point <= 0xDFFF) fail("half of a surrogate pair is missing");
      *out += encode_utf8(point);
      return;
    }
    const size_t found = kNames.find(name);
    if (found == std::string_view::npos)
      fail(std::string("the escape '\\") + name + "' is unknown");
    *out += kValues[found];
    ++at_;
  }

  uint32_t parse_hex() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      uint32_t digit = 0;
      if (c >= '0' && c <= '9') {
        digit = static_cast<uint32_t>(c - '0');
      } else if (c >= 'a' && c <= 'f') {
        digit = static_cast<uint32_t>(c - 'a' + 10);
      } else if (c >= 'A' && c <= 'F') {
        digit = static_cast<uint32_t>(c - 'A' + 10);
      } else {
        fail("\\u takes four hexadecimal digits");
      }
      value = value * 16 + digit;
    }
    return value;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const Json *Json::find(std::string_view key) const {
  for (const auto &[name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

Json parse_json(std::string_view text) { return Parser(text).document(); }

}  // namespace llm
