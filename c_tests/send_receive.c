// A ring, and a transfer between two of three ranks.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float x = (float)rank, out = -1;
  unsloth_send_receive_params p = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  p.comm = comm;
  p.to = (rank + 1) % RANKS;
  p.from = (rank + RANKS - 1) % RANKS;
  p.x = f32_tensor(&x, 1, -1, -1, -1);
  p.out = f32_tensor(&out, 1, -1, -1, -1);
  CHECK_OK(unsloth_send_receive_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_send_receive_forward(ctx, &p, NULL));
  CHECK(out == (float)p.from);

  memset(rank == 0 ? &p.out : &p.x, 0, sizeof p.x);
  p.to = 2;
  p.from = 0;
  if (rank != 1) CHECK_OK(unsloth_send_receive_forward(ctx, &p, NULL));
  CHECK(out == (rank == 2 ? 0 : (float)((rank + RANKS - 1) % RANKS)));
  p.to = p.from = RANKS;
  CHECK_STATUS(unsloth_send_receive_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_rank(run); }
