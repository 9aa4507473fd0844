// Conversion: rounding to nearest even, overflow, the way back; arguments that are refused.
#include "check.h"

enum { N = 6 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  // Between two bf16 the even one is nearest; 65520 is halfway from the greatest f16 to the next.
  float x[N] = {1.0f, 1.00390625f, 1.01171875f, 65520.0f, -0.0f, 3.0e-8f}, back[N] = {0};
  const float bf16[N] = {1.0f, 1.0f, 1.015625f, 65536.0f, -0.0f, 3.003515303134918e-8f};
  const uint16_t f16[N] = {0x3c00, 0x3c04, 0x3c0c, 0x7c00, 0x8000, 0x0001};
  uint16_t half[N] = {0};
  unsloth_cast_params p = UNSLOTH_CAST_PARAMS_INIT;
  void *half_there = PUT(device, half), *back_there = PUT(device, back);
  p.x = f32_tensor(PUT(device, x), N, -1, -1, -1);
  p.out = tensor(half_there, UNSLOTH_DTYPE_F16, N, -1, -1, -1);
  CHECK_OK(unsloth_cast_forward(ctx, &p, NULL));
  GET(device, half, half_there);
  for (int i = 0; i < N; i++) CHECK(half[i] == f16[i]);
  p.out.dtype = UNSLOTH_DTYPE_BF16;
  CHECK_OK(unsloth_cast_forward(ctx, &p, NULL));
  p.x = p.out;
  p.out = f32_tensor(back_there, N, -1, -1, -1);
  CHECK_OK(unsloth_cast_forward(ctx, &p, NULL));
  GET(device, back, back_there);
  for (int i = 0; i < N; i++) CHECK(back[i] == bf16[i]);

  p.out.shape[0] = N - 1;
  CHECK_FAILS(unsloth_cast_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "cast: out has shape [5], x has [6]");
  p.out.dtype = UNSLOTH_DTYPE_I32;
  CHECK_FAILS(unsloth_cast_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "cast: out has dtype i32, allowed: f32, f16, bf16");
}

int main(void) { return on_every_device(run); }
