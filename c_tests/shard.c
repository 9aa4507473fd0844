// What a rank holds of a matrix: packed projections, blocks, a padded vocabulary.
#include "check.h"

static unsloth_shard part(const unsloth_shard_params *p) {
  unsloth_shard shard = UNSLOTH_SHARD_INIT;
  CHECK_OK(unsloth_shard_get(p, &shard));
  return shard;
}

int main(void) {
  unsloth_shard shard = UNSLOTH_SHARD_INIT;
  unsloth_shard_params p = UNSLOTH_SHARD_PARAMS_INIT;
  p.kind = UNSLOTH_SHARD_KIND_QKV;
  p.dtype = UNSLOTH_DTYPE_BF16;
  p.rank = 1;
  p.size = 2;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = 8;
  p.rows = 64;
  p.columns = 32;
  shard = part(&p);
  CHECK(shard.num_pieces == 3 && shard.rows == 32 && shard.columns == 32);
  CHECK(shard.num_heads == 2 && shard.num_kv_heads == 1 && shard.first_kv_head == 1);
  CHECK(shard.pieces[0].row == 16 && shard.pieces[0].rows == 16 && shard.pieces[0].to_row == 0);
  CHECK(shard.pieces[1].row == 40 && shard.pieces[1].rows == 8 && shard.pieces[1].to_row == 16);
  CHECK(shard.pieces[2].row == 56 && shard.pieces[2].rows == 8 && shard.pieces[2].to_row == 24);

  // Three blocks of 256 among two ranks.
  p.kind = UNSLOTH_SHARD_KIND_ROW;
  p.dtype = UNSLOTH_DTYPE_Q4_K;
  p.columns = 768;
  shard = part(&p);
  CHECK(shard.num_pieces == 1 && shard.rows == 64 && shard.columns == 256);
  CHECK(shard.pieces[0].column == 512 && shard.pieces[0].columns == 256);

  p.kind = UNSLOTH_SHARD_KIND_VOCABULARY;
  p.dtype = UNSLOTH_DTYPE_F32;
  p.rows = 101;
  p.unit = 8;
  shard = part(&p);
  CHECK(shard.rows == 56 && shard.pieces[0].row == 56 && shard.pieces[0].rows == 45);

  p.rank = 2;
  shard.num_pieces = 77;
  CHECK_FAILS(unsloth_shard_get(&p, &shard), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "shard_get: rank is 2, allowed: 0 to 1");
  CHECK(shard.num_pieces == 77);
  return 0;
}
