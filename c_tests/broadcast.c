// What one rank has, for all; the root may have it apart or in place.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float x[2] = {3, 4}, out[2] = {0};
  unsloth_broadcast_params p = UNSLOTH_BROADCAST_PARAMS_INIT;
  p.comm = comm;
  p.root = 1;
  if (rank == 1) p.x = f32_tensor(x, 2, -1, -1, -1);
  p.out = f32_tensor(out, 2, -1, -1, -1);
  CHECK_OK(unsloth_broadcast_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_broadcast_forward(ctx, &p, NULL));
  CHECK(out[0] == 3 && out[1] == 4);
  memset(&p.x, 0, sizeof p.x);
  out[0] = (float)rank;
  p.root = 2;
  CHECK_OK(unsloth_broadcast_forward(ctx, &p, NULL));
  CHECK(out[0] == 2);
  p.root = RANKS;
  CHECK_FAILS(unsloth_broadcast_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "broadcast: root is 3, allowed: 0 to 2");
}

int main(void) { return on_every_rank(run); }
