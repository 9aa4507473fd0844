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

  // Gradients, in place, with the output again over its gradient.
  float dout[2][3];
  fill_random(&dout[0][0], 6, 2);
  unsloth_swiglu_backward_params back = UNSLOTH_SWIGLU_BACKWARD_PARAMS_INIT;
  void *halves = PUT(device, packed), *gradient = PUT(device, dout);
  back.gate_up = f32_tensor(halves, 2, 6, -1, -1);
  back.dout = back.out = f32_tensor(gradient, 2, 3, -1, -1);
  CHECK_OK(unsloth_swiglu_backward_supported(ctx, &back, NULL));
  CHECK_OK(unsloth_swiglu_backward(ctx, &back, NULL));
  float gradients[2][6], again[2][3];
  GET(device, gradients, halves);
  GET(device, again, gradient);
  for (int row = 0; row < 2; row++) {
    for (int i = 0; i < 3; i++) {
      double x = packed[row][i], up = packed[row][3 + i], d = dout[row][i], s = 1 / (1 + exp(-x));
      CHECK_NEAR(gradients[row][i], d * up * (s + x * s * (1 - s)), 1e-6);
      CHECK_NEAR(gradients[row][3 + i], d * x * s, 1e-6);
      CHECK_NEAR(again[row][i], x * s * up, 1e-6);
    }
  }
  back.reserved = 1;
  CHECK_FAILS(unsloth_swiglu_backward(ctx, &back, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "swiglu_backward: reserved is 1, allowed: 0");

  p.activation = 17;
  CHECK_FAILS(
      unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
      "swiglu: activation is 17, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)");
  p.activation = 0;
  p.gate_up.data = NULL;
  CHECK_FAILS(unsloth_swiglu_forward(ctx, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "swiglu: data of gate_up is NULL");
}

int main(void) { return on_every_device(run); }
