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

int main(void) { return on_every_device(run); }
