// RoPE: a quarter turn, the way back, and arguments that are refused.
#include "check.h"

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  // One token of one head of four components; at position 1 with theta 1 both pairs turn by one
  // radian.
  float q[4] = {1, 2, 3, 4}, out[4] = {0};
  void *there = PUT(device, out);
  unsloth_rope_params p = UNSLOTH_ROPE_PARAMS_INIT;
  p.q = f32_tensor(PUT(device, q), 1, 1, 4, -1);
  p.q_out = f32_tensor(there, 1, 1, 4, -1);
  p.position_offset = 1;
  p.rotation.theta = 1;
  CHECK_OK(unsloth_rope_forward(ctx, &p, NULL));
  GET(device, out, there);
  CHECK_NEAR(out[0], 1 * cos(1.0) - 3 * sin(1.0), 1e-6);
  CHECK_NEAR(out[2], 3 * cos(1.0) + 1 * sin(1.0), 1e-6);
  CHECK_NEAR(out[1], 2 * cos(1.0) - 4 * sin(1.0), 1e-6);
  CHECK_NEAR(out[3], 4 * cos(1.0) + 2 * sin(1.0), 1e-6);

  // Back again, in place.
  unsloth_rope_params back = p;
  back.q = p.q_out;
  memset(&back.q_out, 0, sizeof back.q_out);
  back.inverse = 1;
  CHECK_OK(unsloth_rope_forward(ctx, &back, NULL));
  GET(device, out, there);
  for (size_t i = 0; i < COUNT(q); i++) CHECK_NEAR(out[i], q[i], 1e-6);

  // Interleaved pairs, positions per token, theta 10000.
  int32_t positions[1] = {2};
  p.rotation.style = UNSLOTH_ROPE_STYLE_INTERLEAVED;
  p.rotation.theta = 0;
  p.position_offset = 0;
  p.positions = tensor(PUT(device, positions), UNSLOTH_DTYPE_I32, 1, -1, -1, -1);
  unsloth_implementation implementation = 0;
  CHECK_OK(unsloth_rope_supported(ctx, &p, &implementation));
  CHECK((implementation == UNSLOTH_IMPLEMENTATION_CPU) == device->is_cpu);
  CHECK_OK(unsloth_rope_forward(ctx, &p, NULL));
  GET(device, out, there);
  CHECK_NEAR(out[0], 1 * cos(2.0) - 2 * sin(2.0), 1e-6);
  CHECK_NEAR(out[3], 4 * cos(0.02) + 3 * sin(0.02), 1e-6);

  float before = out[0];
  p.rotation.rotary_dim = 6;
  CHECK_FAILS(unsloth_rope_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "rope: rotary_dim is 6, above the head_dim 4");
  CHECK_FAILS(unsloth_rope_forward(ctx, NULL, NULL), UNSLOTH_STATUS_NULL_POINTER,
              "rope: params is NULL");
  GET(device, out, there);
  CHECK(out[0] == before);
}

int main(void) { return on_every_device(run); }
