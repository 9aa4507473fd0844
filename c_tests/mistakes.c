// Mistakes that callers make: each is refused in words that help, or is none.
#include "check.h"

enum { TOKENS = 6, HIDDEN = 16, HEADS = 4, KV_HEADS = 2, DIM = 8 };

#define INVALID UNSLOTH_STATUS_INVALID_ARGUMENT

static void norms(const test_device *device) {
  float x[TOKENS][DIM] = {{1}};
  unsloth_rms_norm_params p = UNSLOTH_RMS_NORM_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, DIM, -1, -1);
  CHECK_FAILS(unsloth_rms_norm_forward(device->ctx, &p, NULL), INVALID,
              "rms_norm: epsilon is 0, it must be above 0");
  p.epsilon = 1e-5f;
  p.weight_offset = 1;
  CHECK_FAILS(unsloth_rms_norm_forward(device->ctx, &p, NULL), INVALID,
              "rms_norm: weight_offset is 1, without a weight it must be 0");
}

static void products(const test_device *device) {
  float x[TOKENS][HIDDEN] = {{1}}, matrix[HIDDEN][DIM] = {{1}}, out[TOKENS][DIM];
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.x = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.weight = f32_tensor(PUT(device, matrix), HIDDEN, DIM, -1, -1);
  p.out = f32_tensor(PUT(device, out), TOKENS, DIM, -1, -1);
  CHECK_FAILS(unsloth_linear_forward(device->ctx, &p, NULL), INVALID,
              "linear: weight has shape [16, 8], expected [8, 16] = [out_features, in_features]; "
              "looks transposed");
  // A residual whose rank was forgotten is not left out in silence.
  p.weight = f32_tensor(p.weight.data, DIM, HIDDEN, -1, -1);
  p.residual.data = p.out.data;
  CHECK_FAILS(unsloth_linear_forward(device->ctx, &p, NULL), INVALID,
              "linear: residual has data but rank 0, allowed: 1 to 6");

  unsloth_mlp_params mlp = UNSLOTH_MLP_PARAMS_INIT;
  mlp.x = p.x;
  mlp.gate_weight = mlp.up_weight = p.weight;
  mlp.down_weight = f32_tensor(p.weight.data, HIDDEN, DIM, -1, -1);
  mlp.out = p.x;
  mlp.residual.data = p.x.data;
  CHECK_FAILS(unsloth_mlp_forward(device->ctx, &mlp, NULL), INVALID,
              "mlp: residual has data but rank 0, allowed: 1 to 6");
}

static void attention(const test_device *device) {
  float x[TOKENS * HEADS * DIM], out[TOKENS * HEADS * DIM], again[TOKENS * HEADS * DIM];
  const int32_t starts[3] = {0, 2, TOKENS};
  fill_random(x, COUNT(x), 1);
  void *const there = PUT(device, x), *const out_there = PUT(device, out);
  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  p.q = f32_tensor(there, 1, HEADS, TOKENS - 1, DIM);
  p.k = p.v = f32_tensor(there, 1, KV_HEADS, TOKENS, DIM);
  p.out = f32_tensor(out_there, 1, HEADS, TOKENS - 1, DIM);
  CHECK_FAILS(unsloth_attention_supported(device->ctx, &p, NULL), INVALID,
              "attention: q has 5 heads, a multiple of the 6 of k is needed: the layout is [batch, "
              "seq, heads, dim], and these look like [batch, heads, seq, dim]");
  p.q = f32_tensor(there, 1, TOKENS, HEADS, DIM);
  p.k = f32_tensor(there, TOKENS, KV_HEADS, DIM, -1);
  CHECK_FAILS(
      unsloth_attention_supported(device->ctx, &p, NULL), INVALID,
      "attention: k has rank 3, allowed: 4, because keys are batched: cu_seqlens_k is absent");

  // Bounds of sequence lengths may be loose, as those of engines that round them up.
  p.q = f32_tensor(there, TOKENS, HEADS, DIM, -1);
  p.k = p.v = f32_tensor(there, TOKENS, KV_HEADS, DIM, -1);
  p.out = f32_tensor(out_there, TOKENS, HEADS, DIM, -1);
  p.cu_seqlens_q = tensor(PUT(device, starts), UNSLOTH_DTYPE_I32, 3, -1, -1, -1);
  p.cu_seqlens_k = p.cu_seqlens_q;
  for (int64_t bound = TOKENS; bound < 3000; bound += 1024) {
    p.max_seqlen_q = p.max_seqlen_k = bound;
    CHECK_OK(unsloth_attention_workspace_size(device->ctx, &p, &p.workspace_size));
    p.workspace = NULL;
    if (p.workspace_size > 0)
      CHECK_OK(unsloth_memory_alloc(device->ctx, p.workspace_size, &p.workspace));
    CHECK_OK(unsloth_attention_forward(device->ctx, &p, NULL));
    GET(device, again, out_there);
    if (bound == TOKENS) memcpy(out, again, sizeof out);
    CHECK(memcmp(out, again, sizeof out) == 0);
  }
}

static void blocks(const test_device *device) {
  float x[TOKENS][HIDDEN], qkv[(HEADS + 2 * KV_HEADS) * DIM][HIDDEN], o[HIDDEN][HEADS * DIM];
  float gains[DIM];
  int32_t places[TOKENS] = {0};
  fill_random(&x[0][0], TOKENS * HIDDEN, 1);
  fill_random(&qkv[0][0], sizeof qkv / sizeof(float), 2);
  fill_random(&o[0][0], sizeof o / sizeof(float), 3);
  fill_random(gains, DIM, 4);
  unsloth_attention_block_params p = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  p.x = p.out = f32_tensor(PUT(device, x), TOKENS, HIDDEN, -1, -1);
  p.qkv_weight = f32_tensor(PUT(device, qkv), (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, -1, -1);
  p.out_weight = f32_tensor(PUT(device, o), HIDDEN, HEADS * DIM, -1, -1);
  p.q_norm = p.k_norm = f32_tensor(PUT(device, gains), DIM, -1, -1, -1);
  p.rotate = 1;
  CHECK_FAILS(unsloth_attention_block_supported(device->ctx, &p, NULL), INVALID,
              "attention_block: num_heads is 0 (not set), allowed: 1 to 1048576");
  p.num_heads = HEADS;
  p.num_kv_heads = KV_HEADS;
  p.head_dim = DIM;
  CHECK_FAILS(unsloth_attention_block_supported(device->ctx, &p, NULL), INVALID,
              "attention_block: norm_epsilon is 0, it must be above 0");
  p.norm_epsilon = 1e-5f;
  CHECK_OK(unsloth_attention_block_supported(device->ctx, &p, NULL));
  p.residual.data = p.x.data;
  CHECK_FAILS(unsloth_attention_block_supported(device->ctx, &p, NULL), INVALID,
              "attention_block: residual has data but rank 0, allowed: 1 to 6");
  p.residual.data = NULL;

  // A cache has its own positions.
  unsloth_kv_cache_params shape = UNSLOTH_KV_CACHE_PARAMS_INIT;
  unsloth_attention_params prepared = UNSLOTH_ATTENTION_PARAMS_INIT;
  const int64_t tokens = TOKENS;
  int64_t sequence;
  shape.dtype = UNSLOTH_DTYPE_F32;
  shape.num_layers = 1;
  shape.num_kv_heads = KV_HEADS;
  shape.head_dim = DIM;
  shape.num_pages = 4;
  CHECK_OK(unsloth_kv_cache_create(device->ctx, &shape, &p.cache));
  CHECK_FAILS(unsloth_kv_cache_attention_prepare(p.cache, 0, &prepared), INVALID,
              "kv_cache_attention_prepare: cache has no current batch: it must be extended first, "
              "and again after its sequences changed");
  CHECK_FAILS(unsloth_kv_cache_attention_prepare(p.cache, 1, &prepared), INVALID,
              "kv_cache_attention_prepare: layer is 1, the cache has 1 layers");
  CHECK_OK(unsloth_kv_cache_sequence_create(p.cache, &sequence));
  CHECK_OK(unsloth_kv_cache_extend(p.cache, &sequence, &tokens, 1, NULL));
  p.position_offset = 3;
  CHECK_FAILS(unsloth_attention_block_supported(device->ctx, &p, NULL), INVALID,
              "attention_block: position_offset is set: a cache has its own positions");
  p.position_offset = 0;
  p.positions = tensor(PUT(device, places), UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  CHECK_FAILS(unsloth_attention_block_supported(device->ctx, &p, NULL), INVALID,
              "attention_block: positions are there: a cache has its own");
  CHECK_OK(unsloth_kv_cache_destroy(p.cache));
}

static void run(const test_device *device) {
  norms(device);
  products(device);
  attention(device);
  blocks(device);
}

int main(void) { return on_every_device(run); }
