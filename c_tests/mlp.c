// The gated feed-forward block: its workspace, its result, arguments that are refused.
#include "check.h"

enum { TOKENS = 3, HIDDEN = 8, INTERMEDIATE = 12 };

int main(void) {
  static float x[TOKENS][HIDDEN], gate_up[2 * INTERMEDIATE][HIDDEN], down[HIDDEN][INTERMEDIATE];
  static float out[TOKENS][HIDDEN];
  unsloth_context *ctx = cpu_context();
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&gate_up[0][0], 2 * INTERMEDIATE * HIDDEN, 2);
  fill_random(&down[0][0], HIDDEN * INTERMEDIATE, 3);
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.x = f32_tensor(&x[0][0], TOKENS, HIDDEN, -1, -1);
  p.gate_up_weight = f32_tensor(&gate_up[0][0], 2 * INTERMEDIATE, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(&down[0][0], HIDDEN, INTERMEDIATE, -1, -1);
  p.out = f32_tensor(&out[0][0], TOKENS, HIDDEN, -1, -1);
  size_t size = 0;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &size));
  CHECK(size == TOKENS * INTERMEDIATE * sizeof(float));

  CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
              "mlp: workspace_size is 0 bytes, 144 are required");
  CHECK_OK(unsloth_memory_alloc(ctx, size, &p.workspace));
  p.workspace_size = size;
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  for (int token = 0; token < TOKENS; token++) {
    double middle[INTERMEDIATE];
    for (int i = 0; i < INTERMEDIATE; i++) {
      double gate = 0, up = 0;
      for (int j = 0; j < HIDDEN; j++) {
        gate += (double)x[token][j] * gate_up[i][j];
        up += (double)x[token][j] * gate_up[INTERMEDIATE + i][j];
      }
      middle[i] = gate / (1 + exp(-gate)) * up;
    }
    for (int j = 0; j < HIDDEN; j++) {
      double sum = 0;
      for (int i = 0; i < INTERMEDIATE; i++) sum += middle[i] * down[j][i];
      CHECK_NEAR(out[token][j], sum, 1e-4);
    }
  }

  p.gate_weight = p.down_weight;
  CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "mlp: gate_weight and gate_up_weight are both there: set one");
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
