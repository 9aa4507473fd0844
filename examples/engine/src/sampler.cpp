#include "sampler.h"

#include <algorithm>
#include <cmath>

#include "error.h"

namespace llm {

int32_t Sampler::sample(const float *logits, size_t count) {
  const int32_t best = argmax(logits, count);
  if (options_.temperature <= 0.0 || options_.top_k == 1) return best;

  candidates_.resize(count);
  for (size_t i = 0; i < count; ++i) candidates_[i] = {logits[i], static_cast<int32_t>(i)};
  const auto likelier = [](const Candidate &a, const Candidate &b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  const size_t kept = options_.top_k == 0 ? count : std::min<size_t>(options_.top_k, count);
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(kept),
                    candidates_.end(), likelier);

  weights_.resize(kept);
  double total = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    const double difference = static_cast<double>(candidates_[i].logit) - candidates_[0].logit;
    weights_[i] = std::exp(difference / options_.temperature);
    total += weights_[i];
  }
  size_t nucleus = 0;
  double mass = 0.0;
  do {
    mass += weights_[nucleus++];
  } while (nucleus < kept && mass < options_.top_p * total);

  const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;  // in [0, 1)
  double left = uniform * mass;
  for (size_t i = 0; i < nucleus; ++i) {
    left -= weights_[i];
    if (left < 0.0) return candidates_[i].token;
  }
  return candidates_[nucleus - 1].token;  // rounding left a rest
}

int32_t argmax(const float *logits, size_t count) {
  size_t best = 0;
  for (size_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) throw Error("the logit of token " + std::to_string(i) + " is NaN");
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<int32_t>(best);
}

double log_probability(const float *logits, size_t count, int32_t token) {
  const double maximum = *std::max_element(logits, logits + count);
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += std::exp(logits[i] - maximum);
  return logits[token] - maximum - std::log(sum);
}

}  // namespace llm
