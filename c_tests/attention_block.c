// The attention block: one token at a time through a cache gives what all tokens give at once;
// arguments that are refused.
#include "check.h"

enum { TOKENS = 5, HIDDEN = 12, HEADS = 4, KV_HEADS = 2, DIM = 8 };
enum { ROWS = (HEADS + 2 * KV_HEADS) * DIM };

static void run(const test_device *device) {
  static float x[TOKENS][HIDDEN], qkv[ROWS][HIDDEN], o[HIDDEN][HEADS * DIM];
  static float whole[TOKENS][HIDDEN], steps[TOKENS][HIDDEN];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&qkv[0][0], ROWS * HIDDEN, 2);
  fill_random(&o[0][0], HIDDEN * HEADS * DIM, 3);

  char *there_x = (char *)PUT(device, x), *there_out;
  unsloth_attention_block_params p = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  p.num_heads = HEADS;
  p.num_kv_heads = KV_HEADS;
  p.head_dim = DIM;
  p.rotate = 1;
  p.x = f32_tensor(there_x, TOKENS, HIDDEN, -1, -1);
  p.qkv_weight = f32_tensor(PUT(device, qkv), ROWS, HIDDEN, -1, -1);
  p.out_weight = f32_tensor(PUT(device, o), HIDDEN, HEADS * DIM, -1, -1);
  there_out = (char *)PUT(device, whole);
  p.out = f32_tensor(there_out, TOKENS, HIDDEN, -1, -1);
  p.residual = p.x;
  if (!served(device, unsloth_attention_block_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_FAILS(unsloth_attention_block_forward(ctx, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "attention_block: workspace is NULL");
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_attention_block_forward(ctx, &p, NULL));
  GET(device, whole, there_out);

  // The first token sees itself alone: its value heads, each for its group of query heads,
  // projected.
  for (int i = 0; i < HIDDEN; i++) {
    double sum = x[0][i];
    for (int j = 0; j < HEADS * DIM; j++) {
      int row = (HEADS + KV_HEADS) * DIM + j / DIM / (HEADS / KV_HEADS) * DIM + j % DIM;
      double value = 0;
      for (int c = 0; c < HIDDEN; c++) value += (double)x[0][c] * qkv[row][c];
      sum += value * o[i][j];
    }
    CHECK_NEAR(whole[0][i], sum, 1e-4);
  }

  unsloth_kv_cache_params shape = UNSLOTH_KV_CACHE_PARAMS_INIT;
  shape.dtype = UNSLOTH_DTYPE_F32;
  shape.num_layers = 1;
  shape.num_kv_heads = KV_HEADS;
  shape.head_dim = DIM;
  shape.page_size = 2;
  shape.num_pages = 3;
  CHECK_OK(unsloth_kv_cache_create(ctx, &shape, &p.cache));
  int64_t id = 0;
  const int64_t one = 1;
  CHECK_OK(unsloth_kv_cache_sequence_create(p.cache, &id));
  for (int t = 0; t < TOKENS; t++) {
    CHECK_OK(unsloth_kv_cache_extend(p.cache, &id, &one, 1, NULL));
    p.x = p.residual = f32_tensor(there_x + t * (int)sizeof x[0], 1, HIDDEN, -1, -1);
    p.out = f32_tensor(there_out, 1, HIDDEN, -1, -1);
    CHECK_OK(unsloth_attention_block_forward(ctx, &p, NULL));
    GET(device, steps[t], there_out);
    for (int i = 0; i < HIDDEN; i++) CHECK_NEAR(steps[t][i], whole[t][i], 1e-4);
  }

  p.x = f32_tensor(there_x, 2, HIDDEN, -1, -1);
  p.out = f32_tensor(there_out, 2, HIDDEN, -1, -1);
  p.residual = p.out;
  CHECK_FAILS(unsloth_attention_block_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "attention_block: x has 2 tokens, the cache's batch has 1");
  CHECK_OK(unsloth_kv_cache_destroy(p.cache));
}

int main(void) { return on_every_device(run); }
