// Attention.
#include "check.h"

enum { QUERIES = 3, KEYS = 5, HEADS = 2, DIM = 8 };

// Row `query` of head `head` by the definition, causal with the last query at the last key.
static double expected(const float *q, const float *k, const float *v, int query, int head, int x,
                       double *lse) {
  double weights[KEYS], sum = 0, out = 0;
  const int visible = query + KEYS - QUERIES + 1;
  for (int j = 0; j < visible; j++) {
    double dot = 0;
    for (int i = 0; i < DIM; i++) {
      dot += (double)q[(query * HEADS + head) * DIM + i] * k[j * DIM + i];
    }
    weights[j] = exp(dot / sqrt((double)DIM));
    sum += weights[j];
  }
  for (int j = 0; j < visible; j++) out += weights[j] / sum * v[j * DIM + x];
  *lse = log(sum);
  return out;
}

// The loss whose gradients are asked for: outputs times `dout`, summed.
static double loss(const float *q, const float *k, const float *v, const float *dout) {
  double sum = 0, lse;
  for (int i = 0; i < QUERIES * HEADS * DIM; i++) {
    sum += dout[i] * expected(q, k, v, i / DIM / HEADS, i / DIM % HEADS, i % DIM, &lse);
  }
  return sum;
}

// Gradients against differences of the loss.
static void backward(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_attention_backward_params p = UNSLOTH_ATTENTION_BACKWARD_PARAMS_INIT;
  float q[QUERIES * HEADS * DIM], k[KEYS * DIM], v[KEYS * DIM], dout[QUERIES * HEADS * DIM];
  float out[QUERIES * HEADS * DIM], lse[HEADS * QUERIES];
  float dq[QUERIES * HEADS * DIM], dk[KEYS * DIM], dv[KEYS * DIM];
  float *const inputs[3] = {q, k, v}, *const gradients[3] = {dq, dk, dv};
  const size_t sizes[3] = {COUNT(q), COUNT(k), COUNT(v)};

  fill_random(q, COUNT(q), 1);
  fill_random(k, COUNT(k), 2);
  fill_random(v, COUNT(v), 3);
  fill_random(dout, COUNT(dout), 4);
  for (int i = 0; i < QUERIES * HEADS * DIM; i++) {
    double log_sum;
    const int query = i / DIM / HEADS, head = i / DIM % HEADS;
    out[i] = (float)expected(q, k, v, query, head, i % DIM, &log_sum);
    lse[head * QUERIES + query] = (float)log_sum;
  }
  memset(dq, 0, sizeof dq);
  memset(dk, 0, sizeof dk);
  memset(dv, 0, sizeof dv);
  p.q = f32_tensor(PUT(device, q), 1, QUERIES, HEADS, DIM);
  p.k = f32_tensor(PUT(device, k), 1, KEYS, 1, DIM);
  p.v = f32_tensor(PUT(device, v), 1, KEYS, 1, DIM);
  p.out = f32_tensor(PUT(device, out), 1, QUERIES, HEADS, DIM);
  p.lse = f32_tensor(PUT(device, lse), 1, HEADS, QUERIES, -1);
  p.dout = f32_tensor(PUT(device, dout), 1, QUERIES, HEADS, DIM);
  p.causal = 1;
  CHECK_FAILS(unsloth_attention_backward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "attention_backward: dq is absent, as are dk, dv, dbias and dsinks: nothing is asked "
              "for");
  p.dq = f32_tensor(PUT(device, dq), 1, QUERIES, HEADS, DIM);
  p.dk = f32_tensor(PUT(device, dk), 1, KEYS, 1, DIM);
  p.dv = f32_tensor(PUT(device, dv), 1, KEYS, 1, DIM);
  if (!served(device, unsloth_attention_backward_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_attention_backward(ctx, &p, NULL));
  GET(device, dq, p.dq.data);
  GET(device, dk, p.dk.data);
  GET(device, dv, p.dv.data);
  for (int input = 0; input < 3; input++) {
    for (size_t i = 0; i < sizes[input]; i++) {
      const float x = inputs[input][i], step = 0x1p-6f;
      inputs[input][i] = x + step;
      const double above = loss(q, k, v, dout), above_x = inputs[input][i];
      inputs[input][i] = x - step;
      const double slope = (above - loss(q, k, v, dout)) / (above_x - inputs[input][i]);
      inputs[input][i] = x;
      CHECK_NEAR(gradients[input][i], slope, 1e-3);
    }
  }
}

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  unsloth_implementation implementation = 0;
  size_t workspace_size = 77;
  float q[QUERIES * HEADS * DIM], k[KEYS * DIM], v[KEYS * DIM];
  float out[QUERIES * HEADS * DIM], lse[HEADS * QUERIES];
  int32_t seq_lens[1] = {KEYS + 1};
  void *there, *there_lse;

  fill_random(q, COUNT(q), 1);
  fill_random(k, COUNT(k), 2);
  fill_random(v, COUNT(v), 3);
  memset(out, 0, sizeof out);
  memset(lse, 0, sizeof lse);
  there = PUT(device, out);
  there_lse = PUT(device, lse);
  p.q = f32_tensor(PUT(device, q), 1, QUERIES, HEADS, DIM);
  p.k = f32_tensor(PUT(device, k), 1, KEYS, 1, DIM);
  p.v = f32_tensor(PUT(device, v), 1, KEYS, 1, DIM);
  p.out = f32_tensor(there, 1, QUERIES, HEADS, DIM);
  p.lse = f32_tensor(there_lse, 1, HEADS, QUERIES, -1);
  p.causal = 1;

  p.seq_lens_k = tensor(PUT(device, seq_lens), UNSLOTH_DTYPE_I32, 1, -1, -1, -1);
  // A GPU's memory is not read by the host, so what it holds is not checked.
  if (device->is_cpu) {
    CHECK_FAILS(unsloth_attention_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
                "attention: seq_lens_k has 6 at index 0, allowed: 0 to 5");
    GET(device, out, there);
    CHECK(out[0] == 0);
  }
  seq_lens[0] = KEYS;
  p.seq_lens_k.data = PUT(device, seq_lens);
  p.window_left = -1;
  CHECK_FAILS(unsloth_attention_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "attention: window_left is -1, at least 0 is needed");
  p.window_left = 0;

  if (!served(device, unsloth_attention_supported(ctx, &p, &implementation))) return;
  CHECK((implementation == UNSLOTH_IMPLEMENTATION_CPU) == device->is_cpu);
  CHECK_OK(unsloth_attention_workspace_size(ctx, &p, &workspace_size));
  CHECK(workspace_size == 0 || !device->is_cpu);
  if (workspace_size > 0) CHECK_OK(unsloth_memory_alloc(ctx, workspace_size, &p.workspace));
  p.workspace_size = workspace_size;
  CHECK_OK(unsloth_attention_forward(ctx, &p, NULL));
  GET(device, out, there);
  GET(device, lse, there_lse);
  for (int query = 0; query < QUERIES; query++) {
    for (int head = 0; head < HEADS; head++) {
      for (int x = 0; x < DIM; x++) {
        double log_sum;
        const double value = expected(q, k, v, query, head, x, &log_sum);
        CHECK_NEAR(out[(query * HEADS + head) * DIM + x], value, 1e-5);
        CHECK_NEAR(lse[head * QUERIES + query], log_sum, 1e-5);
      }
    }
  }
  backward(device);
}

int main(void) { return on_every_device(run); }
