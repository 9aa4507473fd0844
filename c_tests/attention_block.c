// The attention block: one token at a time through a cache gives what all tokens give at once; its
// gradients are its differences; arguments that are refused.
#include "check.h"

enum { TOKENS = 5, HIDDEN = 12, HEADS = 4, KV_HEADS = 2, DIM = 8 };
enum { ROWS = (HEADS + 2 * KV_HEADS) * DIM };

static unsloth_context *cpu;

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

// What the outputs, each times its gradient, add up to, by the library on the CPU in f32.
static double loss(unsloth_attention_block_params *p, const float *dout) {
  const float *const out = (const float *)p->out.data;
  double sum = 0;
  CHECK_OK(unsloth_attention_block_forward(cpu, p, NULL));
  for (int i = 0; i < TOKENS * HIDDEN; i++) sum += (double)dout[i] * out[i];
  return sum;
}

// Gradients with what the forward kept, then without it: to the bit the same, and the differences
// of the forward.
static void run_backward(const test_device *device) {
  static float x[TOKENS][HIDDEN], qkv[ROWS][HIDDEN], o[HIDDEN][HEADS * DIM];
  static float kept[TOKENS][ROWS], attended[TOKENS][HEADS * DIM], lse[HEADS][TOKENS];
  static float out[TOKENS][HIDDEN], dout[TOKENS][HIDDEN];
  static float dx[2][TOKENS][HIDDEN], dqkv[2][ROWS][HIDDEN], d_o[2][HIDDEN][HEADS * DIM];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&qkv[0][0], ROWS * HIDDEN, 2);
  fill_random(&o[0][0], HIDDEN * HEADS * DIM, 3);
  fill_random(&dout[0][0], TOKENS * HIDDEN, 4);
  unsloth_attention_block_params p = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  p.num_heads = HEADS;
  p.num_kv_heads = KV_HEADS;
  p.head_dim = DIM;
  p.rotate = 1;
  unsloth_attention_block_params on_cpu = p;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.qkv_weight = f32_tensor(PUT(device, qkv), ROWS, HIDDEN, -1, -1);
  p.out_weight = f32_tensor(PUT(device, o), HIDDEN, HEADS * DIM, -1, -1);
  unsloth_attention_block_backward_params b = UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  void *there[3] = {PUT(device, dx[0]), PUT(device, dqkv[0]), PUT(device, d_o[0])};
  b.forward = &p;
  b.dout = f32_tensor(PUT(device, dout), TOKENS, HIDDEN, -1, -1);
  b.dx = f32_tensor(there[0], TOKENS, HIDDEN, -1, -1);
  b.dqkv_weight = f32_tensor(there[1], ROWS, HIDDEN, -1, -1);
  b.dout_weight = f32_tensor(there[2], HIDDEN, HEADS * DIM, -1, -1);
  if (!served(device, unsloth_attention_block_backward_supported(ctx, &b, NULL))) return;

  p.out = f32_tensor(PUT(device, out), TOKENS, HIDDEN, -1, -1);
  p.qkv_out = b.qkv = f32_tensor(PUT(device, kept), TOKENS, ROWS, -1, -1);
  p.attended_out = b.attended = f32_tensor(PUT(device, attended), TOKENS, HEADS * DIM, -1, -1);
  p.lse_out = b.lse = f32_tensor(PUT(device, lse), HEADS, TOKENS, -1, -1);
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_attention_block_forward(ctx, &p, NULL));
  for (int again = 0; again < 2; again++) {
    CHECK_OK(unsloth_attention_block_backward_workspace_size(ctx, &b, &b.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
    CHECK_OK(unsloth_attention_block_backward(ctx, &b, NULL));
    GET(device, dx[again], there[0]);
    GET(device, dqkv[again], there[1]);
    GET(device, d_o[again], there[2]);
    CHECK_OK(unsloth_memory_free(ctx, b.workspace));
    memset(&b.qkv, 0, sizeof b.qkv);
    memset(&b.attended, 0, sizeof b.attended);
    memset(&b.lse, 0, sizeof b.lse);
  }
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
  CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) == 0);
  CHECK(memcmp(dqkv[0], dqkv[1], sizeof dqkv[0]) == 0);
  CHECK(memcmp(d_o[0], d_o[1], sizeof d_o[0]) == 0);

  cpu = cpu_context();
  on_cpu.workspace_size = 1 << 16;
  CHECK_OK(unsloth_memory_alloc(cpu, on_cpu.workspace_size, &on_cpu.workspace));
  on_cpu.x = f32_tensor(x, TOKENS, HIDDEN, -1, -1);
  on_cpu.qkv_weight = f32_tensor(qkv, ROWS, HIDDEN, -1, -1);
  on_cpu.out_weight = f32_tensor(o, HIDDEN, HEADS * DIM, -1, -1);
  on_cpu.out = f32_tensor(out, TOKENS, HIDDEN, -1, -1);
  const struct {
    float *of;
    const float *gradient;
    int n;
  } all[] = {{&x[0][0], &dx[0][0][0], TOKENS * HIDDEN},
             {&qkv[0][0], &dqkv[0][0][0], ROWS * HIDDEN},
             {&o[0][0], &d_o[0][0][0], HIDDEN * HEADS * DIM}};
  for (size_t i = 0; i < COUNT(all); i++) {
    for (int j = 0; j < all[i].n; j += 7) {
      float *const at = &all[i].of[j];
      const float before = *at, step = 0x1p-6f;
      *at = before + step;
      double difference = loss(&on_cpu, &dout[0][0]), width = *at;
      *at = before - step;
      difference -= loss(&on_cpu, &dout[0][0]);
      width -= *at;
      *at = before;
      CHECK_NEAR(all[i].gradient[j], difference / width, 5e-3);
    }
  }
  CHECK_OK(unsloth_memory_free(cpu, on_cpu.workspace));
  CHECK_OK(unsloth_context_destroy(cpu));

  b.dsinks = f32_tensor(there[0], HEADS, -1, -1, -1);
  CHECK_FAILS(unsloth_attention_block_backward(ctx, &b, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "attention_block_backward: dsinks is there, without sinks it has no use");
}

static void both(const test_device *device) {
  run(device);
  run_backward(device);
}

int main(void) { return on_every_device(both); }
