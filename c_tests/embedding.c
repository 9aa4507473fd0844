// Embedding: rows by id; ids outside the table are refused.
#include "check.h"

int main(void) {
  unsloth_context *ctx = cpu_context();
  float table[3][2] = {{0, 1}, {10, 11}, {20, 21}}, out[3][2] = {{0}};
  int64_t ids[3] = {2, 0, 2};
  unsloth_embedding_params p = UNSLOTH_EMBEDDING_PARAMS_INIT;
  p.table = f32_tensor(&table[0][0], 3, 2, -1, -1);
  p.ids = tensor(ids, UNSLOTH_DTYPE_I64, 3, -1, -1, -1);
  p.out = f32_tensor(&out[0][0], 3, 2, -1, -1);
  CHECK_OK(unsloth_embedding_forward(ctx, &p, NULL));
  for (int i = 0; i < 3; i++) {
    CHECK(out[i][0] == table[ids[i]][0]);
    CHECK(out[i][1] == table[ids[i]][1]);
  }

  out[0][0] = 7;
  ids[2] = 3;
  CHECK_FAILS(unsloth_embedding_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "embedding: ids has 3 at index 2, the table has 3 rows");
  CHECK(out[0][0] == 7);
  p.ids.dtype = UNSLOTH_DTYPE_F32;
  CHECK_FAILS(unsloth_embedding_supported(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "embedding: ids has dtype f32, allowed: i32, i64");
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
