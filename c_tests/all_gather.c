// Rows of all ranks: as many of each, in place, and different numbers.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  const int64_t counts[RANKS] = {2, 0, 1};
  float x[2] = {(float)rank, (float)(10 * rank)}, out[2 * RANKS];
  unsloth_all_gather_params p = UNSLOTH_ALL_GATHER_PARAMS_INIT;
  p.comm = comm;
  p.x = f32_tensor(x, 1, 2, -1, -1);
  p.out = f32_tensor(out, RANKS, 2, -1, -1);
  CHECK_OK(unsloth_all_gather_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, NULL));
  for (int i = 0; i < RANKS; i++)
    CHECK(out[2 * i] == (float)i && out[2 * i + 1] == (float)(10 * i));

  memset(out, 0, sizeof out);
  out[2 * rank] = (float)(7 + rank);
  p.x.data = &out[2 * rank];
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, NULL));
  for (int i = 0; i < RANKS; i++) CHECK(out[2 * i] == (float)(7 + i));

  p.counts = counts;
  p.x = f32_tensor(x, counts[rank], -1, -1, -1);
  p.out = f32_tensor(out, 3, -1, -1, -1);
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, NULL));
  CHECK(out[0] == 0 && out[1] == 0 && out[2] == 2);
  p.x.shape[0] = 5;
  CHECK_STATUS(unsloth_all_gather_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
}

int main(void) { return on_every_rank(run); }
