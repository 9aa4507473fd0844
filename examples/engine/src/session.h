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

// What a session has room for.
struct Room {
  uint64_t capacity = 0;  // tokens of a text, or of each of several
  // Texts that begin with the same `shared` tokens, and go on at the same time.
  uint64_t sequences = 1;
  uint64_t shared = 0;
};

class Session {
 public:
  // With `use_graph`, steps of one token, of each text, are replayed from a CUDA graph where the
  // model is on a GPU: one launch in place of some hundred. Keys and values are kept as `cache`
  // says.
  Session(const Model &model, const Room &room, bool use_graph, Args::Cache cache);

  const Context &context() const { return model_->context(); }
  uint64_t capacity() const { return room_.capacity; }
  uint64_t length() const { return length_; }
  // The most tokens of a step. A prompt that ranks divide by its tokens is one.
  uint64_t max_chunk() const { return max_chunk_; }
  uint64_t max_logit_rows() const { return max_logit_rows_; }
  bool uses_graph() const { return driver_ != nullptr; }
  uint64_t vocab_size() const { return model_->config().vocab_size; }

  // What the library expects the model and this session to take.
  unsloth_inference_memory estimate_memory() const;

  // Appends 1 to max_chunk() tokens to the text, or of several texts one to each. Prefill and
  // decoding are the same step, with many new tokens or with one. Queues work and returns.
  void forward(const TokenId *tokens, size_t count);

  // Makes as many texts of the one as there is room for. What they have in common they share.
  void fork();
  size_t num_sequences() const { return sequences_.size(); }

  // Which tokens of the last step, counted from 0, this rank has the logits of, row by row.
  const std::vector<uint32_t> &rows() const { return rows_; }
  // Whether those of the last token, of each text, are among them: the last num_sequences() rows.
  bool has_last() const { return !rows_.empty() && rows_.back() + 1 == last_count_; }

  // The logits of `rows` rows from `row` on, `[rows, vocab_size]` on the host, valid until the next
  // call. Waits for them.
  const float *logits(size_t row, size_t rows);

  // The likeliest token of each text after the last step, chosen on the device. Waits for them. Of
  // equal logits the first counts; NaN counts as the greatest. All ranks ask for it, and get the
  // same.
  const std::vector<TokenId> &likeliest();
  // The tokens of the rank that has the last token's logits, for all ranks: as many on each.
  std::vector<TokenId> share(const std::vector<TokenId> &tokens);
  // The sum of what ranks have that divide the rows. All ranks ask for it.
  double total(double own);

  void synchronize() const { context().synchronize(); }

  // Loads what steps of any number of tokens would load at the first of their size on a GPU. The
  // session may have a text.
  void warm_up() const;

  // Forgets the text, or all of them: an empty one is left.
  void reset();

 private:
  // Tokens that kernels for few take.
  static constexpr size_t kFewRows = 8;
  // Tokens of a step: bounds the activations.
  static uint64_t chunk_limit(const Context &context);

  void prepare_decoding();
  void extend(size_t count);
  void reserve_workspace(size_t count);
  void upload_ids(const TokenId *tokens, size_t count);
  void queue_embedding(size_t count);
  void queue_layers(size_t count);
  void queue_layer(size_t i, size_t count);
  void queue_layers_and_sums(size_t count);
  void add_up(size_t count, unsloth_tensor weight) const;
  void queue_logits(size_t row, size_t rows);
  void queue_likeliest(size_t rows);
  unsloth_tensor whole_rows_of_logits(size_t rows);
  const std::vector<TokenId> &share_ids(size_t count);
  void queue_step();
  void capture_step();
  void rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out) const;
  bool norms_in_products(size_t count) const;
  bool norms_in_sums(size_t count) const;
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
  Room room_;
  std::unique_ptr<ContextParallel> divided_;  // where ranks divide the text's tokens
  uint64_t max_chunk_;
  uint64_t max_rows_;  // of a step, of this rank
  uint64_t max_logit_rows_;
  unsloth_dtype dtype_;  // of hidden states
  uint64_t length_ = 0;
  size_t last_count_ = 0;
  size_t num_rows_ = 0;  // of the step, of this rank
  // Of the step that workspace was last reserved for.
  size_t reserved_rows_ = 0;
  size_t reserved_sequences_ = 0;
  std::vector<uint32_t> rows_;

  unsloth_kv_cache_params cache_params_;
  unsloth::KvCache cache_;
  std::vector<int64_t> sequences_;  // of the texts, which are as long

  // The tokens of a step. The likeliest ones are written to the first places, where the next step
  // finds them.
  Buffer ids_;
  std::vector<TokenId> likeliest_;  // what lies there; nothing where that is not known
  Buffer hidden_;                   // the residual stream
  // Of few tokens, where ranks divide weights: first this rank's parts of a sum, then the sum
  // normalised.
  GroupMemory sums_of_few_;
  Buffer normalized_;  // what a block, and at the end the output projection, takes in
  // Of each rank that divides the vocabulary in turn: rows of as many columns as the first one has
  // of the vocabulary.
  Buffer logits_;
  Buffer whole_rows_;  // the same of several texts, each row in one piece
  // Whether the last step's final logits are there already.
  bool logits_are_queued_ = false;
  Buffer workspace_;
  std::vector<float> host_logits_;
  std::vector<float> of_ranks_;  // as they are on the device
  Buffer sums_;                  // of all ranks that divide the rows

  std::unique_ptr<CudaDriver> driver_;
  // A step of one token of each text, its logits and the likeliest token.
  std::unique_ptr<CudaGraph> graph_;
};

}  // namespace llm
