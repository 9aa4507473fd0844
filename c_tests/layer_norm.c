// LayerNorm.
#include "check.h"

enum { ROWS = 3, DIM = 5 };

// Without a weight's gradient: that of the bias, added to what is there, and that of x.
static void backward(const test_device *device, const float *values) {
  unsloth_layer_norm_backward_params p = UNSLOTH_LAYER_NORM_BACKWARD_PARAMS_INIT;
  float x[ROWS * DIM], dout[ROWS * DIM], dx[ROWS * DIM], dbias[DIM] = {1, 2, 3, 4, 5};
  void *there_dx, *there_dbias;

  memcpy(x, values, sizeof x);
  fill_random(dout, COUNT(dout), 3);
  memset(dx, 0xff, sizeof dx);
  p.epsilon = 1e-5f;
  p.accumulate = 1;
  p.x = f32_tensor(PUT(device, x), ROWS, DIM, -1, -1);
  p.dout = f32_tensor(PUT(device, dout), ROWS, DIM, -1, -1);
  there_dx = PUT(device, dx);
  p.dx = f32_tensor(there_dx, ROWS, DIM, -1, -1);
  there_dbias = PUT(device, dbias);
  p.dbias = f32_tensor(there_dbias, DIM, -1, -1, -1);
  CHECK_OK(unsloth_layer_norm_backward_supported(device->ctx, &p, NULL));
  CHECK_OK(unsloth_layer_norm_backward_workspace_size(device->ctx, &p, &p.workspace_size));
  float scratch[1024];
  CHECK(p.workspace_size <= sizeof scratch);
  p.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_layer_norm_backward(device->ctx, &p, NULL));
  GET(device, dx, there_dx);
  GET(device, dbias, there_dbias);
  for (int i = 0; i < DIM; i++) {
    double sum = i + 1;
    for (int row = 0; row < ROWS; row++) sum += dout[row * DIM + i];
    CHECK_NEAR(dbias[i], sum, 1e-5);
  }
  for (int row = 0; row < ROWS; row++) {
    const float *r = x + row * DIM, *d = dout + row * DIM;
    double mean = 0, variance = 0, gradient = 0, product = 0;
    for (int i = 0; i < DIM; i++) mean += r[i] / (double)DIM;
    for (int i = 0; i < DIM; i++) variance += (r[i] - mean) * (r[i] - mean) / DIM;
    const double scale = 1 / sqrt(variance + 1e-5);
    for (int i = 0; i < DIM; i++) gradient += d[i] / (double)DIM;
    for (int i = 0; i < DIM; i++) product += d[i] * (r[i] - mean) * scale / DIM;
    for (int i = 0; i < DIM; i++) {
      CHECK_NEAR(dx[row * DIM + i], scale * (d[i] - gradient - (r[i] - mean) * scale * product),
                 1e-4);
    }
  }
  p.workspace_size = 0;
  CHECK_STATUS(unsloth_layer_norm_backward(device->ctx, &p, NULL),
               UNSLOTH_STATUS_WORKSPACE_TOO_SMALL);
}

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

  backward(device, x);

  p.epsilon = 0;
  CHECK_STATUS(unsloth_layer_norm_forward(device->ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_device(run); }
