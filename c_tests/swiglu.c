// Gated activations: apart and packed agree with the definition; arguments that are refused.
#include "check.h"

int main(void) {
  unsloth_context *ctx = cpu_context();
  float packed[2][6], out[2][3] = {{0}};
  fill_random(&packed[0][0], 12, 1);
  unsloth_swiglu_params p = UNSLOTH_SWIGLU_PARAMS_INIT;
  p.gate_up = f32_tensor(&packed[0][0], 2, 6, -1, -1);
  p.out = f32_tensor(&out[0][0], 2, 3, -1, -1);
  CHECK_OK(unsloth_swiglu_forward(ctx, &p, NULL));
  for (int row = 0; row < 2; row++) {
    for (int i = 0; i < 3; i++) {
      double gate = packed[row][i], up = packed[row][3 + i];
      CHECK_NEAR(out[row][i], gate / (1 + exp(-gate)) * up, 1e-6);
    }
  }

  // Apart, in place, GELU.
  float gate[3] = {-1, 0.5f, 2}, up[3] = {1, 2, 3};
  unsloth_swiglu_params apart = UNSLOTH_SWIGLU_PARAMS_INIT;
  apart.gate = f32_tensor(gate, 3, -1, -1, -1);
  apart.up = f32_tensor(up, 3, -1, -1, -1);
  apart.activation = UNSLOTH_ACTIVATION_GELU;
  CHECK_OK(unsloth_swiglu_forward(ctx, &apart, NULL));
  CHECK_NEAR(gate[0], -1 * (1 + erf(-1 / sqrt(2.0))) / 2 * 1, 1e-6);
  CHECK_NEAR(gate[2], 2 * (1 + erf(2 / sqrt(2.0))) / 2 * 3, 1e-5);

  p.activation = 17;
  CHECK_FAILS(unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "swiglu: activation is 17, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh)");
  p.activation = 0;
  p.gate_up.data = NULL;
  CHECK_FAILS(unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "swiglu: data of gate_up is NULL");
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
