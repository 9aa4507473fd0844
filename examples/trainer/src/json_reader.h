// Reader of JSON (RFC 8259).
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;

  // The value of a key; nullptr if there is none, or this is no object.
  const Json *find(std::string_view key) const;
};

// What is wrong, and at which character of the text, from 1.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One value, and nothing but white space around it.
Json parse_json(std::string_view text);

}  // namespace llm
