// Sums over ranks that are normalised, in place and not; ranks that do not agree.
#include "ranks.h"

static int is_near(float a, float b) { return a - b < 1e-4f && b - a < 1e-4f; }

// Whether a number is `sum` over the root of the mean square.
static int is_normalised(float x, float sum) {
  const float mean_square = 12.5f;
  return x > 0 && is_near(x * x * mean_square, sum * sum);
}

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  // The sums are 2 and 5, and with the residual 3 and 4.
  float x[2] = {(float)rank - 1.0f / 3, 5.0f / 3}, out[2] = {0};
  float residual[2] = {1, -1}, sum[2] = {0}, weight[2] = {1, 2};
  unsloth_all_reduce_rms_norm_params p = UNSLOTH_ALL_REDUCE_RMS_NORM_PARAMS_INIT;
  p.comm = comm;
  p.epsilon = 1e-12f;
  p.x = f32_tensor(x, 1, 2, -1, -1);
  p.out = f32_tensor(out, 1, 2, -1, -1);
  p.weight = f32_tensor(weight, 2, -1, -1, -1);
  p.residual = f32_tensor(residual, 1, 2, -1, -1);
  p.residual_out = f32_tensor(sum, 1, 2, -1, -1);
  CHECK_OK(unsloth_all_reduce_rms_norm_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_all_reduce_rms_norm_forward(ctx, &p, NULL));
  CHECK(is_near(sum[0], 3) && is_near(sum[1], 4) && residual[0] == 1 && residual[1] == -1);
  CHECK(is_normalised(out[0], 3) && is_normalised(out[1], 8));
  memset(&p.out, 0, sizeof p.out);
  memset(&p.weight, 0, sizeof p.weight);
  memset(&p.residual_out, 0, sizeof p.residual_out);
  CHECK_OK(unsloth_all_reduce_rms_norm_forward(ctx, &p, NULL));
  CHECK(is_near(residual[0], 3) && is_near(residual[1], 4));
  CHECK(is_normalised(x[0], 3) && is_normalised(x[1], 4));

  if (rank == 1) p.x.shape[0] = p.residual.shape[0] = 0;
  CHECK_STATUS(unsloth_all_reduce_rms_norm_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK(is_near(residual[0], 3));
}

int main(void) { return on_every_rank(run); }
