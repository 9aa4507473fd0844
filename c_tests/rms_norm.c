// RMSNorm.
#include "check.h"

enum { ROWS = 3, DIM = 5 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_rms_norm_params p = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_implementation implementation = 0;
  float x[ROWS * DIM], weight[DIM], out[ROWS * DIM];
  void *there;

  fill_random(x, COUNT(x), 1);
  fill_random(weight, COUNT(weight), 2);
  memset(out, 0xff, sizeof out);
  p.epsilon = 1e-5f;
  there = PUT(device, out);
  p.x = f32_tensor(PUT(device, x), ROWS, DIM, -1, -1);
  p.out = f32_tensor(there, ROWS, DIM, -1, -1);
  p.weight = f32_tensor(PUT(device, weight), DIM, -1, -1, -1);
  CHECK_OK(unsloth_rms_norm_supported(ctx, &p, &implementation));
  CHECK((implementation == UNSLOTH_IMPLEMENTATION_CPU) == device->is_cpu);
  CHECK_OK(unsloth_rms_norm_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int row = 0; row < ROWS; row++) {
    double sum = 0;
    for (int i = 0; i < DIM; i++) sum += (double)x[row * DIM + i] * x[row * DIM + i];
    for (int i = 0; i < DIM; i++) {
      const double expected = x[row * DIM + i] / sqrt(sum / DIM + 1e-5) * weight[i];
      CHECK_NEAR(out[row * DIM + i], expected, 1e-6);
    }
  }

  // The gradient of the weight alone reaches the parameters, that of x takes its cause's place.
  float dout[ROWS * DIM], dweight[DIM], scratch[1024];
  fill_random(dout, COUNT(dout), 3);
  memset(dweight, 0xff, sizeof dweight);
  unsloth_rms_norm_backward_params back = UNSLOTH_RMS_NORM_BACKWARD_PARAMS_INIT;
  void *there_dx = PUT(device, dout), *there_dweight = PUT(device, dweight);
  back.epsilon = 1e-5f;
  back.x = p.x;
  back.dout = f32_tensor(there_dx, ROWS, DIM, -1, -1);
  back.weight = p.weight;
  back.dweight = f32_tensor(there_dweight, DIM, -1, -1, -1);
  CHECK_OK(unsloth_rms_norm_backward_supported(ctx, &back, NULL));
  CHECK_OK(unsloth_rms_norm_backward_workspace_size(ctx, &back, &back.workspace_size));
  CHECK(back.workspace_size <= sizeof scratch);
  back.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_rms_norm_backward(ctx, &back, NULL));
  float dx[ROWS * DIM];
  GET(device, dx, there_dx);
  GET(device, dweight, there_dweight);
  double sums[DIM] = {0};
  for (int row = 0; row < ROWS; row++) {
    const float *r = x + row * DIM, *d = dout + row * DIM;
    double square = 0, product = 0;
    for (int i = 0; i < DIM; i++) square += (double)r[i] * r[i] / DIM;
    const double scale = 1 / sqrt(square + 1e-5);
    for (int i = 0; i < DIM; i++) {
      product += d[i] * weight[i] * r[i] * scale / DIM;
      sums[i] += d[i] * r[i] * scale;
    }
    for (int i = 0; i < DIM; i++) {
      CHECK_NEAR(dx[row * DIM + i], scale * (d[i] * weight[i] - r[i] * scale * product), 1e-5);
    }
  }
  for (int i = 0; i < DIM; i++) CHECK_NEAR(dweight[i], sums[i], 1e-5);

  p.epsilon = -1;
  CHECK_STATUS(unsloth_rms_norm_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  p.epsilon = 1e-5f;
  p.weight.shape[0] = DIM - 1;
  CHECK_STATUS(unsloth_rms_norm_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_device(run); }
