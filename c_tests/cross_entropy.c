// Cross-entropy with its gradient, in place; arguments that are refused.
#include "check.h"

enum { TOKENS = 4, VOCAB = 5, IGNORED = 2 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float logits[TOKENS][VOCAB], gradients[TOKENS][VOCAB], loss[1], scratch[1024];
  int32_t targets[TOKENS] = {3, 0, -100, 4};
  void *there, *there_loss;

  fill_random(&logits[0][0], TOKENS * VOCAB, 1);
  there = PUT(device, logits);
  there_loss = PUT(device, loss);
  unsloth_cross_entropy_params p = UNSLOTH_CROSS_ENTROPY_PARAMS_INIT;
  p.logits = p.dlogits = f32_tensor(there, TOKENS, VOCAB, -1, -1);
  p.targets = tensor(PUT(device, targets), UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  p.loss = f32_tensor(there_loss, 1, -1, -1, -1);
  CHECK_OK(unsloth_cross_entropy_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_cross_entropy_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(p.workspace_size <= sizeof scratch);
  p.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_cross_entropy_forward(ctx, &p, NULL));
  GET(device, gradients, there);
  GET(device, loss, there_loss);
  double mean = 0;
  for (int token = 0; token < TOKENS; token++) {
    double sum = 0;
    for (int i = 0; i < VOCAB; i++) sum += exp(logits[token][i]);
    for (int i = 0; i < VOCAB; i++) {
      const double probability = exp(logits[token][i]) / sum;
      const double gradient = (probability - (i == targets[token])) / (TOKENS - 1);
      CHECK_NEAR(gradients[token][i], token == IGNORED ? 0 : gradient, 1e-6);
    }
    if (token != IGNORED) mean += (log(sum) - logits[token][targets[token]]) / (TOKENS - 1);
  }
  CHECK_NEAR(loss[0], mean, 1e-5);

  p.label_smoothing = 2;
  CHECK_FAILS(unsloth_cross_entropy_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "cross_entropy: label_smoothing is 2, allowed: 0 to 1");
}

int main(void) { return on_every_device(run); }
