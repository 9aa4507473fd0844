// One context used from eight threads gives the same bits as one, in every call, and each thread
// has its own last message.
#include <pthread.h>

#include "check.h"

enum {
  THREADS = 8,
  ROUNDS = 20,
  TOKENS = 37,
  HEADS = 4,
  KV_HEADS = 2,
  DIM = 32,
  HIDDEN = HEADS * DIM
};

typedef struct {
  unsloth_context *ctx;
  float *x, *weight, *matrix, *k, *v;
} inputs;

// What a layer might do: normalise, project, attend.
typedef struct {
  float normed[TOKENS * HIDDEN], projected[TOKENS * HIDDEN], attended[TOKENS * HIDDEN];
} outputs;

typedef struct {
  const inputs *in;
  const outputs *expected;
  int number;
} job;

static void run(const inputs *in, outputs *out) {
  unsloth_rms_norm_params norm = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_linear_params linear = UNSLOTH_LINEAR_PARAMS_INIT;
  unsloth_attention_params attention = UNSLOTH_ATTENTION_PARAMS_INIT;
  size_t size = 0;
  void *workspace = NULL;

  memset(out, 0xff, sizeof *out);
  norm.epsilon = 1e-6f;
  norm.x = f32_tensor(in->x, TOKENS, HIDDEN, -1, -1);
  norm.weight = f32_tensor(in->weight, HIDDEN, -1, -1, -1);
  norm.out = f32_tensor(out->normed, TOKENS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_rms_norm_forward(in->ctx, &norm, NULL));

  linear.x = norm.out;
  linear.weight = f32_tensor(in->matrix, HIDDEN, HIDDEN, -1, -1);
  linear.out = f32_tensor(out->projected, TOKENS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_linear_forward(in->ctx, &linear, NULL));

  attention.causal = 1;
  attention.q = f32_tensor(out->projected, 1, TOKENS, HEADS, DIM);
  attention.k = f32_tensor(in->k, 1, TOKENS, KV_HEADS, DIM);
  attention.v = f32_tensor(in->v, 1, TOKENS, KV_HEADS, DIM);
  attention.out = f32_tensor(out->attended, 1, TOKENS, HEADS, DIM);
  CHECK_OK(unsloth_attention_workspace_size(in->ctx, &attention, &size));
  if (size > 0) CHECK_OK(unsloth_memory_alloc(in->ctx, size, &workspace));
  attention.workspace = workspace;
  attention.workspace_size = size;
  CHECK_OK(unsloth_attention_forward(in->ctx, &attention, NULL));
  CHECK_OK(unsloth_memory_free(in->ctx, workspace));
}

static void *work(void *argument) {
  const job *j = (const job *)argument;
  outputs *out = (outputs *)malloc(sizeof *out);
  CHECK(out != NULL);
  for (int round = 0; round < ROUNDS; round++) {
    char expected[64], said[64];
    int32_t count;
    run(j->in, out);
    CHECK(memcmp(out, j->expected, sizeof *out) == 0);
    CHECK_STATUS(unsloth_device_count((unsloth_backend)(100 + j->number), &count),
                 UNSLOTH_STATUS_INVALID_ARGUMENT);
    snprintf(expected, sizeof expected, "device_count: backend is %d,", 100 + j->number);
    unsloth_last_error_message(said, sizeof said);
    CHECK(strncmp(said, expected, strlen(expected)) == 0);
  }
  free(out);
  return NULL;
}

static float *random_floats(size_t count, uint32_t seed) {
  float *data = (float *)malloc(count * sizeof *data);
  CHECK(data != NULL);
  fill_random(data, count, seed);
  return data;
}

int main(void) {
  inputs in;
  outputs *expected = (outputs *)malloc(sizeof *expected);
  pthread_t threads[THREADS];
  job jobs[THREADS];

  CHECK(expected != NULL);
  in.ctx = cpu_context();
  in.x = random_floats(TOKENS * HIDDEN, 1);
  in.weight = random_floats(HIDDEN, 2);
  in.matrix = random_floats(HIDDEN * HIDDEN, 3);
  in.k = random_floats(TOKENS * KV_HEADS * DIM, 4);
  in.v = random_floats(TOKENS * KV_HEADS * DIM, 5);
  run(&in, expected);
  for (size_t i = 0; i < COUNT(expected->attended); i++) CHECK(isfinite(expected->attended[i]));

  for (int i = 0; i < THREADS; i++) {
    jobs[i].in = &in;
    jobs[i].expected = expected;
    jobs[i].number = i;
    CHECK(pthread_create(&threads[i], NULL, work, &jobs[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);

  CHECK_OK(unsloth_context_destroy(in.ctx));
  free(in.x);
  free(in.weight);
  free(in.matrix);
  free(in.k);
  free(in.v);
  free(expected);
  return 0;
}
