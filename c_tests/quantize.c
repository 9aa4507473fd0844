// Quantisation: codes, scale and sum of rows; ternary codes where they belong; a refusal.
#include "check.h"

enum { ROWS = 2, N = 128, BYTES = N / 4 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float x[ROWS][N] = {{0}}, scale[ROWS] = {0};
  int8_t codes[ROWS][N] = {{0}};
  int32_t sum[ROWS] = {0};
  uint8_t packed[ROWS][BYTES] = {{0}};
  for (int i = 0; i < N; i++) x[0][i] = (float)(i - 64) * 0.25f;
  // A third each of -1, 0 and 1, but for one.
  for (int i = 0; i < N; i++) x[1][i] = (float)(i % 3 - 1) * 3.0f;
  unsloth_quantize_params p = UNSLOTH_QUANTIZE_PARAMS_INIT;
  void *codes_there = PUT(device, codes), *scale_there = PUT(device, scale);
  void *sum_there = PUT(device, sum), *packed_there = PUT(device, packed);
  p.x = f32_tensor(PUT(device, x), ROWS, N, -1, -1);
  p.out = tensor(codes_there, UNSLOTH_DTYPE_I8, ROWS, N, -1, -1);
  p.scale = f32_tensor(scale_there, ROWS, -1, -1, -1);
  p.sum = tensor(sum_there, UNSLOTH_DTYPE_I32, ROWS, -1, -1, -1);
  CHECK_OK(unsloth_quantize_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(!device->is_cpu || p.workspace_size == 0);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_quantize_forward(ctx, &p, NULL));
  GET(device, codes, codes_there);
  GET(device, scale, scale_there);
  GET(device, sum, sum_there);
  CHECK(scale[0] == 16.0f / 127.0f && scale[1] == 3.0f / 127.0f);
  CHECK(codes[0][0] == -127 && codes[0][64] == 0 && codes[0][127] == 125);
  int32_t sums[ROWS] = {0};
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < N; i++) sums[row] += codes[row][i];
    CHECK(sum[row] == sums[row]);
  }
  for (int i = 0; i < N; i++) CHECK(codes[1][i] == 127 * (i % 3 - 1));

  p.out = tensor(packed_there, UNSLOTH_DTYPE_TERNARY, ROWS, N, -1, -1);
  p.rule = UNSLOTH_QUANTIZE_THRESHOLD;
  CHECK_OK(unsloth_quantize_forward(ctx, &p, NULL));
  GET(device, packed, packed_there);
  GET(device, scale, scale_there);
  GET(device, sum, sum_there);
  for (int i = 0; i < N; i++) CHECK((packed[1][i % BYTES] >> 2 * (i / BYTES) & 3) == i % 3);
  CHECK(scale[1] == 3.0f && sum[1] == -1);

  // 8-bit floats: the greatest becomes 448, which is 0x7e; sums they have none.
  p.out = tensor(codes_there, UNSLOTH_DTYPE_F8E4M3, ROWS, N, -1, -1);
  p.rule = UNSLOTH_QUANTIZE_ABSMAX;
  CHECK_FAILS(unsloth_quantize_forward(ctx, &p, NULL), UNSLOTH_STATUS_UNSUPPORTED,
              "quantize: sum is there, codes of f8e4m3 are no integers to be summed");
  unsloth_tensor kept = p.sum;
  memset(&p.sum, 0, sizeof p.sum);
  CHECK_OK(unsloth_quantize_forward(ctx, &p, NULL));
  p.sum = kept;
  GET(device, codes, codes_there);
  GET(device, scale, scale_there);
  CHECK(scale[0] == 16.0f / 448.0f && scale[1] == 3.0f / 448.0f);
  CHECK(codes[0][0] == -2 && codes[0][64] == 0);
  for (int i = 0; i < N; i++) CHECK(codes[1][i] == (i % 3 == 0 ? -2 : i % 3 == 1 ? 0 : 0x7e));

  p.scale.shape[0] = 3;
  CHECK_FAILS(unsloth_quantize_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "quantize: scale has shape [3], expected [1], [2], or [2] and a divisor of 128");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

int main(void) { return on_every_device(run); }
