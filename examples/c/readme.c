// cc readme.c $(pkg-config --cflags --libs unsloth)
//   -Wl,-rpath,$(pkg-config --variable=libdir unsloth)   # all on one line
#include <stdio.h>
#include <unsloth.h>

enum { SEQ = 4, HEADS = 2, KV_HEADS = 1, DIM = 8 };
static float q[SEQ][HEADS][DIM], k[SEQ][KV_HEADS][DIM], v[SEQ][KV_HEADS][DIM], out[SEQ][HEADS][DIM];

int main(void) {
  for (int i = 0; i < SEQ * DIM; i++) v[i / DIM][0][i % DIM] = (float)(i / DIM);

  unsloth_context *ctx = NULL;  // NULL parameters: the CPU with every thread; a GPU is named there
  unsloth_status status = unsloth_context_create(NULL, &ctx);

  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  p.q = UNSLOTH_TENSOR(q, UNSLOTH_DTYPE_F32, 1, SEQ, HEADS, DIM);
  p.k = UNSLOTH_TENSOR(k, UNSLOTH_DTYPE_F32, 1, SEQ, KV_HEADS, DIM);
  p.v = UNSLOTH_TENSOR(v, UNSLOTH_DTYPE_F32, 1, SEQ, KV_HEADS, DIM);
  p.out = UNSLOTH_TENSOR(out, UNSLOTH_DTYPE_F32, 1, SEQ, HEADS, DIM);
  p.causal = 1;
  if (status == UNSLOTH_STATUS_SUCCESS) status = unsloth_attention_forward(ctx, &p, NULL);

  char message[256] = "";
  if (status != UNSLOTH_STATUS_SUCCESS) unsloth_last_error_message(message, sizeof message);
  // A query averages the values up to its own: 0, 0.5, 1, 1.5.
  for (int i = 0; i < SEQ; i++) printf("%g\n", out[i][1][0]);
  fputs(message, stderr);
  unsloth_context_destroy(ctx);
  return status;
}
