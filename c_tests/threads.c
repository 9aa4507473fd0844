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
  const test_device *device;
  void *x, *weight, *matrix, *k, *v;
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

// Returns whether the device has all the operations.
static int layer(const inputs *in, outputs *out) {
  unsloth_context *ctx = in->device->ctx;
  unsloth_rms_norm_params norm = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_linear_params linear = UNSLOTH_LINEAR_PARAMS_INIT;
  unsloth_attention_params attention = UNSLOTH_ATTENTION_PARAMS_INIT;
  size_t size = 0;
  void *workspace = NULL;

  outputs *there = NULL;
  CHECK_OK(unsloth_memory_alloc(ctx, sizeof *there, (void **)&there));
  CHECK_OK(unsloth_memory_set(ctx, there, 0xff, sizeof *there, NULL));
  norm.epsilon = 1e-6f;
  norm.x = f32_tensor(in->x, TOKENS, HIDDEN, -1, -1);
  norm.weight = f32_tensor(in->weight, HIDDEN, -1, -1, -1);
  norm.out = f32_tensor(there->normed, TOKENS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_rms_norm_forward(ctx, &norm, NULL));

  linear.x = norm.out;
  linear.weight = f32_tensor(in->matrix, HIDDEN, HIDDEN, -1, -1);
  linear.out = f32_tensor(there->projected, TOKENS, HIDDEN, -1, -1);
  if (!served(in->device, unsloth_linear_supported(ctx, &linear, NULL))) return 0;
  CHECK_OK(unsloth_linear_forward(ctx, &linear, NULL));

  attention.causal = 1;
  attention.q = f32_tensor(there->projected, 1, TOKENS, HEADS, DIM);
  attention.k = f32_tensor(in->k, 1, TOKENS, KV_HEADS, DIM);
  attention.v = f32_tensor(in->v, 1, TOKENS, KV_HEADS, DIM);
  attention.out = f32_tensor(there->attended, 1, TOKENS, HEADS, DIM);
  if (!served(in->device, unsloth_attention_supported(ctx, &attention, NULL))) return 0;
  CHECK_OK(unsloth_attention_workspace_size(ctx, &attention, &size));
  if (size > 0) CHECK_OK(unsloth_memory_alloc(ctx, size, &workspace));
  attention.workspace = workspace;
  attention.workspace_size = size;
  CHECK_OK(unsloth_attention_forward(ctx, &attention, NULL));
  get(in->device, out, there, sizeof *out);
  CHECK_OK(unsloth_memory_free(ctx, workspace));
  CHECK_OK(unsloth_memory_free(ctx, there));
  return 1;
}

static void *work(void *argument) {
  const job *j = (const job *)argument;
  outputs *out = (outputs *)malloc(sizeof *out);
  CHECK(out != NULL);
  for (int round = 0; round < ROUNDS; round++) {
    char expected[64], said[64];
    int32_t count;
    CHECK(layer(j->in, out));
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

// The device's memory with random numbers.
static void *random_floats(const test_device *device, size_t count, uint32_t seed) {
  float *data = (float *)malloc(count * sizeof *data);
  void *there;
  CHECK(data != NULL);
  fill_random(data, count, seed);
  there = put(device, data, count * sizeof *data);
  free(data);
  return there;
}

static void run(const test_device *device) {
  inputs in;
  outputs *expected = (outputs *)malloc(sizeof *expected);
  pthread_t threads[THREADS];
  job jobs[THREADS];
  int all;

  CHECK(expected != NULL);
  in.device = device;
  in.x = random_floats(device, TOKENS * HIDDEN, 1);
  in.weight = random_floats(device, HIDDEN, 2);
  in.matrix = random_floats(device, HIDDEN * HIDDEN, 3);
  in.k = random_floats(device, TOKENS * KV_HEADS * DIM, 4);
  in.v = random_floats(device, TOKENS * KV_HEADS * DIM, 5);
  all = layer(&in, expected);
  for (size_t i = 0; all && i < COUNT(expected->attended); i++) {
    CHECK(isfinite(expected->attended[i]));
  }
  for (int i = 0; all && i < THREADS; i++) {
    jobs[i].in = &in;
    jobs[i].expected = expected;
    jobs[i].number = i;
    CHECK(pthread_create(&threads[i], NULL, work, &jobs[i]) == 0);
  }
  for (int i = 0; all && i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  free(expected);
}

int main(void) { return on_every_device(run); }
