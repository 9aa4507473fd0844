// LayerNorm.
#include "check.h"

enum { ROWS = 3, DIM = 5 };

static void run(const test_device *device) {
  unsloth_layer_norm_params p = UNSLOTH_LAYER_NORM_PARAMS_INIT;
  float x[ROWS * DIM], bias[DIM], out[ROWS * DIM];
  void *there;

  fill_random(x, COUNT(x), 1);
  fill_random(bias, COUNT(bias), 2);
  memset(out, 0xff, sizeof out);
  there = PUT(device, out);
  p.epsilon = 1e-5f;
  p.x = f32_tensor(PUT(device, x), ROWS, DIM, -1, -1);
  p.out = f32_tensor(there, ROWS, DIM, -1, -1);
  p.bias = f32_tensor(PUT(device, bias), DIM, -1, -1, -1);
  CHECK_OK(unsloth_layer_norm_supported(device->ctx, &p, NULL));
  CHECK_OK(unsloth_layer_norm_forward(device->ctx, &p, NULL));
  GET(device, out, there);
  for (int row = 0; row < ROWS; row++) {
    const float *r = x + row * DIM;
    double mean = 0, variance = 0;
    for (int i = 0; i < DIM; i++) mean += r[i] / (double)DIM;
    for (int i = 0; i < DIM; i++) variance += (r[i] - mean) * (r[i] - mean) / DIM;
    for (int i = 0; i < DIM; i++) {
      CHECK_NEAR(out[row * DIM + i], (r[i] - mean) / sqrt(variance + 1e-5) + bias[i], 1e-5);
    }
  }

  p.epsilon = 0;
  CHECK_STATUS(unsloth_layer_norm_forward(device->ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_device(run); }
