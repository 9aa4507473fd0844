// QK-norm and RoPE in one pass: a head normalised and turned, its gradient, and arguments that are
// refused.
#include "check.h"

enum { DIM = 4 };

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  // One token of one head; at position 1 with theta 1 both pairs turn by one radian.
  const double c = cos(1.0), s = sin(1.0);
  float q[DIM] = {1, 2, 3, 4}, gains[DIM] = {0.5f, 1, -1, 2}, out[DIM] = {0};
  double normal[DIM], scale = 1 / sqrt(30.0 / DIM + 1e-5), y[DIM];
  for (int i = 0; i < DIM; i++) normal[i] = q[i] * scale;
  for (int i = 0; i < DIM; i++) y[i] = normal[i] * gains[i];
  void *there = PUT(device, out);
  unsloth_qk_norm_rope_params p = UNSLOTH_QK_NORM_ROPE_PARAMS_INIT;
  p.q = f32_tensor(PUT(device, q), 1, 1, DIM, -1);
  p.q_out = f32_tensor(there, 1, 1, DIM, -1);
  p.q_weight = f32_tensor(PUT(device, gains), DIM, -1, -1, -1);
  p.epsilon = 1e-5f;
  p.position_offset = 1;
  p.rotation.theta = 1;
  unsloth_implementation implementation = 0;
  CHECK_OK(unsloth_qk_norm_rope_supported(ctx, &p, &implementation));
  CHECK((implementation == UNSLOTH_IMPLEMENTATION_CPU) == device->is_cpu);
  CHECK_OK(unsloth_qk_norm_rope_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int i = 0; i < 2; i++) {
    CHECK_NEAR(out[i], y[i] * c - y[i + 2] * s, 1e-6);
    CHECK_NEAR(out[i + 2], y[i + 2] * c + y[i] * s, 1e-6);
  }

  // The gradient takes the place of the output's; the gains' is added to ones.
  float dout[DIM] = {1, -1, 2, 0.5f}, sums[DIM] = {1, 1, 1, 1}, scratch[1024];
  double g[DIM], product = 0;
  for (int i = 0; i < 2; i++) {
    g[i] = dout[i] * c + dout[i + 2] * s;
    g[i + 2] = dout[i + 2] * c - dout[i] * s;
  }
  for (int i = 0; i < DIM; i++) product += g[i] * gains[i] * normal[i] / DIM;
  void *there_dq = PUT(device, dout), *there_sums = PUT(device, sums);
  unsloth_qk_norm_rope_backward_params back = UNSLOTH_QK_NORM_ROPE_BACKWARD_PARAMS_INIT;
  back.q = p.q;
  back.dq_out = f32_tensor(there_dq, 1, 1, DIM, -1);
  back.q_weight = p.q_weight;
  back.dq_weight = f32_tensor(there_sums, DIM, -1, -1, -1);
  back.accumulate = 1;
  back.epsilon = p.epsilon;
  back.position_offset = 1;
  back.rotation = p.rotation;
  CHECK_OK(unsloth_qk_norm_rope_backward_supported(ctx, &back, NULL));
  CHECK_OK(unsloth_qk_norm_rope_backward_workspace_size(ctx, &back, &back.workspace_size));
  CHECK(back.workspace_size <= sizeof scratch);
  back.workspace = PUT(device, scratch);
  CHECK_OK(unsloth_qk_norm_rope_backward(ctx, &back, NULL));
  float dq[DIM];
  GET(device, dq, there_dq);
  GET(device, sums, there_sums);
  for (int i = 0; i < DIM; i++) {
    CHECK_NEAR(dq[i], scale * (g[i] * gains[i] - normal[i] * product), 1e-6);
    CHECK_NEAR(sums[i], 1 + g[i] * normal[i], 1e-6);
  }

  const float before = out[0];
  p.epsilon = 0;
  CHECK_FAILS(unsloth_qk_norm_rope_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "qk_norm_rope: epsilon is 0, it must be above 0");
  back.dq_out.rank = 0;
  back.dq_out.data = NULL;
  CHECK_FAILS(unsloth_qk_norm_rope_backward(ctx, &back, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "qk_norm_rope_backward: dq_out is absent, q is there");
  GET(device, out, there);
  CHECK(out[0] == before);
}

int main(void) { return on_every_device(run); }
