// The loop at the heart of both tokenizers: merge the best pair of neighbouring symbols until no
// pair can be merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

namespace llm {

constexpr int32_t kNoToken = -1;

// A stretch of a word and the token it is, or kNoToken.
struct Symbol {
  size_t offset;
  size_t length;
  int32_t token;
};

struct Merge {
  double cost;  // pairs of lower cost merge first; of equal cost, the leftmost
  int32_t token;
};

// `find_merge(left, right)` gives the std::optional<Merge> of two neighbours. A heap of candidate
// pairs over a linked list of symbols: O(n log n), where rescanning after each merge would be
// O(n^2).
template <typename FindMerge>
std::vector<Symbol> merge_symbols(std::vector<Symbol> symbols, const FindMerge &find_merge) {
  constexpr size_t kEnd = SIZE_MAX;
  struct Candidate {
    Merge merge;
    size_t left;
    size_t right;
    size_t length;  // of both when proposed: another value later means that one of them has changed
  };
  const auto later = [](const Candidate &a, const Candidate &b) {
    return a.merge.cost != b.merge.cost ? a.merge.cost > b.merge.cost : a.left > b.left;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> candidates(later);

  const size_t count = symbols.size();
  std::vector<size_t> next(count);
  std::vector<size_t> previous(count);
  const auto propose = [&](size_t left, size_t right) {
    if (left == kEnd || right == kEnd) return;
    const std::optional<Merge> merge = find_merge(symbols[left], symbols[right]);
    if (!merge) return;
    candidates.push({*merge, left, right, symbols[left].length + symbols[right].length});
  };
  for (size_t i = 0; i < count; ++i) {
    previous[i] = i == 0 ? kEnd : i - 1;
    next[i] = i + 1 == count ? kEnd : i + 1;
  }
  for (size_t i = 0; i + 1 < count; ++i) propose(i, i + 1);

  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol &left = symbols[best.left];
    Symbol &right = symbols[best.right];
    // A symbol merged away has length 0, so that a stale pair never has its old length.
    if (left.length == 0 || right.length == 0 || left.length + right.length != best.length)
      continue;
    left.length = best.length;
    left.token = best.merge.token;
    right.length = 0;
    next[best.left] = next[best.right];
    if (next[best.left] != kEnd) previous[next[best.left]] = best.left;
    propose(previous[best.left], best.left);
    propose(best.left, next[best.left]);
  }

  std::vector<Symbol> merged;
  for (const Symbol &symbol : symbols) {
    if (symbol.length > 0) merged.push_back(symbol);
  }
  return merged;
}

}  // namespace llm
