// Log-probabilities of ids in chunks, entropies, and gradients; arguments that are refused.
#include "check.h"

enum { TOKENS = 5, HIDDEN = 3, VOCAB = 6, IGNORED = 2 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float x[TOKENS][HIDDEN], weight[VOCAB][HIDDEN], logprobs[TOKENS], entropy[TOKENS];
  float dlogprobs[TOKENS], dentropy[TOKENS], dx[TOKENS][HIDDEN];
  static float scratch[1 << 20];
  int32_t ids[TOKENS] = {3, 0, -100, 4, 5};

  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&weight[0][0], VOCAB * HIDDEN, 2);
  fill_random(dlogprobs, TOKENS, 3);
  fill_random(dentropy, TOKENS, 4);
  void *there_logprobs = PUT(device, logprobs), *there_entropy = PUT(device, entropy);
  void *there_dx = PUT(device, dx);
  unsloth_linear_logprob_params p = UNSLOTH_LINEAR_LOGPROB_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.weight = f32_tensor(PUT(device, weight), VOCAB, HIDDEN, -1, -1);
  p.ids = tensor(PUT(device, ids), UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  p.logprobs = f32_tensor(there_logprobs, TOKENS, -1, -1, -1);
  p.entropy = f32_tensor(there_entropy, TOKENS, -1, -1, -1);
  p.temperature = 0.5f;
  p.chunk_tokens = 2;
  CHECK_OK(unsloth_linear_logprob_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_linear_logprob_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(p.workspace_size <= sizeof scratch);
  p.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_linear_logprob_forward(ctx, &p, NULL));
  GET(device, logprobs, there_logprobs);
  GET(device, entropy, there_entropy);

  unsloth_linear_logprob_backward_params b = UNSLOTH_LINEAR_LOGPROB_BACKWARD_PARAMS_INIT;
  b.x = p.x;
  b.weight = p.weight;
  b.ids = p.ids;
  b.dlogprobs = f32_tensor(PUT(device, dlogprobs), TOKENS, -1, -1, -1);
  b.dentropy = f32_tensor(PUT(device, dentropy), TOKENS, -1, -1, -1);
  b.dx = f32_tensor(there_dx, TOKENS, HIDDEN, -1, -1);
  b.temperature = p.temperature;
  b.chunk_tokens = 3;
  CHECK_OK(unsloth_linear_logprob_backward_supported(ctx, &b, NULL));
  CHECK_OK(unsloth_linear_logprob_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK(b.workspace_size <= sizeof scratch);
  b.workspace = p.workspace;
  CHECK_OK(unsloth_linear_logprob_backward(ctx, &b, NULL));
  GET(device, dx, there_dx);
  for (int token = 0; token < TOKENS; token++) {
    double s[VOCAB] = {0}, sum = 0, expected_entropy = 0, expected_dx[HIDDEN] = {0};
    for (int i = 0; i < VOCAB; i++) {
      for (int k = 0; k < HIDDEN; k++) s[i] += (double)x[token][k] * weight[i][k] / p.temperature;
      sum += exp(s[i]);
    }
    for (int i = 0; i < VOCAB; i++) expected_entropy -= exp(s[i]) / sum * (s[i] - log(sum));
    for (int i = 0; i < VOCAB; i++) {
      const double log_p = s[i] - log(sum), probability = exp(log_p);
      const double gradient = dlogprobs[token] * ((i == ids[token]) - probability) -
                              dentropy[token] * probability * (log_p + expected_entropy);
      for (int k = 0; k < HIDDEN; k++) expected_dx[k] += gradient / p.temperature * weight[i][k];
    }
    const int ignored = token == IGNORED;
    CHECK_NEAR(logprobs[token], ignored ? 0 : s[ids[token]] - log(sum), 1e-5);
    CHECK_NEAR(entropy[token], ignored ? 0 : expected_entropy, 1e-5);
    for (int k = 0; k < HIDDEN; k++) CHECK_NEAR(dx[token][k], ignored ? 0 : expected_dx[k], 1e-5);
  }

  p.temperature = -1;
  CHECK_FAILS(unsloth_linear_logprob_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear_logprob: temperature is -1, it must not be negative");
  b.accumulate = 2;
  CHECK_FAILS(unsloth_linear_logprob_backward(ctx, &b, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear_logprob_backward: accumulate is 2, allowed: 0, 1");
}

int main(void) { return on_every_device(run); }
