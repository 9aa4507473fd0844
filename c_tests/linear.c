// Linear layers: product, bias, accumulation; their gradients; arguments that are refused.
#include "check.h"

enum { ROWS = 20, IN = 33, OUT = 17 };

static void run(const test_device *device) {
  static float x[ROWS][IN], weight[OUT][IN], bias[OUT], out[ROWS][OUT];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], ROWS * IN, 1);
  fill_random(&weight[0][0], OUT * IN, 2);
  fill_random(bias, OUT, 3);
  for (int i = 0; i < ROWS * OUT; i++) (&out[0][0])[i] = 100;
  void *there = PUT(device, out);
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), ROWS, IN, -1, -1);
  p.weight = f32_tensor(PUT(device, weight), OUT, IN, -1, -1);
  p.bias = f32_tensor(PUT(device, bias), OUT, -1, -1, -1);
  p.out = f32_tensor(there, ROWS, OUT, -1, -1);
  p.residual = p.out;
  if (!served(device, unsloth_linear_supported(ctx, &p, NULL))) return;
  // What makes it faster, if anything does.
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(!device->is_cpu || p.workspace_size == 0);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_linear_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int row = 0; row < ROWS; row++) {
    for (int column = 0; column < OUT; column++) {
      double sum = 100.0 + bias[column];
      for (int i = 0; i < IN; i++) sum += (double)x[row][i] * weight[column][i];
      CHECK_NEAR(out[row][column], sum, 1e-4);
    }
  }

  p.weight.shape[1] = IN - 1;
  CHECK_FAILS(unsloth_linear_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear: weight has shape [17, 32], expected [17, 33]");
  CHECK_FAILS(unsloth_linear_forward(NULL, &p, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "linear: ctx is NULL");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

// Q4_0: f16 scale, codes 0 to 15 in halves of bytes, less 8.
static void run_blocks(const test_device *device) {
  enum { K = 64, N = 3, BYTES = 18 };
  static float x[2][K], out[2][N];
  // At an odd address.
  static uint8_t memory[1 + N * K / 32 * BYTES];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], 2 * K, 4);
  for (size_t i = 0; i < sizeof memory; i++) memory[i] = (uint8_t)(37 * i);
  uint8_t *blocks = memory + 1;
  for (int block = 0; block < N * K / 32; block++) {
    blocks[block * BYTES] = 0;
    blocks[block * BYTES + 1] = 0x34;  // 0.25
  }
  void *there = PUT(device, out);
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), 2, K, -1, -1);
  p.weight = tensor((uint8_t *)PUT(device, memory) + 1, UNSLOTH_DTYPE_Q4_0, N, K, -1, -1);
  p.out = f32_tensor(there, 2, N, -1, -1);
  const uint32_t flags[] = {0, UNSLOTH_TENSOR_INT8_ACTIVATIONS, UNSLOTH_TENSOR_FLOAT_ACTIVATIONS};
  for (int i = 0; i < 3; i++) {
    p.weight.flags = flags[i];
    const int exact = flags[i] == UNSLOTH_TENSOR_FLOAT_ACTIVATIONS;
    CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
    // On a GPU the weight is decoded for f32 that is not rounded.
    CHECK(device->is_cpu || p.workspace_size == (exact ? N * K * sizeof(float) : 0));
    CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
    CHECK_OK(unsloth_linear_forward(ctx, &p, NULL));
    CHECK_OK(unsloth_memory_free(ctx, p.workspace));
    GET(device, out, there);
    for (int row = 0; row < 2; row++) {
      for (int column = 0; column < N; column++) {
        double sum = 0;
        for (int k = 0; k < K; k++) {
          const uint8_t *block = blocks + (column * K + k) / 32 * BYTES;
          uint8_t pair = block[2 + k % 16];
          int code = k % 32 < 16 ? pair & 15 : pair >> 4;
          sum += 0.25 * (code - 8) * (double)x[row][k];
        }
        CHECK_NEAR(out[row][column], sum, exact ? 1e-4 : 0.2);
      }
    }
  }
  p.weight.shape[1] = p.x.shape[1] = 48;
  CHECK_FAILS(unsloth_linear_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear: weight has rows of 48 elements, allowed for q4_0: multiples of 32");
}

// Ternary codes, one more than the weight, and a scale for each row.
static void run_ternary(const test_device *device) {
  enum { K = 128, N = 3, BYTES = K / 4 };
  static float x[2][K], out[2][N];
  static uint8_t codes[N][BYTES];
  float scales[N] = {0.5f, 2.0f, -1.0f};
  unsloth_context *ctx = device->ctx;
  // The greatest is 127, so that codes are the numbers themselves.
  for (int i = 0; i < 2 * K; i++) (&x[0][0])[i] = (float)((i % K * 37 + 127) % 255 - 127);
  for (int i = 0; i < N * BYTES; i++) (&codes[0][0])[i] = (uint8_t)(73 * i);
  void *there = PUT(device, out);
  unsloth_quantization quantization = UNSLOTH_QUANTIZATION_INIT;
  quantization.scale = f32_tensor(PUT(device, scales), N, -1, -1, -1);
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), 2, K, -1, -1);
  p.weight = tensor(PUT(device, codes), UNSLOTH_DTYPE_TERNARY, N, K, -1, -1);
  p.weight.quantization = &quantization;
  p.out = f32_tensor(there, 2, N, -1, -1);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(!device->is_cpu || p.workspace_size == 0);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_linear_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int row = 0; row < 2; row++) {
    for (int column = 0; column < N; column++) {
      int sum = 0;
      for (int i = 0; i < K; i++) {
        sum += ((codes[column][i % BYTES] >> 2 * (i / BYTES) & 3) - 1) * (int)x[row][i];
      }
      CHECK(out[row][column] == scales[column] * (float)sum);
    }
  }
  quantization.scale.shape[0] = 2;
  CHECK_FAILS(unsloth_linear_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear: weight has 2 scales, their number must divide its 3 rows");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

// 8-bit floats and a scale for each row, by x as it is.
static void run_e4m3(const test_device *device) {
  enum { K = 5, N = 2 };
  // 1, -2, 0.5, 448, 2^-9; 0, -0, 1.5, 0.25, 16.
  static uint8_t codes[N][K] = {{0x38, 0xc0, 0x30, 0x7e, 0x01}, {0x00, 0x80, 0x3c, 0x28, 0x58}};
  static float x[1][K] = {{3, 0.5f, 4, 1, 512}}, out[1][N];
  float scales[N] = {0.5f, 2};
  unsloth_context *ctx = device->ctx;
  void *there = PUT(device, out);
  unsloth_quantization quantization = UNSLOTH_QUANTIZATION_INIT;
  quantization.scale = f32_tensor(PUT(device, scales), N, -1, -1, -1);
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), 1, K, -1, -1);
  p.weight = tensor(PUT(device, codes), UNSLOTH_DTYPE_F8E4M3, N, K, -1, -1);
  p.weight.quantization = &quantization;
  p.out = f32_tensor(there, 1, N, -1, -1);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(device->is_cpu || p.workspace_size == 0);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_linear_forward(ctx, &p, NULL));
  GET(device, out, there);
  CHECK(out[0][0] == 0.5f * (3 - 1 + 2 + 448 + 1));
  CHECK(out[0][1] == 2.0f * (6 + 0.25f + 512 * 16));
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

// Gradients, those of the parameters twice: written, then added to.
static void run_backward(const test_device *device) {
  static float dout[ROWS][OUT], x[ROWS][IN], weight[OUT][IN];
  static float dx[ROWS][IN], dweight[OUT][IN], dbias[OUT];
  unsloth_context *ctx = device->ctx;
  fill_random(&dout[0][0], ROWS * OUT, 1);
  fill_random(&x[0][0], ROWS * IN, 2);
  fill_random(&weight[0][0], OUT * IN, 3);
  void *there[3] = {PUT(device, dx), PUT(device, dweight), PUT(device, dbias)};
  unsloth_linear_backward_params p = UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  p.dout = f32_tensor(PUT(device, dout), ROWS, OUT, -1, -1);
  p.x = f32_tensor(PUT(device, x), ROWS, IN, -1, -1);
  p.weight = f32_tensor(PUT(device, weight), OUT, IN, -1, -1);
  p.dx = f32_tensor(there[0], ROWS, IN, -1, -1);
  p.dweight = f32_tensor(there[1], OUT, IN, -1, -1);
  p.dbias = f32_tensor(there[2], OUT, -1, -1, -1);
  if (!served(device, unsloth_linear_backward_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_linear_backward_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(!device->is_cpu || p.workspace_size == 0);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_linear_backward(ctx, &p, NULL));
  p.accumulate = 1;
  CHECK_OK(unsloth_linear_backward(ctx, &p, NULL));
  GET(device, dx, there[0]);
  GET(device, dweight, there[1]);
  GET(device, dbias, there[2]);
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < IN; i++) {
      double sum = 0;
      for (int o = 0; o < OUT; o++) sum += (double)dout[row][o] * weight[o][i];
      CHECK_NEAR(dx[row][i], sum, 1e-5);
    }
  }
  for (int o = 0; o < OUT; o++) {
    double sum = 0;
    for (int row = 0; row < ROWS; row++) sum += dout[row][o];
    CHECK_NEAR(dbias[o], 2 * sum, 1e-5);
    for (int i = 0; i < IN; i++) {
      sum = 0;
      for (int row = 0; row < ROWS; row++) sum += (double)dout[row][o] * x[row][i];
      CHECK_NEAR(dweight[o][i], 2 * sum, 1e-4);
    }
  }

  p.dweight.dtype = UNSLOTH_DTYPE_BF16;
  CHECK_FAILS(unsloth_linear_backward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "linear_backward: dweight has dtype bf16, allowed: f32");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

static void both(const test_device *device) {
  run(device);
  run_blocks(device);
  run_ternary(device);
  run_e4m3(device);
  run_backward(device);
}

int main(void) { return on_every_device(both); }
