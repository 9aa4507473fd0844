// Sums over ranks, in place and not; ranks that do not agree.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float x[2] = {1.0f + (float)rank, 10}, out[2] = {0};
  unsloth_all_reduce_params p = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  p.comm = comm;
  p.x = f32_tensor(x, 2, -1, -1, -1);
  p.out = f32_tensor(out, 2, -1, -1, -1);
  CHECK_OK(unsloth_all_reduce_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_all_reduce_forward(ctx, &p, NULL));
  CHECK(out[0] == 6 && out[1] == 30 && x[1] == 10);
  p.out.rank = 0;
  p.out.data = NULL;
  p.op = UNSLOTH_REDUCE_OP_MAX;
  CHECK_OK(unsloth_all_reduce_forward(ctx, &p, NULL));
  CHECK(x[0] == 3 && x[1] == 10);

  p.op = rank == 1 ? UNSLOTH_REDUCE_OP_MIN : UNSLOTH_REDUCE_OP_SUM;
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "all_reduce: op is sum on rank 0, min on rank 1");
  CHECK(x[0] == 3 && x[1] == 10);
}

int main(void) { return on_every_rank(run); }
