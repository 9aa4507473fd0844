// A file's ternary weights: codes and scale, in place too; a product with them; refusals.
#include "check.h"

enum { ROWS = 2, N = 128, BYTES = N / 4, CODES = ROWS * BYTES, TAIL = 32 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  // As a file has it: of row r and column i the code (i + r) % 3, and half of the codes' values.
  uint8_t file[CODES + TAIL] = {0}, codes[CODES] = {0}, after[CODES + TAIL] = {0};
  const float half = 0.5f;
  float scale[1] = {0};
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < N; i++) {
      file[row * BYTES + i % BYTES] |= (uint8_t)((i + row) % 3 << (6 - 2 * (i / BYTES)));
    }
  }
  memcpy(file + CODES, &half, sizeof half);
  void *file_there = PUT(device, file), *codes_there = PUT(device, codes);
  void *scale_there = PUT(device, scale);
  unsloth_weight_repack_params p = UNSLOTH_WEIGHT_REPACK_PARAMS_INIT;
  p.packed = tensor(file_there, UNSLOTH_DTYPE_I8, sizeof file, -1, -1, -1);
  p.out = tensor(codes_there, UNSLOTH_DTYPE_TERNARY, ROWS, N, -1, -1);
  p.scale = f32_tensor(scale_there, 1, -1, -1, -1);
  CHECK_OK(unsloth_weight_repack_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_weight_repack_forward(ctx, &p, NULL));
  GET(device, codes, codes_there);
  GET(device, scale, scale_there);
  CHECK(scale[0] == half);
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < N; i++) {
      CHECK((codes[row * BYTES + i % BYTES] >> 2 * (i / BYTES) & 3) == (i + row) % 3);
    }
  }

  // In place the scale may stay behind the codes, where a product finds it.
  p.out.data = file_there;
  memset(&p.scale, 0, sizeof p.scale);
  CHECK_OK(unsloth_weight_repack_forward(ctx, &p, NULL));
  GET(device, after, file_there);
  CHECK(memcmp(after, codes, CODES) == 0);
  CHECK(memcmp(after + CODES, file + CODES, TAIL) == 0);
  unsloth_quantization quantization = UNSLOTH_QUANTIZATION_INIT;
  quantization.scale = f32_tensor((char *)file_there + CODES, 1, -1, -1, -1);
  float x[N] = {0}, y[ROWS] = {0};
  x[1] = 127.0f;
  x[65] = -127.0f;
  void *y_there = PUT(device, y);
  unsloth_linear_params linear = UNSLOTH_LINEAR_PARAMS_INIT;
  linear.x = f32_tensor(PUT(device, x), 1, N, -1, -1);
  linear.weight = p.out;
  linear.weight.quantization = &quantization;
  linear.out = f32_tensor(y_there, 1, ROWS, -1, -1);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &linear, &linear.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, linear.workspace_size, &linear.workspace));
  CHECK_OK(unsloth_linear_forward(ctx, &linear, NULL));
  GET(device, y, y_there);
  CHECK_OK(unsloth_memory_free(ctx, linear.workspace));
  // Weights of columns 1 and 65 are 0 and 1, then 1 and -1.
  CHECK(y[0] == -63.5f && y[1] == 127.0f);

  p.packed.shape[0] -= TAIL;
  CHECK_FAILS(unsloth_weight_repack_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "weight_repack: packed has shape [64], expected [96]");
  p.format = 7;
  CHECK_FAILS(unsloth_weight_repack_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "weight_repack: format is 7, allowed: 0 (i2_s)");
}

int main(void) { return on_every_device(run); }
