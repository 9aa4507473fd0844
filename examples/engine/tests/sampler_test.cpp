#include "sampler.h"

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "check.h"
#include "error.h"

namespace llm {
namespace {

std::vector<int32_t> draw(const SamplerOptions &options, const std::vector<float> &logits, int n) {
  Sampler sampler(options);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(sampler.sample(logits.data(), logits.size()));
  return tokens;
}

std::map<int32_t, double> frequencies(const SamplerOptions &options,
                                      const std::vector<float> &logits) {
  constexpr int kDraws = 200000;
  std::map<int32_t, double> shares;
  for (const int32_t token : draw(options, logits, kDraws)) shares[token] += 1.0 / kDraws;
  return shares;
}

void greedy() {
  const float inf = std::numeric_limits<float>::infinity();
  CHECK_EQUAL(argmax(std::vector<float>{1, 3, 3, 2}.data(), 4), 1);  // of equals, the first
  CHECK_EQUAL(argmax(std::vector<float>{-inf, -5}.data(), 2), 1);
  CHECK_EQUAL(argmax(std::vector<float>{-inf, -inf}.data(), 2), 0);
  CHECK_EQUAL(draw({0.0, 0, 1.0, 1}, {1, 3, 2}, 4), (std::vector<int32_t>{1, 1, 1, 1}));
  CHECK_EQUAL(draw({5.0, 1, 1.0, 1}, {1, 3, 2}, 4), (std::vector<int32_t>{1, 1, 1, 1}));
  CHECK_EQUAL(draw({5.0, 0, 1e-9, 1}, {1, 3, 2}, 4), (std::vector<int32_t>{1, 1, 1, 1}));
  const std::vector<float> bad = {1, std::nanf(""), 2};
  CHECK_THROWS(Error, argmax(bad.data(), bad.size()), "the logit of token 1 is NaN");
}

// The draws follow the distribution that the options describe.
void follows_the_distribution() {
  const std::vector<float> logits = {std::log(0.1F), std::log(0.4F), std::log(0.2F),
                                     std::log(0.3F)};
  struct Case {
    SamplerOptions options;
    std::map<int32_t, double> expected;
  };
  const Case cases[] = {
      {{1.0, 0, 1.0, 7}, {{0, 0.1}, {1, 0.4}, {2, 0.2}, {3, 0.3}}},
      {{1.0, 2, 1.0, 7}, {{1, 4.0 / 7}, {3, 3.0 / 7}}},
      {{1.0, 0, 0.65, 7}, {{1, 4.0 / 7}, {3, 3.0 / 7}}},  // 0.4 + 0.3 reaches 0.65
      {{1.0, 0, 0.75, 7}, {{1, 4.0 / 9}, {3, 3.0 / 9}, {2, 2.0 / 9}}},
      {{0.5, 3, 1.0, 7}, {{1, 16.0 / 29}, {3, 9.0 / 29}, {2, 4.0 / 29}}},
      {{1.0, 3, 0.7, 7}, {{1, 4.0 / 7}, {3, 3.0 / 7}}},  // of the top 3, 7/9 reaches 0.7
  };
  for (const Case &test : cases) {
    const auto found = frequencies(test.options, logits);
    CHECK_EQUAL(found.size(), test.expected.size());
    for (const auto &[token, share] : test.expected) {
      const auto seen = found.find(token);
      // Five standard deviations of 200,000 draws are below 0.006.
      CHECK(seen != found.end() && std::fabs(seen->second - share) < 0.006);
    }
  }
}

void seeds() {
  std::vector<float> logits(100);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = 0.01F * static_cast<float>(i % 7);
  CHECK_EQUAL(draw({1.0, 0, 1.0, 42}, logits, 50), draw({1.0, 0, 1.0, 42}, logits, 50));
  CHECK(draw({1.0, 0, 1.0, 42}, logits, 50) != draw({1.0, 0, 1.0, 43}, logits, 50));
  // Fixed for good: the generator's first values are 14514284786278117030, 4620546740167642908,
  // 13109570281517897720 and 17462938647148434322, that is 0.787, 0.250, 0.711 and 0.947 of 2^64.
  CHECK_EQUAL(draw({1.0, 0, 1.0, 5489}, std::vector<float>(10), 4),
              (std::vector<int32_t>{7, 2, 7, 9}));
}

void scores() {
  const std::vector<float> logits = {1000, 1000 + std::log(3.0F), -1000};
  CHECK(std::fabs(log_probability(logits.data(), 3, 0) - std::log(0.25)) < 1e-4);
  CHECK(std::fabs(log_probability(logits.data(), 3, 1) - std::log(0.75)) < 1e-4);
  CHECK(std::fabs(log_probability(logits.data(), 3, 2) + 2000 - std::log(0.25)) < 1e-3);
}

}  // namespace
}  // namespace llm

int main() {
  llm::greedy();
  llm::follows_the_distribution();
  llm::seeds();
  llm::scores();
  return check::result();
}
