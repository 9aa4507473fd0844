// A feed-forward block and a linear layer that ranks divide, against those of one rank.
#include "ranks.h"

enum { ROWS = 6, HIDDEN = 8, INTERMEDIATE = 12 };

static float x[ROWS * HIDDEN], gate[INTERMEDIATE * HIDDEN], up[INTERMEDIATE * HIDDEN];
static float down[HIDDEN * INTERMEDIATE], bias[HIDDEN];

// The block of all weights, on one rank.
static void expect(unsloth_context *ctx, float *out) {
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.x = f32_tensor(x, ROWS, HIDDEN, -1, -1);
  p.gate_weight = f32_tensor(gate, INTERMEDIATE, HIDDEN, -1, -1);
  p.up_weight = f32_tensor(up, INTERMEDIATE, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(down, HIDDEN, INTERMEDIATE, -1, -1);
  p.down_bias = f32_tensor(bias, HIDDEN, -1, -1, -1);
  p.residual = p.x;
  p.out = f32_tensor(out, ROWS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float expected[ROWS * HIDDEN], out[ROWS * HIDDEN];
  unsloth_shard shard = UNSLOTH_SHARD_INIT;
  unsloth_shard_params of = UNSLOTH_SHARD_PARAMS_INIT;
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  expect(ctx, expected);
  of.dtype = UNSLOTH_DTYPE_F32;
  of.rank = rank;
  of.size = RANKS;
  of.rows = INTERMEDIATE;
  of.columns = HIDDEN;
  CHECK_OK(unsloth_shard_get(&of, &shard));
  // This rank's rows of gate and up, and columns of down, where they lie.
  const int64_t first = shard.pieces[0].row;
  p.parallel.comm = comm;
  p.x = f32_tensor(x, ROWS, HIDDEN, -1, -1);
  p.gate_weight = f32_tensor(gate + first * HIDDEN, shard.rows, HIDDEN, -1, -1);
  p.up_weight = f32_tensor(up + first * HIDDEN, shard.rows, HIDDEN, -1, -1);
  p.down_weight = f32_tensor(down + first, HIDDEN, shard.rows, -1, -1);
  p.down_weight.strides[0] = INTERMEDIATE;
  p.down_weight.strides[1] = 1;
  p.down_bias = f32_tensor(bias, HIDDEN, -1, -1, -1);
  p.residual = p.x;
  p.out = f32_tensor(out, ROWS, HIDDEN, -1, -1);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  for (int i = 0; i < ROWS * HIDDEN; i++) CHECK_NEAR(out[i], expected[i], 1e-4);

  // Sequence parallel: this rank's rows.
  const int own = ROWS / RANKS;
  p.parallel.sequence = 1;
  p.x = f32_tensor(x + rank * own * HIDDEN, own, HIDDEN, -1, -1);
  p.residual = p.x;
  p.out = f32_tensor(out, own, HIDDEN, -1, -1);
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  CHECK_OK(unsloth_mlp_forward(ctx, &p, NULL));
  for (int i = 0; i < own * HIDDEN; i++) {
    CHECK_NEAR(out[i], expected[rank * own * HIDDEN + i], 1e-4);
  }
  p.parallel.partition = UNSLOTH_PARTITION_ROW;
  CHECK_FAILS(unsloth_mlp_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "mlp: partition is 1, allowed of a block: 0");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

int main(void) {
  fill_random(x, ROWS * HIDDEN, 1);
  fill_random(gate, INTERMEDIATE * HIDDEN, 2);
  fill_random(up, INTERMEDIATE * HIDDEN, 3);
  fill_random(down, HIDDEN * INTERMEDIATE, 4);
  fill_random(bias, HIDDEN, 5);
  return on_every_rank(run);
}
