// Choosing the next token from the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace llm {

struct SamplerOptions {
  double temperature = 0.0;  // 0: the most likely token, always
  uint32_t top_k = 40;       // 0: all
  double top_p = 0.95;       // 1: all
  uint64_t seed = 0;
};

// The softmax of logits / temperature, cut to the `top_k` likeliest tokens and then to the fewest
// of those whose probability reaches `top_p`, is drawn from. Equal seeds give equal tokens on every
// platform: the generator is specified to the bit, the draw is our own (standard distributions
// differ between implementations), and ties go to the lower token.
class Sampler {
 public:
  explicit Sampler(const SamplerOptions &options) : options_(options), random_(options.seed) {}

  // Whether it takes the likeliest token, always.
  bool is_greedy() const { return options_.temperature == 0.0; }

  // Throws if a logit is NaN, which no sound model gives.
  int32_t sample(const float *logits, size_t count);

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };

  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

// Of equal logits, the first. Throws on NaN.
int32_t argmax(const float *logits, size_t count);

// log of the softmax of `logits` at `token`, in f64.
double log_probability(const float *logits, size_t count, int32_t token);

}  // namespace llm
