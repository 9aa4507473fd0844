#include "flags.h"

#include <cstdlib>
#include <optional>

namespace llm {

double parse_number(const std::string &flag, const std::string &text, bool (*allowed)(double),
                    const char *range) {
  char *end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size() || !allowed(value)) {
    throw UsageError(flag + " takes a number " + range + ", not '" + text + "'");
  }
  return value;
}

void parse_flags(int argc, const char *const *argv, const std::map<std::string, SetValue> &valued,
                 const std::map<std::string, bool *> &switches) {
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    std::optional<std::string> value;
    if (const size_t equals = flag.find('='); equals != std::string::npos) {
      value = flag.substr(equals + 1);
      flag.resize(equals);
    }
    if (const auto found = switches.find(flag); found != switches.end()) {
      if (value) throw UsageError(flag + " takes no value");
      *found->second = true;
      continue;
    }
    const auto found = valued.find(flag);
    if (found == valued.end()) throw UsageError("unknown flag '" + flag + "'");
    if (!value) {
      if (i + 1 >= argc) throw UsageError(flag + " needs a value");
      value = argv[++i];
    }
    found->second(flag, *value);
  }
}

}  // namespace llm
