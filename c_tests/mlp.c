// The gated feed-forward block: its workspace, its result, arguments that are refused.
#include "check.h"

enum { TOKENS = 3, HIDDEN = 8, INTERMEDIATE = 12 };

static void run(const test_device *device) {
  static float x[TOKENS][HIDDEN], gate_up[2 * INTERMEDIATE][HIDDEN], down[HIDDEN][INTERMEDIATE];
  static float out[TOKENS][HIDDEN];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&gate_up[0][0], 2 * INTERMEDIATE * HIDDEN, 2);
  fill_random(&down[0][0], HIDDEN * INTERMEDIATE, 3);
  void *there = PUT(device, out);
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.gate_up_weight = f32_tensor(PUT(device, gate_up), 2 * INTERMEDIATE, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(PUT(device, down), HIDDEN, INTERMEDIATE, -1, -1);
  p.out = f32_tensor(there, TOKENS, HIDDEN, -1, -1);
  size_t size = 0;
  if (!served(device, unsloth_mlp_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &size));
  CHECK(size >= TOKENS * INTERMEDIATE * sizeof(float));

  if (device->is_cpu) {
    CHECK(size == 144);
    CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
                "mlp: workspace_size is 0 bytes, 144 are required");
  }
  CHECK_OK(unsloth_memory_alloc(ctx, size, &p.workspace));
  p.workspace_size = size;
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  GET(device, out, there);
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
}

int main(void) { return on_every_device(run); }
