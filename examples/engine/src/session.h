// A text being run through a model: its keys and values in a paged cache, and the buffers of one
// step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "args.h"
#include "context_parallel.h"
#include "cuda_graph.h"
#include "device.h"
#include "model.h"
#include "tokenizer.h"

namespace llm {

class Session {
 public:
  // Room for `capacity` tokens. With `use_graph`, steps of one token are replayed from a CUDA graph
  // where the model is on a GPU: one launch in place of some hundred. Keys and values are kept as
  // `cache` says.
  Session(const Model &model, uint64_t capacity, bool use_graph, Args::Cache cache);

  const Context &context() const { return model_->context(); }
  uint64_t capacity() const { return capacity_; }
  uint64_t length() const { return length_; }
  // The most tokens of a step. A prompt that ranks divide by its tokens is one.
  uint64_t max_chunk() const { return max_chunk_; }
  uint64_t max_logit_rows() const { return max_logit_rows_; }
  bool uses_graph() const { return driver_ != nullptr; }
  uint64_t vocab_size() const { return model_->config().vocab_size; }

  // What the library expects the model and this session to take.
  unsloth_inference_memory estimate_memory() const;

  // Appends 1 to max_chunk() tokens to the text. Prefill and decoding are the same step, with many
  // new tokens or with one. Queues work and returns.
  void forward(const TokenId *tokens, size_t count);

  // Which tokens of the last step, counted from 0, this rank has the logits of, row by row.
  const std::vector<uint32_t> &rows() const { return rows_; }
  // Whether those of the last token are among them: its row is the last one.
  bool has_last() const { return !rows_.empty() && rows_.back() + 1 == last_count_; }

  // The logits of `rows` rows from `row` on, `[rows, vocab_size]` on the host, valid until the next
  // call. Waits for them.
  const float *logits(size_t row, size_t rows);

  // The likeliest token after the last step, chosen on the device. Waits for it. Of equal logits
  // the first counts; NaN counts as the greatest. All ranks ask for it, and get the same.
  TokenId likeliest();
  // The token of the rank that has the last token's logits, for all ranks.
  TokenId share(TokenId token);
  // The sum of what ranks have that divide the rows. All ranks ask for it.
  double total(double own);

  void synchronize() const { context().synchronize(); }

  // Loads what steps of any number of tokens would load at the first of their size on a GPU. The
  // session may have a text.
  void warm_up() const;

  // Forgets the text.
  void reset();

 private:
  // Tokens that kernels for few take.
  static constexpr size_t kFewRows = 8;
  // Tokens of a step: bounds the activations.
  static uint64_t chunk_limit(const Context &context);

  void extend(size_t count);
  void reserve_workspace(size_t count);
  void upload_ids(const TokenId *tokens, size_t count);
  void queue_embedding(size_t count);
  void queue_layers(size_t count);
  void queue_layer(size_t i, size_t count);
  void queue_layers_and_sums(size_t count);
  void add_up(size_t count, unsloth_tensor weight) const;
  void queue_logits(size_t row, size_t rows);
  void queue_likeliest();
  TokenId share_first();
  void capture_step();
  void rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const;
  bool norms_in_products(size_t count) const;
  bool norms_in_sums() const;
  bool sums_divide_rows(size_t count) const;
  unsloth_attention_block_params attention_params(size_t layer, size_t count) const;
  unsloth_mlp_params mlp_params(size_t layer, size_t first, size_t count) const;
  unsloth_linear_params logits_params(size_t row, size_t rows) const;
  // Rows of the residual stream, and of what blocks take in.
  unsloth_tensor hidden_rows(size_t first, size_t count) const;
  unsloth_tensor normalized_rows(size_t first, size_t count) const;
  unsloth_tensor part_of_sum(size_t count) const;
  unsloth_tensor rows_of(void *data, size_t first, size_t count) const;
  ContextParallel::Call call(size_t rows) const;
  bool can_replay() const;
  // Those who divide layers or tokens, and thereby rows of logits; and who of them has the last
  // token's.
  const Group &sharing() const;
  int32_t speaker() const;
  uint64_t tensor_ranks() const { return static_cast<uint64_t>(model_->ranks().tensor.size); }

  const Model *model_;
  uint64_t capacity_;
  std::unique_ptr<ContextParallel> divided_;  // where ranks divide the text's tokens
  uint64_t max_chunk_;
  uint64_t max_rows_;  // of a step, of this rank
  uint64_t max_logit_rows_;
  unsloth_dtype dtype_;  // of hidden states
  uint64_t length_ = 0;
  size_t last_count_ = 0;
  size_t num_rows_ = 0;       // of the step, of this rank
  size_t reserved_rows_ = 0;  // of the step that workspace was last reserved for
  std::vector<uint32_t> rows_;

  unsloth_kv_cache_params cache_params_;
  unsloth::KvCache cache_;
  int64_t sequence_ = 0;

  // The tokens of a step. The likeliest token is written to the first, where the next step finds
  // it.
  Buffer ids_;
  bool likeliest_is_known_ = false;  // whether likeliest_ is that token
  TokenId likeliest_ = 0;
  Buffer hidden_;  // the residual stream
  // What a block, and at the end the output projection, takes in; and where ranks divide weights,
  // this rank's parts of a sum, behind which that lies.
  Buffer normalized_;
  GroupMemory parts_of_sums_;
  // Of each rank that divides the vocabulary in turn: rows of as many columns as the first one has
  // of the vocabulary.
  Buffer logits_;
  // Whether the last step's final logits are there already.
  bool logits_are_queued_ = false;
  Buffer workspace_;
  std::vector<float> host_logits_;
  std::vector<float> of_ranks_;  // as they are on the device
  Buffer sums_;                  // of all ranks that divide the rows

  std::unique_ptr<CudaDriver> driver_;
  std::unique_ptr<CudaGraph> graph_;  // a step of one token, its logits and the likeliest token
};

}  // namespace llm
