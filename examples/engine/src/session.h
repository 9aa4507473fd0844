// A text being run through a model: its keys and values in a paged cache, and the buffers of one
// step.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"
#include "tokenizer.h"
#include "unsloth.hpp"

namespace engine {

// What the library expects the model and session to allocate, in bytes.
struct MemoryEstimate {
  uint64_t weights = 0;
  uint64_t kv_cache = 0;
  uint64_t activations = 0;
  uint64_t workspace = 0;
  uint64_t total = 0;
};

class Session {
 public:
  // Room for `capacity` tokens, allocated here and now; nothing is allocated later.
  Session(const Model &model, uint64_t capacity);

  const Context &context() const { return model_->context(); }
  uint64_t capacity() const { return capacity_; }
  uint64_t length() const { return length_; }
  uint64_t max_chunk() const { return max_chunk_; }
  uint64_t max_logit_rows() const { return max_logit_rows_; }
  uint64_t vocab_size() const { return model_->config().vocab_size; }
  MemoryEstimate memory_estimate() const { return {}; }

  // Appends 1 to max_chunk() tokens to the text: prefill and decoding are the same step, with many
  // new tokens or one. Queues work and returns.
  void forward(const TokenId *tokens, size_t count);

  // The logits after token `row` to `row + rows - 1` of the last step, `[rows, vocab_size]` on the
  // host; valid until the next call. Waits for them.
  const float *logits(size_t row, size_t rows);
  size_t last_row() const { return last_count_ - 1; }

  void synchronize() const { context().synchronize(); }

  // Forgets the text.
  void reset();

 private:
  void embed(const TokenId *tokens, size_t count);
  void attention_block(const LayerWeights &weights, size_t layer, size_t count);
  void mlp_block(const LayerWeights &weights, size_t count);
  void rms_norm(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor out);
  void linear(unsloth_tensor x, unsloth_tensor weight, unsloth_tensor bias, unsloth_tensor residual,
              unsloth_tensor out);
  unsloth_attention_params attention_params(size_t layer, size_t count);
  unsloth_mlp_params mlp_params(const LayerWeights &weights, size_t count);
  void extend(size_t count);
  size_t workspace_size();
  unsloth_tensor rows(const Buffer &buffer, size_t count, uint64_t columns) const;
  unsloth_tensor heads(const Buffer &buffer, size_t count, uint64_t num_heads) const;

  const Model *model_;
  uint64_t capacity_;
  uint64_t max_chunk_;
  uint64_t max_logit_rows_;
  unsloth_dtype dtype_;  // of activations, keys and values
  unsloth_rotation rotation_;
  uint64_t length_ = 0;
  size_t last_count_ = 0;

  KvCache cache_;
  int64_t sequence_ = 0;
  unsloth_kv_cache_batch batch_ = UNSLOTH_KV_CACHE_BATCH_INIT;

  Buffer ids_;
  Buffer hidden_;      // the residual stream
  Buffer normalized_;  // what a block, and at the end the output projection, takes in
  Buffer q_, k_, v_;
  Buffer attention_;
  Buffer workspace_;
  Buffer logits_;
  std::vector<float> host_logits_;
};

}  // namespace engine
