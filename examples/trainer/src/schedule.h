// The learning rate of each step.
#pragma once

#include <cmath>
#include <cstdint>

#include "args.h"

namespace llm {

// Of step `step`, counted from 0, of `steps`: rises in a line over `warmup` steps to `rate`, then
// stays, falls in a line, or along half a cosine, towards 0 after the last step.
inline double learning_rate(Schedule schedule, double rate, uint64_t warmup, uint64_t step,
                            uint64_t steps) {
  constexpr double kPi = 3.14159265358979323846;
  if (step < warmup) return rate * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (steps <= warmup) return rate;
  const double done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  switch (schedule) {
    case Schedule::kLinear:
      return rate * (1 - done);
    case Schedule::kCosine:
      return rate * 0.5 * (1 + std::cos(kPi * done));
    case Schedule::kConstant:
      break;
  }
  return rate;
}

}  // namespace llm
