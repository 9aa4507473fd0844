// A decoder layer forward and backward: the same gradients whatever it keeps, less memory the less
// it keeps, and the loss goes down along them.
#include "check.h"

enum { TOKENS = 6, HIDDEN = 16, HEADS = 4, KV_HEADS = 2, DIM = 4, INTERMEDIATE = 24 };
enum { QKV = (HEADS + 2 * KV_HEADS) * DIM, MEMORY = 1 << 16 };

static float x[TOKENS * HIDDEN], out[TOKENS * HIDDEN], dx[TOKENS * HIDDEN];
static float norm1[HIDDEN], norm2[HIDDEN], qkv[QKV * HIDDEN], proj[HIDDEN * HEADS * DIM];
static float gate_up[2 * INTERMEDIATE * HIDDEN], down[HIDDEN * INTERMEDIATE];
static float dnorm1[HIDDEN], dnorm2[HIDDEN], dqkv[QKV * HIDDEN], dproj[HIDDEN * HEADS * DIM];
static float dgate_up[2 * INTERMEDIATE * HIDDEN], ddown[HIDDEN * INTERMEDIATE];
// What is trained, and its gradients.
static float *const weights[] = {norm1, norm2, qkv, proj, gate_up, down};
static float *const gradients[] = {dnorm1, dnorm2, dqkv, dproj, dgate_up, ddown};
static const int sizes[] = {HIDDEN,
                            HIDDEN,
                            QKV *HIDDEN,
                            HIDDEN * HEADS * DIM,
                            2 * INTERMEDIATE *HIDDEN,
                            HIDDEN *INTERMEDIATE};
enum { NUM = sizeof sizes / sizeof sizes[0] };

static void fill(float *to, int count, float scale) {
  static uint32_t state = 1;
  for (int i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    to[i] = ((float)(state >> 8) / 8388608.0f - 1.0f) * scale;
  }
}

// Half of the sum of squares, whose gradient is the output.
static double loss_of(const float *of) {
  double sum = 0;
  for (int i = 0; i < TOKENS * HIDDEN; i++) sum += 0.5 * (double)of[i] * (double)of[i];
  return sum;
}

int main(void) {
  unsloth_context *ctx = cpu_context();
  fill(x, TOKENS * HIDDEN, 1.0f);
  for (int i = 0; i < NUM; i++) fill(weights[i], sizes[i], 0.3f);
  void *saved = NULL, *workspace = NULL;
  CHECK_OK(unsloth_memory_alloc(ctx, MEMORY, &saved));
  CHECK_OK(unsloth_memory_alloc(ctx, MEMORY, &workspace));

  unsloth_attention_block_params attention = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  attention.num_heads = HEADS;
  attention.num_kv_heads = KV_HEADS;
  attention.head_dim = DIM;
  attention.rotate = 1;
  attention.qkv_weight = UNSLOTH_TENSOR(qkv, UNSLOTH_DTYPE_F32, QKV, HIDDEN);
  attention.out_weight = UNSLOTH_TENSOR(proj, UNSLOTH_DTYPE_F32, HIDDEN, HEADS * DIM);
  unsloth_mlp_params mlp = UNSLOTH_MLP_PARAMS_INIT;
  mlp.gate_up_weight = UNSLOTH_TENSOR(gate_up, UNSLOTH_DTYPE_F32, 2 * INTERMEDIATE, HIDDEN);
  mlp.down_weight = UNSLOTH_TENSOR(down, UNSLOTH_DTYPE_F32, HIDDEN, INTERMEDIATE);
  unsloth_decoder_layer_params p = UNSLOTH_DECODER_LAYER_PARAMS_INIT;
  p.attention = &attention;
  p.mlp = &mlp;
  p.norm_epsilon = 1e-5f;
  p.x = UNSLOTH_TENSOR(x, UNSLOTH_DTYPE_F32, TOKENS, HIDDEN);
  p.attention_norm = UNSLOTH_TENSOR(norm1, UNSLOTH_DTYPE_F32, HIDDEN);
  p.mlp_norm = UNSLOTH_TENSOR(norm2, UNSLOTH_DTYPE_F32, HIDDEN);
  p.out = UNSLOTH_TENSOR(out, UNSLOTH_DTYPE_F32, TOKENS, HIDDEN);
  p.saved = saved;
  p.saved_size = MEMORY;
  p.workspace = workspace;
  p.workspace_size = MEMORY;

  unsloth_attention_block_backward_params of_attention =
      UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  of_attention.dqkv_weight = UNSLOTH_TENSOR(dqkv, UNSLOTH_DTYPE_F32, QKV, HIDDEN);
  of_attention.dout_weight = UNSLOTH_TENSOR(dproj, UNSLOTH_DTYPE_F32, HIDDEN, HEADS * DIM);
  unsloth_mlp_backward_params of_mlp = UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  of_mlp.dgate_up_weight = UNSLOTH_TENSOR(dgate_up, UNSLOTH_DTYPE_F32, 2 * INTERMEDIATE, HIDDEN);
  of_mlp.ddown_weight = UNSLOTH_TENSOR(ddown, UNSLOTH_DTYPE_F32, HIDDEN, INTERMEDIATE);
  unsloth_decoder_layer_backward_params b = UNSLOTH_DECODER_LAYER_BACKWARD_PARAMS_INIT;
  b.forward = &p;
  b.attention = &of_attention;
  b.mlp = &of_mlp;
  b.dout = p.out;
  b.dx = UNSLOTH_TENSOR(dx, UNSLOTH_DTYPE_F32, TOKENS, HIDDEN);
  b.dattention_norm = UNSLOTH_TENSOR(dnorm1, UNSLOTH_DTYPE_F32, HIDDEN);
  b.dmlp_norm = UNSLOTH_TENSOR(dnorm2, UNSLOTH_DTYPE_F32, HIDDEN);
  b.workspace = workspace;
  b.workspace_size = MEMORY;

  static const unsloth_checkpointing policies[] = {
      UNSLOTH_CHECKPOINTING_NONE, UNSLOTH_CHECKPOINTING_ELEMENTWISE, UNSLOTH_CHECKPOINTING_MLP,
      UNSLOTH_CHECKPOINTING_PROJECTIONS, UNSLOTH_CHECKPOINTING_FULL};
  static float first[2 * INTERMEDIATE * HIDDEN];
  size_t before = SIZE_MAX;
  for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
    p.checkpointing = policies[i];
    CHECK_OK(unsloth_decoder_layer_supported(ctx, &p, NULL));
    CHECK_OK(unsloth_decoder_layer_backward_supported(ctx, &b, NULL));
    size_t size = 0;
    CHECK_OK(unsloth_decoder_layer_saved_size(ctx, &p, &size));
    CHECK(size < before && size <= MEMORY);
    before = size;
    CHECK_OK(unsloth_decoder_layer_workspace_size(ctx, &p, &size));
    CHECK(size <= MEMORY);
    CHECK_OK(unsloth_decoder_layer_backward_workspace_size(ctx, &b, &size));
    CHECK(size <= MEMORY);
    CHECK_OK(unsloth_decoder_layer_forward(ctx, &p, NULL));
    CHECK_OK(unsloth_decoder_layer_backward(ctx, &b, NULL));
    if (i == 0) memcpy(first, dgate_up, sizeof first);
    CHECK(memcmp(first, dgate_up, sizeof first) == 0);
  }
  CHECK(before == 0);  // the caller's input alone is kept

  // A step against the gradients.
  const double loss = loss_of(out);
  for (int i = 0; i < NUM; i++) {
    for (int j = 0; j < sizes[i]; j++) weights[i][j] -= 1e-3f * gradients[i][j];
  }
  CHECK_OK(unsloth_decoder_layer_forward(ctx, &p, NULL));
  CHECK(loss_of(out) < loss);

  p.checkpointing = 6;
  CHECK_FAILS(unsloth_decoder_layer_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "decoder_layer: checkpointing is 6, allowed: 0 (none), 1 (selective), 2 (full), "
              "3 (elementwise), 4 (mlp), 5 (projections)");
  p.checkpointing = UNSLOTH_CHECKPOINTING_NONE;
  p.saved_size = 64;
  CHECK_FAILS(unsloth_decoder_layer_backward(ctx, &b, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "decoder_layer_backward: saved has 64 bytes, 4352 are needed");
  p.saved_size = MEMORY;
  p.mlp = NULL;
  CHECK_FAILS(unsloth_decoder_layer_forward(ctx, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "decoder_layer: mlp is NULL");
  CHECK_OK(unsloth_memory_free(ctx, saved));
  CHECK_OK(unsloth_memory_free(ctx, workspace));
  unsloth_context_destroy(ctx);
  return 0;
}
