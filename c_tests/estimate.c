// Memory estimates: a published model's parameters, sums that add up, arguments that are refused.
#include "check.h"

int main(void) {
  unsloth_context *ctx = cpu_context();
  // SmolLM2-135M.
  unsloth_model_params model = UNSLOTH_MODEL_PARAMS_INIT;
  model.vocab_size = 49152;
  model.hidden_size = 576;
  model.intermediate_size = 1536;
  model.num_layers = 30;
  model.num_heads = 9;
  model.num_kv_heads = 3;
  model.tied_embeddings = 1;
  unsloth_parameter_count count = UNSLOTH_PARAMETER_COUNT_INIT;
  CHECK_OK(unsloth_model_parameters_count(&model, &count));
  CHECK(count.total == 134515008);

  unsloth_kv_cache_params cache = UNSLOTH_KV_CACHE_PARAMS_INIT;
  cache.dtype = UNSLOTH_DTYPE_F16;
  cache.num_layers = 30;
  cache.num_kv_heads = 3;
  cache.head_dim = 64;
  cache.num_pages = 128;
  unsloth_inference_memory_params i = UNSLOTH_INFERENCE_MEMORY_PARAMS_INIT;
  i.model = &model;
  i.kv_cache = &cache;
  i.weight_dtype = UNSLOTH_DTYPE_F16;
  i.dtype = UNSLOTH_DTYPE_F32;
  i.batch_size = 1;
  i.num_tokens = 512;
  i.num_logits = 1;
  unsloth_inference_memory memory = UNSLOTH_INFERENCE_MEMORY_INIT;
  CHECK_OK(unsloth_inference_memory_estimate(ctx, &i, &memory));
  CHECK(memory.weights == 2 * count.total);
  CHECK(memory.total ==
        memory.weights + memory.kv_cache + memory.activations + memory.workspace + memory.logits);

  char text[32];
  CHECK(unsloth_format_bytes(memory.weights, text, sizeof text) == 7);
  CHECK(strcmp(text, "257 MiB") == 0);

  unsloth_training_memory_params t = UNSLOTH_TRAINING_MEMORY_PARAMS_INIT;
  t.model = &model;
  t.dtype = UNSLOTH_DTYPE_BF16;
  t.master_weights = 1;
  t.batch_size = 4;
  t.sequence_length = 2048;
  unsloth_training_memory all = UNSLOTH_TRAINING_MEMORY_INIT, full = UNSLOTH_TRAINING_MEMORY_INIT;
  CHECK_OK(unsloth_training_memory_estimate(&t, &all));
  CHECK(all.weights + all.master_weights + all.gradients + all.optimizer_state == 16 * count.total);
  t.checkpointing = UNSLOTH_CHECKPOINTING_FULL;
  CHECK_OK(unsloth_training_memory_estimate(&t, &full));
  CHECK(full.saved_activations < all.saved_activations / 10 && full.total < all.total);

  // The same step, made of this library's operations.
  unsloth_training_memory own = UNSLOTH_TRAINING_MEMORY_INIT;
  t.ctx = ctx;
  t.gradient_dtype = UNSLOTH_DTYPE_F32;
  t.packed_sequences = 4;
  CHECK_OK(unsloth_training_memory_estimate(&t, &own));
  CHECK(own.weights == full.weights && own.gradients == 4 * count.total);
  CHECK(own.saved_activations == 32ull * 4 * 2048 * 576 * 2);
  CHECK(own.inputs == 3 * 4 * 2048 * 4 + 5 * 4 + 8);
  CHECK(own.workspace > 0 && own.logits == 0 && own.recomputed_activations == 0);
  CHECK(own.total == own.weights + own.master_weights + own.gradients + own.optimizer_state +
                         own.saved_activations + own.inputs + own.activation_gradients +
                         own.workspace);
  t.ctx = NULL;
  CHECK_FAILS(unsloth_training_memory_estimate(&t, &full), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "estimate: packed_sequences is 4, which asks for the estimate of a context's own "
              "step");
  t.packed_sequences = 0;

  t.checkpointing = 6;
  CHECK_FAILS(unsloth_training_memory_estimate(&t, &full), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "estimate: checkpointing is 6, allowed: 0 (none), 1 (selective), 2 (full), "
              "3 (elementwise), 4 (mlp), 5 (projections)");
  i.kv_cache = NULL;
  CHECK_FAILS(unsloth_inference_memory_estimate(ctx, &i, &memory), UNSLOTH_STATUS_NULL_POINTER,
              "estimate: kv_cache is NULL");
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
