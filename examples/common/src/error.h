// The one exception of these programs: something outside the program (a file, a flag, the library)
// is not as it must be, and there is nothing to do but say so. It is caught once, in main.
#pragma once

#include <stdexcept>
#include <string>

namespace llm {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace llm
