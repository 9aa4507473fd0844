#include "session.h"

// What a session is expected to take, as the library estimates it from the model's shape.

namespace llm {

unsloth_inference_memory Session::estimate_memory() const {
  const ModelConfig &config = model_->config();
  unsloth_model_params model = UNSLOTH_MODEL_PARAMS_INIT;
  model.tied_embeddings = config.tied_embeddings ? 1 : 0;
  const LayerWeights &layer = model_->layers()[0];
  model.qkv_bias = layer.qkv_bias.rank + layer.q_bias.rank != 0 ? 1 : 0;
  model.output_bias = model_->layers()[0].attention_output_bias.rank != 0 ? 1 : 0;
  const Ranks &ranks = model_->ranks();
  const uint64_t vocabulary = ranks.has_output() ? model_->vocabulary().rows : vocab_size();
  model.vocab_size = static_cast<int64_t>(vocabulary);
  model.hidden_size = static_cast<int64_t>(config.hidden_size);
  model.intermediate_size = static_cast<int64_t>(config.intermediate_size);
  model.num_layers = static_cast<int64_t>(config.num_layers);
  model.num_heads = static_cast<int64_t>(config.num_heads);
  model.num_kv_heads = static_cast<int64_t>(config.num_kv_heads);
  model.head_dim = static_cast<int64_t>(config.head_dim);

  unsloth_inference_memory_params params = UNSLOTH_INFERENCE_MEMORY_PARAMS_INIT;
  // What the file has may be of more than one type. One that all rows are whole blocks of stands
  // for them, and their size is known.
  const bool as_in_file = model_->weight_dtype() == 0;
  params.weight_dtype = as_in_file ? UNSLOTH_DTYPE_F32 : model_->weight_dtype();
  for (const unsloth_tensor *weight : {&layer.gate, &layer.down}) {
    const uint64_t block = block_elements(weight->dtype);
    const uint64_t attended = config.num_heads * config.head_dim;
    const bool fits = config.hidden_size % block == 0 && config.intermediate_size % block == 0 &&
                      attended % block == 0;
    // The estimate does not know codes whose scales lie apart.
    if (as_in_file && fits && weight->dtype != UNSLOTH_DTYPE_TERNARY) {
      params.weight_dtype = weight->dtype;
      break;
    }
  }
  params.dtype = dtype_;
  params.model = &model;
  params.kv_cache = &cache_params_;
  params.batch_size = 1;
  params.num_tokens = static_cast<int64_t>(max_rows_);
  params.num_logits = static_cast<int64_t>(ranks.has_output() ? max_logit_rows_ : 0);
  unsloth_inference_memory memory = UNSLOTH_INFERENCE_MEMORY_INIT;
  check(unsloth_inference_memory_estimate(context().get(), &params, &memory));
  if (room_.sequences > 1) {
    // A step of a token of each text may need more workspace than a chunk of the prompt.
    params.batch_size = static_cast<int64_t>(room_.sequences);
    params.num_tokens = params.batch_size;
    unsloth_inference_memory step = UNSLOTH_INFERENCE_MEMORY_INIT;
    check(unsloth_inference_memory_estimate(context().get(), &params, &step));
    if (step.workspace > memory.workspace) {
      memory.total += step.workspace - memory.workspace;
      memory.workspace = step.workspace;
    }
  }
  // Nor does it know that a rank of a pipeline lacks the embedding, or the output projection.
  if (as_in_file || ranks.pipeline.size > 1) {
    memory.total = memory.total - memory.weights + model_->weight_bytes();
    memory.weights = model_->weight_bytes();
  }
  if (tensor_ranks() > 1) {
    // Of few tokens, parts of sums lie beside what they become; nor does it know what sums of many
    // go through.
    const uint64_t bytes = 2 * kFewRows * config.hidden_size * element_size(dtype_);
    memory.activations += bytes;
    memory.total = memory.total - memory.workspace + workspace_.bytes() + bytes;
    memory.workspace = workspace_.bytes();
  }
  if (tensor_ranks() > 1 && ranks.has_output()) {
    // And other ranks' columns of logits are gathered beside this one's, and copied into rows.
    const uint64_t bytes = logits_.bytes() + whole_rows_.bytes() - memory.logits;
    memory.logits += bytes;
    memory.total += bytes;
  }
  if (divided_) {
    // It knows the cache of such a rank, and not what its attention goes through.
    memory.activations += divided_->bytes();
    memory.workspace = workspace_.bytes();
    memory.total =
        memory.weights + memory.kv_cache + memory.activations + memory.workspace + memory.logits;
  }
  return memory;
}

}  // namespace llm
