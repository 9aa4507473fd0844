// Gated activations: apart and packed agree with the definition; arguments that are refused.
#include "check.h"

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float packed[2][6], out[2][3] = {{0}};
  void *there;
  fill_random(&packed[0][0], 12, 1);
  there = PUT(device, out);
  unsloth_swiglu_params p = UNSLOTH_SWIGLU_PARAMS_INIT;
  p.gate_up = f32_tensor(PUT(device, packed), 2, 6, -1, -1);
  p.out = f32_tensor(there, 2, 3, -1, -1);
  CHECK_OK(unsloth_swiglu_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int row = 0; row < 2; row++) {
    for (int i = 0; i < 3; i++) {
      double gate = packed[row][i], up = packed[row][3 + i];
      CHECK_NEAR(out[row][i], gate / (1 + exp(-gate)) * up, 1e-6);
    }
  }

  // Apart, in place, GELU.
  float gate[3] = {-1, 0.5f, 2}, up[3] = {1, 2, 3};
  unsloth_swiglu_params apart = UNSLOTH_SWIGLU_PARAMS_INIT;
  there = PUT(device, gate);
  apart.gate = f32_tensor(there, 3, -1, -1, -1);
  apart.up = f32_tensor(PUT(device, up), 3, -1, -1, -1);
  apart.activation = UNSLOTH_ACTIVATION_GELU;
  CHECK_OK(unsloth_swiglu_forward(ctx, &apart, NULL));
  GET(device, gate, there);
  CHECK_NEAR(gate[0], -1 * (1 + erf(-1 / sqrt(2.0))) / 2 * 1, 1e-6);
  CHECK_NEAR(gate[2], 2 * (1 + erf(2 / sqrt(2.0))) / 2 * 3, 1e-5);

  p.activation = 17;
  CHECK_FAILS(unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "swiglu: activation is 17, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh)");
  p.activation = 0;
  p.gate_up.data = NULL;
  CHECK_FAILS(unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "swiglu: data of gate_up is NULL");
}

int main(void) { return on_every_device(run); }
