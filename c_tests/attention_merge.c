// Parts of attention over disjoint sets of keys, as one: a shared prefix, and what refuses.
#include "check.h"

enum { QUERIES = 2, KEYS = 5, PREFIX = 3, HEADS = 2, DIM = 8 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_implementation implementation = 0;
  unsloth_attention_params all = UNSLOTH_ATTENTION_PARAMS_INIT, part;
  unsloth_attention_merge_params p = UNSLOTH_ATTENTION_MERGE_PARAMS_INIT;
  float q[QUERIES * HEADS * DIM], k[KEYS * HEADS * DIM], v[KEYS * HEADS * DIM];
  float expected[QUERIES * HEADS * DIM] = {0}, expected_lse[HEADS * QUERIES] = {0};
  float outs[2 * QUERIES * HEADS * DIM] = {0}, lses[2 * HEADS * QUERIES] = {0};
  float out[QUERIES * HEADS * DIM] = {0}, lse[HEADS * QUERIES] = {0};
  float *there[9];
  fill_random(q, COUNT(q), 1);
  fill_random(k, COUNT(k), 2);
  fill_random(v, COUNT(v), 3);
  there[0] = (float *)PUT(device, q);
  there[1] = (float *)PUT(device, k);
  there[2] = (float *)PUT(device, v);
  there[3] = (float *)PUT(device, expected);
  there[4] = (float *)PUT(device, expected_lse);
  there[5] = (float *)PUT(device, outs);
  there[6] = (float *)PUT(device, lses);
  there[7] = (float *)PUT(device, out);
  there[8] = (float *)PUT(device, lse);

  all.q = f32_tensor(there[0], 1, QUERIES, HEADS, DIM);
  all.k = f32_tensor(there[1], 1, KEYS, HEADS, DIM);
  all.v = f32_tensor(there[2], 1, KEYS, HEADS, DIM);
  all.out = f32_tensor(there[3], 1, QUERIES, HEADS, DIM);
  all.lse = f32_tensor(there[4], 1, HEADS, QUERIES, -1);
  all.causal = 1;
  CHECK_OK(unsloth_attention_forward(ctx, &all, NULL));
  // The prefix, which all queries see, and the keys that they see each for itself.
  part = all;
  part.causal = 0;
  part.k.shape[1] = part.v.shape[1] = PREFIX;
  part.out.data = there[5];
  part.lse.data = there[6];
  CHECK_OK(unsloth_attention_forward(ctx, &part, NULL));
  part = all;
  part.k = f32_tensor(there[1] + PREFIX * HEADS * DIM, 1, KEYS - PREFIX, HEADS, DIM);
  part.v = f32_tensor(there[2] + PREFIX * HEADS * DIM, 1, KEYS - PREFIX, HEADS, DIM);
  part.out.data = there[5] + QUERIES * HEADS * DIM;
  part.lse.data = there[6] + HEADS * QUERIES;
  CHECK_OK(unsloth_attention_forward(ctx, &part, NULL));

  p.outs = f32_tensor(there[5], 2, QUERIES, HEADS, DIM);
  p.lses = f32_tensor(there[6], 2, HEADS, QUERIES, -1);
  p.out = f32_tensor(there[7], QUERIES, HEADS, DIM, -1);
  p.lse = f32_tensor(there[8], HEADS, QUERIES, -1, -1);
  CHECK_OK(unsloth_attention_merge_supported(ctx, &p, &implementation));
  CHECK((implementation == UNSLOTH_IMPLEMENTATION_CPU) == device->is_cpu);
  CHECK_OK(unsloth_attention_merge_forward(ctx, &p, NULL));
  GET(device, expected, there[3]);
  GET(device, expected_lse, there[4]);
  GET(device, out, there[7]);
  GET(device, lse, there[8]);
  for (int i = 0; i < QUERIES * HEADS * DIM; i++) {
    CHECK(fabs((double)out[i] - expected[i]) <= 1e-5);
  }
  for (int i = 0; i < HEADS * QUERIES; i++) {
    CHECK(fabs((double)lse[i] - expected_lse[i]) <= 1e-5);
  }

  p.lses.shape[0] = 1;
  CHECK_FAILS(unsloth_attention_merge_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "attention_merge: lses has shape [1, 2, 2], expected [2, 2, 2]");
}

int main(void) { return on_every_device(run); }
