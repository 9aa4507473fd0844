// The emulator's memory is not asked for too much.
#pragma once

#include <cstdint>

namespace unsloth {

class Pace {
 public:
  explicit Pace(uint32_t) {}

  void await_turn() {}
};

}  // namespace unsloth
