// The gated feed-forward block: its workspace, its result, its gradients, arguments that are
// refused.
#include "check.h"

enum { TOKENS = 3, HIDDEN = 8, INTERMEDIATE = 12 };

static float x[TOKENS][HIDDEN], gate_up[2 * INTERMEDIATE][HIDDEN], down[HIDDEN][INTERMEDIATE];
static float dout[TOKENS][HIDDEN];

static double out_of(int token, int column) {
  double sum = 0;
  for (int i = 0; i < INTERMEDIATE; i++) {
    double gate = 0, up = 0;
    for (int j = 0; j < HIDDEN; j++) {
      gate += (double)x[token][j] * gate_up[i][j];
      up += (double)x[token][j] * gate_up[INTERMEDIATE + i][j];
    }
    sum += gate / (1 + exp(-gate)) * up * down[column][i];
  }
  return sum;
}

static void run(const test_device *device) {
  static float out[TOKENS][HIDDEN];
  unsloth_context *ctx = device->ctx;
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&gate_up[0][0], 2 * INTERMEDIATE * HIDDEN, 2);
  fill_random(&down[0][0], HIDDEN * INTERMEDIATE, 3);
  void *there = PUT(device, out);
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.gate_up_weight = f32_tensor(PUT(device, gate_up), 2 * INTERMEDIATE, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(PUT(device, down), HIDDEN, INTERMEDIATE, -1, -1);
  p.out = f32_tensor(there, TOKENS, HIDDEN, -1, -1);
  size_t size = 0;
  if (!served(device, unsloth_mlp_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &size));
  CHECK(size >= TOKENS * INTERMEDIATE * sizeof(float));

  if (device->is_cpu) {
    CHECK(size == 144);
    CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
                "mlp: workspace_size is 0 bytes, 144 are required");
  }
  CHECK_OK(unsloth_memory_alloc(ctx, size, &p.workspace));
  p.workspace_size = size;
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int token = 0; token < TOKENS; token++) {
    for (int j = 0; j < HIDDEN; j++) CHECK_NEAR(out[token][j], out_of(token, j), 1e-4);
  }

  p.gate_weight = p.down_weight;
  CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "mlp: gate_weight and gate_up_weight are both there: set one");
}

// What the outputs, each times its gradient, add up to: its derivatives are the gradients.
static double loss(void) {
  double sum = 0;
  for (int token = 0; token < TOKENS; token++) {
    for (int j = 0; j < HIDDEN; j++) sum += dout[token][j] * out_of(token, j);
  }
  return sum;
}

static void check_gradient(float *of, int n, const float *gradient) {
  for (int i = 0; i < n; i++) {
    const float kept = of[i], step = 0x1p-10f;
    double difference, width;
    of[i] = kept + step;
    difference = loss();
    width = of[i];
    of[i] = kept - step;
    difference -= loss();
    width -= of[i];
    of[i] = kept;
    CHECK_NEAR(gradient[i], difference / width, 1e-3);
  }
}

// Gradients with what the forward kept, then without it: to the bit the same.
static void run_backward(const test_device *device) {
  static float kept[TOKENS][2 * INTERMEDIATE], out[TOKENS][HIDDEN];
  static float dx[2][TOKENS][HIDDEN], dgate_up[2][2 * INTERMEDIATE][HIDDEN];
  static float ddown[2][HIDDEN][INTERMEDIATE];
  unsloth_context *ctx = device->ctx;
  fill_random(&dout[0][0], TOKENS * HIDDEN, 4);
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.gate_up_weight = f32_tensor(PUT(device, gate_up), 2 * INTERMEDIATE, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(PUT(device, down), HIDDEN, INTERMEDIATE, -1, -1);
  unsloth_mlp_backward_params b = UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  b.forward = &p;
  b.dout = f32_tensor(PUT(device, dout), TOKENS, HIDDEN, -1, -1);
  void *there = PUT(device, dx[0]);
  b.dx = f32_tensor(there, TOKENS, HIDDEN, -1, -1);
  if (!served(device, unsloth_mlp_backward_supported(ctx, &b, NULL))) return;

  p.gate_up_out = f32_tensor(PUT(device, kept), TOKENS, 2 * INTERMEDIATE, -1, -1);
  p.out = f32_tensor(PUT(device, out), TOKENS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  b.gate_up = p.gate_up_out;
  for (int again = 0; again < 2; again++) {
    void *of_gate_up = PUT(device, dgate_up[again]), *of_down = PUT(device, ddown[again]);
    b.dgate_up_weight = f32_tensor(of_gate_up, 2 * INTERMEDIATE, HIDDEN, -1, -1);
    b.ddown_weight = f32_tensor(of_down, HIDDEN, INTERMEDIATE, -1, -1);
    CHECK_OK(unsloth_mlp_backward_workspace_size(ctx, &b, &b.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
    CHECK_OK(unsloth_mlp_backward(ctx, &b, NULL));
    GET(device, dx[again], there);
    GET(device, dgate_up[again], of_gate_up);
    GET(device, ddown[again], of_down);
    CHECK_OK(unsloth_memory_free(ctx, b.workspace));
    memset(&b.gate_up, 0, sizeof b.gate_up);
  }
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
  CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) == 0);
  CHECK(memcmp(dgate_up[0], dgate_up[1], sizeof dgate_up[0]) == 0);
  CHECK(memcmp(ddown[0], ddown[1], sizeof ddown[0]) == 0);
  check_gradient(&x[0][0], TOKENS * HIDDEN, &dx[0][0][0]);
  check_gradient(&gate_up[0][0], 2 * INTERMEDIATE * HIDDEN, &dgate_up[0][0][0]);
  check_gradient(&down[0][0], HIDDEN * INTERMEDIATE, &ddown[0][0][0]);

  b.dgate_weight = b.ddown_weight;
  CHECK_FAILS(unsloth_mlp_backward(ctx, &b, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "mlp_backward: dgate_weight is there, without gate_weight it has no use");
}

static void both(const test_device *device) {
  run(device);
  run_backward(device);
}

int main(void) { return on_every_device(both); }
