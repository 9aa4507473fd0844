// Cross-entropy of a linear layer's output in chunks, with its gradients; arguments that are
// refused.
#include "check.h"

enum { TOKENS = 5, HIDDEN = 3, VOCAB = 6, IGNORED = 2, VALID = 4 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float x[TOKENS][HIDDEN], weight[VOCAB][HIDDEN], loss[1];
  float dx[TOKENS][HIDDEN], dweight[VOCAB][HIDDEN];
  static float scratch[1 << 20];
  int32_t targets[TOKENS] = {3, 0, -100, 4, 5};
  double mean = 0, expected_dx[TOKENS][HIDDEN] = {{0}}, expected_dweight[VOCAB][HIDDEN] = {{0}};

  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&weight[0][0], VOCAB * HIDDEN, 2);
  void *there_loss = PUT(device, loss), *there_dx = PUT(device, dx);
  void *there_dweight = PUT(device, dweight);
  unsloth_linear_cross_entropy_params p = UNSLOTH_LINEAR_CROSS_ENTROPY_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.weight = f32_tensor(PUT(device, weight), VOCAB, HIDDEN, -1, -1);
  p.targets = tensor(PUT(device, targets), UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  p.loss = f32_tensor(there_loss, 1, -1, -1, -1);
  p.dx = f32_tensor(there_dx, TOKENS, HIDDEN, -1, -1);
  p.dweight = f32_tensor(there_dweight, VOCAB, HIDDEN, -1, -1);
  p.chunk_tokens = 2;
  CHECK_OK(unsloth_linear_cross_entropy_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(p.workspace_size <= sizeof scratch);
  p.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_linear_cross_entropy_forward(ctx, &p, NULL));
  GET(device, loss, there_loss);
  GET(device, dx, there_dx);
  GET(device, dweight, there_dweight);
  for (int token = 0; token < TOKENS; token++) {
    double logits[VOCAB] = {0}, sum = 0;
    if (token == IGNORED) continue;
    for (int i = 0; i < VOCAB; i++) {
      for (int k = 0; k < HIDDEN; k++) logits[i] += (double)x[token][k] * weight[i][k];
      sum += exp(logits[i]);
    }
    mean += (log(sum) - logits[targets[token]]) / VALID;
    for (int i = 0; i < VOCAB; i++) {
      const double gradient = (exp(logits[i]) / sum - (i == targets[token])) / VALID;
      for (int k = 0; k < HIDDEN; k++) {
        expected_dx[token][k] += gradient * weight[i][k];
        expected_dweight[i][k] += gradient * x[token][k];
      }
    }
  }
  CHECK_NEAR(loss[0], mean, 1e-5);
  for (int k = 0; k < HIDDEN; k++) {
    for (int token = 0; token < TOKENS; token++)
      CHECK_NEAR(dx[token][k], expected_dx[token][k], 1e-6);
    for (int i = 0; i < VOCAB; i++) CHECK_NEAR(dweight[i][k], expected_dweight[i][k], 1e-6);
  }

  p.chunk_tokens = -2;
  CHECK_FAILS(unsloth_linear_cross_entropy_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear_cross_entropy: chunk_tokens is -2, at least 0 is needed");
}

int main(void) { return on_every_device(run); }
