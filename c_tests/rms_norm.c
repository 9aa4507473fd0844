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

  p.epsilon = -1;
  CHECK_STATUS(unsloth_rms_norm_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  p.epsilon = 1e-5f;
  p.weight.shape[0] = DIM - 1;
  CHECK_STATUS(unsloth_rms_norm_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_device(run); }
