// Rows from every rank to every rank: one each, and different numbers.
#include "ranks.h"

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float x[2 * RANKS], out[2 * RANKS] = {0};
  int64_t send[RANKS], receive[RANKS];
  unsloth_all_to_all_params p = UNSLOTH_ALL_TO_ALL_PARAMS_INIT;
  for (int i = 0; i < 2 * RANKS; i++) x[i] = (float)(10 * rank + i);
  p.comm = comm;
  p.x = f32_tensor(x, RANKS, -1, -1, -1);
  p.out = f32_tensor(out, RANKS, -1, -1, -1);
  CHECK_OK(unsloth_all_to_all_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_all_to_all_forward(ctx, &p, NULL));
  for (int i = 0; i < RANKS; i++) CHECK(out[i] == (float)(10 * i + rank));

  // As many for a rank as its number.
  for (int i = 0; i < RANKS; i++) {
    send[i] = i;
    receive[i] = rank;
  }
  p.send_counts = send;
  p.receive_counts = receive;
  p.out = f32_tensor(out, RANKS * rank, -1, -1, -1);
  CHECK_OK(unsloth_all_to_all_forward(ctx, &p, NULL));
  for (int i = 0; i < RANKS * rank; i++)
    CHECK(out[i] == (float)(10 * (i / rank) + rank * (rank - 1) / 2 + i % rank));
  send[0] = -1;
  CHECK_FAILS(unsloth_all_to_all_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "all_to_all: send_counts has -1 for rank 0, allowed: 0 to 3");
}

int main(void) { return on_every_rank(run); }
