// A text whose tokens ranks divide: which of them this rank has, and attention over all of them.
//
// The tokens of a prompt are divided in zigzag order, in which ranks have as much to attend to, and
// each keeps the keys and values of its own. A token behind the prompt is run by all ranks alike;
// one of them keeps its key and value, each attends to what it has kept, and the outputs are
// merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device.h"
#include "model.h"

namespace llm {

class ContextParallel {
 public:
  // What a block works on, as the session has it. The cache's current batch is of `num_kept()`
  // tokens.
  struct Call {
    unsloth_kv_cache *cache;
    unsloth_tensor normalized, hidden;  // [num_rows(), hidden_size]
    void *workspace;
    size_t workspace_size;
  };

  // Of texts of up to `capacity` tokens.
  ContextParallel(const Model &model, uint64_t capacity);

  uint64_t max_rows() const { return max_rows_; }  // of any step
  uint64_t max_kept() const;                       // of any text
  uint64_t bytes() const;                          // of buffers

  // Makes `count` tokens behind `length` ones the current step: a prompt's, or one more.
  void begin(uint64_t length, size_t count);
  // The rows that this rank runs: of tokens of the step, counted from 0, and then padding.
  size_t num_rows() const { return num_rows_; }
  const std::vector<uint32_t> &tokens() const { return tokens_; }
  // How many of these it keeps: all of a prompt, or whether it keeps the one.
  size_t num_kept() const { return num_kept_; }
  // Who ran the prompt's last token, and speaks for all since.
  int32_t speaker() const { return speaker_; }

  // What `attend` needs in the current step.
  size_t workspace_size(size_t layer, const Call &call) const;
  // Queues hidden += attention(normalized).
  void attend(size_t layer, const Call &call) const;

 private:
  bool is_prompt() const { return num_rows_ > 1; }
  std::vector<unsloth_linear_params> projections(size_t layer, const Call &call) const;
  unsloth_linear_params output(size_t layer, const Call &call) const;
  unsloth_context_parallel_attention_params over_prompt(const Call &call) const;
  unsloth_attention_params over_kept(size_t layer, const Call &call) const;
  void rotate() const;
  void keep(size_t layer, const Call &call) const;
  void merge() const;

  // The projections' `heads` heads from `first` on, of `rows` rows: [rows, heads, head_dim].
  unsloth_tensor projected(uint64_t first, uint64_t heads, size_t rows) const;
  // The same of all rows, as attention takes a batch of one sequence.
  unsloth_tensor sequence(uint64_t first, uint64_t heads) const;
  unsloth_tensor attended() const;  // [1, rows, num_heads, head_dim]
  uint64_t num_projected() const;   // heads of queries, keys and values
  uint64_t partial_size() const;    // f32 of one rank's output and its log-sum-exps

  const Model *model_;
  Group group_;
  unsloth_dtype dtype_;
  uint64_t capacity_;
  uint64_t max_rows_;
  size_t num_rows_ = 0;
  size_t num_kept_ = 0;
  std::vector<uint32_t> tokens_;
  int32_t speaker_ = 0;

  Buffer positions_;  // of rows
  Buffer projected_;  // queries, keys and values of each row
  Buffer attended_;
  Buffer partials_;  // of one token, by each rank
};

}  // namespace llm
