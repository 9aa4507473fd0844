// Causal attention of 6 queries with 4 heads over 6 keys with 2 heads.
#include <stdio.h>
#include <unsloth.h>

enum { SEQ = 6, HEADS = 4, KV_HEADS = 2, DIM = 8 };

static float q[SEQ * HEADS * DIM], k[SEQ * KV_HEADS * DIM], v[SEQ * KV_HEADS * DIM],
    out[SEQ * HEADS * DIM];

static unsloth_tensor rows(float *data, int64_t heads) {
  return (unsloth_tensor){
      .data = data, .shape = {1, SEQ, heads, DIM}, .dtype = UNSLOTH_DTYPE_F32, .rank = 4};
}

static int attend(unsloth_context *ctx) {
  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  p.q = rows(q, HEADS);
  p.k = rows(k, KV_HEADS);
  p.v = rows(v, KV_HEADS);
  p.out = rows(out, HEADS);
  p.causal = 1;
  if (unsloth_attention_workspace_size(ctx, &p, &p.workspace_size)) return 0;
  if (unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace)) return 0;
  const unsloth_status status = unsloth_attention_forward(ctx, &p, NULL);
  unsloth_memory_free(ctx, p.workspace);
  return status == UNSLOTH_STATUS_SUCCESS;
}

int main(void) {
  for (int i = 0; i < SEQ * KV_HEADS * DIM; i++) v[i] = (float)(i / (KV_HEADS * DIM));

  unsloth_context *ctx = NULL;
  if (unsloth_context_create(NULL, &ctx) || !attend(ctx)) {
    char message[256];
    unsloth_last_error_message(message, sizeof message);
    fprintf(stderr, "%s\n", message);
    return 1;
  }
  // Where all scores are equal, a query averages the values up to its own: 0, 0.5, 1, 1.5, 2, 2.5.
  for (int i = 0; i < SEQ; i++) printf("query %d: %g\n", i, out[i * HEADS * DIM]);
  return unsloth_context_destroy(ctx) != UNSLOTH_STATUS_SUCCESS;
}
