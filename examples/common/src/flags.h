// The flags of a command line, written `--name value` or `--name=value`.
#pragma once

#include <charconv>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

namespace llm {

// A mistake in the command line; the message names the flag and what it takes.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Each throws UsageError for a text that is not what the flag takes.
template <typename Integer>
Integer parse_integer(const std::string &flag, const std::string &text, Integer minimum) {
  Integer value = 0;
  const char *end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || value < minimum) {
    throw UsageError(flag + " takes an integer from " + std::to_string(minimum) + " to " +
                     std::to_string(std::numeric_limits<Integer>::max()) + ", not '" + text + "'");
  }
  return value;
}

// `range` says in words which numbers are allowed.
double parse_number(const std::string &flag, const std::string &text, bool (*allowed)(double),
                    const char *range);

template <typename Choice>
Choice parse_choice(const std::string &flag, const std::string &text,
                    const std::map<std::string, Choice> &choices) {
  const auto found = choices.find(text);
  if (found != choices.end()) return found->second;
  std::string names;
  for (const auto &[name, choice] : choices) names += (names.empty() ? "" : " or ") + name;
  throw UsageError(flag + " takes " + names + ", not '" + text + "'");
}

// Called with the flag and its value.
using SetValue = std::function<void(const std::string &flag, const std::string &value)>;

// Reads all arguments: `valued` flags take one value, `switches` none. Throws UsageError.
void parse_flags(int argc, const char *const *argv, const std::map<std::string, SetValue> &valued,
                 const std::map<std::string, bool *> &switches);

}  // namespace llm
