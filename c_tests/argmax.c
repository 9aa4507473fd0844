// Argmax: the first of equals, NaN; arguments that are refused.
#include "check.h"

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float x[4][5] = {{1, 5, 2, 5, 0}, {-3, -2, -1, -4, -5}, {0, 9, (float)NAN, 10, (float)NAN}, {0}};
  const int64_t expected[4] = {1, 2, 2, 0};
  int64_t out[4] = {-1, -1, -1, -1};
  void *there = PUT(device, out);
  unsloth_argmax_params p = UNSLOTH_ARGMAX_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), 4, 5, -1, -1);
  p.out = tensor(there, UNSLOTH_DTYPE_I64, 4, -1, -1, -1);
  CHECK_OK(unsloth_argmax_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int i = 0; i < 4; i++) CHECK(out[i] == expected[i]);

  p.x.shape[1] = 0;
  CHECK_FAILS(unsloth_argmax_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "argmax: x has 0 columns, allowed: 1 to 2147483647");
  p.out.dtype = UNSLOTH_DTYPE_F32;
  CHECK_FAILS(unsloth_argmax_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "argmax: out has dtype f32, allowed: i32, i64");
}

int main(void) { return on_every_device(run); }
