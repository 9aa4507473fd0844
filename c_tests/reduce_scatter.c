// Each rank's rows of a sum, not in place and in place.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float x[RANKS] = {1, 20, 300}, out = 0;
  unsloth_reduce_scatter_params p = UNSLOTH_REDUCE_SCATTER_PARAMS_INIT;
  const float first = x[rank];
  p.comm = comm;
  p.x = f32_tensor(x, RANKS, -1, -1, -1);
  p.out = f32_tensor(&out, 1, -1, -1, -1);
  CHECK_OK(unsloth_reduce_scatter_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_reduce_scatter_forward(ctx, &p, NULL));
  CHECK(out == 3 * first && x[rank] == first);
  p.out.data = &x[rank];
  p.op = UNSLOTH_REDUCE_OP_AVG;
  CHECK_OK(unsloth_reduce_scatter_forward(ctx, &p, NULL));
  CHECK(x[rank] == first);
  p.op = 7;
  CHECK_FAILS(unsloth_reduce_scatter_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "reduce_scatter: op is 7, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)");
}

int main(void) { return on_every_rank(run); }
