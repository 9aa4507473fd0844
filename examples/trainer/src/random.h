// Random numbers that are the same on every platform: SplitMix64 (Steele, Lea and Flood 2014).
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace llm {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  // One of many streams of a seed.
  Random(uint64_t seed, uint64_t stream) : state_(Random(seed).next() ^ Random(~stream).next()) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
    return bits ^ (bits >> 31);
  }

  // From 0 to before 1.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  template <typename T>
  void shuffle(std::vector<T> *values) {
    for (size_t i = values->size(); i > 1; --i) {
      // The bias of a remainder is below 2^-40 for any number of values that fits into memory.
      std::swap((*values)[i - 1], (*values)[next() % i]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace llm
