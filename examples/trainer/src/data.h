// What a model is taught: examples out of a file, and batches packed from them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gguf.h"
#include "tokenizer.h"

namespace llm {

// Tokens, and for each whether the model is to learn to say it. Losses of what is not (a question,
// say) do not count.
struct Example {
  std::vector<TokenId> tokens;
  std::vector<uint8_t> learned;
};

struct Dataset {
  std::vector<Example> examples;
  uint64_t cut = 0;      // examples that were longer than a batch
  uint64_t dropped = 0;  // of them those of which nothing to learn was left
};

// Reads a file by its ending.
//
//   .txt     one text, cut into pieces that fill a batch
//   .jsonl   an example a line, one of
//            {"text": ..}
//            {"prompt": .., "completion": ..}
//            {"messages": [{"role": .., "content": ..}, ..]}, in the turns of the model's template
//
// Of prompts and messages only completions and the assistant's turns are learned. Examples are cut
// to `max_tokens` inputs. Throws Error, with the line where there is one.
Dataset read_dataset(const std::string &path, const Gguf &gguf, const Tokenizer &tokenizer,
                     uint64_t max_tokens);

// Sequences one after the other. Every batch has the same sizes, so that what is computed from a
// batch's shape is computed once: what sequences leave of the tokens is one more sequence, which
// nothing is learned from, and the sequences after that are empty.
struct Batch {
  std::vector<TokenId> ids;         // [tokens]
  std::vector<int32_t> targets;     // [tokens]: the token after each, -100 where it is not learned
  std::vector<int32_t> positions;   // [tokens]: from 0 in each sequence
  std::vector<int32_t> cu_seqlens;  // [sequences + 1]
  // Of a part: where sequences begin among the tokens of all parts, `cu_seqlens` being of its own.
  std::vector<int32_t> cu_seqlens_k;
  uint64_t learned = 0;  // targets that count
  uint64_t used = 0;     // tokens of examples
};

constexpr int32_t kIgnored = -100;

// A rank's tokens where `size` ranks have as many each, one behind the other; `learned` and `used`
// are those of the whole.
Batch part_of(const Batch &batch, int32_t rank, int32_t size);

// The batches of one epoch after the other, each in an order of its own that follows from the seed.
class Batches {
 public:
  Batches(std::vector<Example> examples, uint64_t tokens, uint64_t seed);

  uint64_t tokens() const { return tokens_; }
  uint64_t max_sequences() const { return max_sequences_; }
  // Of the first `epochs` together.
  uint64_t count(uint64_t epochs);
  // The one of this number, counted from 0 through all epochs.
  Batch get(uint64_t number);

 private:
  void pack(uint64_t epoch);

  std::vector<Example> examples_;
  uint64_t tokens_;
  uint64_t max_sequences_;
  uint64_t seed_;
  uint64_t epoch_ = 0;
  uint64_t first_ = 0;                         // number of the first batch of the epoch
  std::vector<std::vector<uint32_t>> packed_;  // examples of each of the epoch's batches
};

}  // namespace llm
