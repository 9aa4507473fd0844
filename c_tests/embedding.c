// Embedding: rows by id; ids outside the table are refused where the host reads them, and give NaN
// on a GPU.
#include "check.h"

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float table[3][2] = {{0, 1}, {10, 11}, {20, 21}}, out[3][2] = {{0}};
  int64_t ids[3] = {2, 0, 2};
  void *there = PUT(device, out);
  unsloth_embedding_params p = UNSLOTH_EMBEDDING_PARAMS_INIT;
  p.table = f32_tensor(PUT(device, table), 3, 2, -1, -1);
  p.ids = tensor(PUT(device, ids), UNSLOTH_DTYPE_I64, 3, -1, -1, -1);
  p.out = f32_tensor(there, 3, 2, -1, -1);
  CHECK_OK(unsloth_embedding_forward(ctx, &p, NULL));
  GET(device, out, there);
  for (int i = 0; i < 3; i++) {
    CHECK(out[i][0] == table[ids[i]][0]);
    CHECK(out[i][1] == table[ids[i]][1]);
  }

  ids[0] = 1;
  ids[2] = 3;
  p.ids.data = PUT(device, ids);
  if (device->is_cpu) {
    CHECK_FAILS(unsloth_embedding_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
                "embedding: ids has 3 at index 2, the table has 3 rows");
    GET(device, out, there);
    CHECK(out[0][0] == table[2][0]);
  } else {
    CHECK_OK(unsloth_embedding_forward(ctx, &p, NULL));
    GET(device, out, there);
    CHECK(out[0][0] == table[1][0] && isnan(out[2][0]) && isnan(out[2][1]));
  }
  p.ids.dtype = UNSLOTH_DTYPE_F32;
  CHECK_FAILS(unsloth_embedding_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "embedding: ids has dtype f32, allowed: i32, i64");
}

// The gradient of the table: written, then added to.
static void run_backward(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  float dout[4][2] = {{1, 2}, {10, 20}, {100, 200}, {7, 7}}, dweight[4][2];
  const float expected[4][2] = {{10, 20}, {0, 0}, {101, 202}, {0, 0}};
  int64_t ids[4] = {2, 0, 2, 3};
  memset(dweight, 0xff, sizeof dweight);
  void *there = PUT(device, dweight);
  unsloth_embedding_backward_params p = UNSLOTH_EMBEDDING_BACKWARD_PARAMS_INIT;
  p.dout = f32_tensor(PUT(device, dout), 4, 2, -1, -1);
  p.ids = tensor(PUT(device, ids), UNSLOTH_DTYPE_I64, 4, -1, -1, -1);
  p.dweight = f32_tensor(there, 4, 2, -1, -1);
  p.has_padding_idx = 1;
  p.padding_idx = 3;
  if (!served(device, unsloth_embedding_backward_supported(ctx, &p, NULL))) return;
  CHECK_OK(unsloth_embedding_backward_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  for (int times = 1; times <= 2; times++) {
    CHECK_OK(unsloth_embedding_backward(ctx, &p, NULL));
    GET(device, dweight, there);
    for (int row = 0; row < 4; row++) {
      for (int i = 0; i < 2; i++) CHECK(dweight[row][i] == (float)times * expected[row][i]);
    }
    p.accumulate = 1;
  }
  p.padding_idx = 4;
  CHECK_FAILS(unsloth_embedding_backward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "embedding_backward: padding_idx is 4, dweight has 4 rows");
  CHECK_OK(unsloth_memory_free(ctx, p.workspace));
}

static void both(const test_device *device) {
  run(device);
  run_backward(device);
}

int main(void) { return on_every_device(both); }
