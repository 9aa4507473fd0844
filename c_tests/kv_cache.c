// The KV cache: two sequences grow side by side, fork, are cut and evicted from; attention straight
// from it.
#include "check.h"

enum { LAYERS = 2, HEADS = 2, DIM = 8, PAGE = 4, PAGES = 6 };

static unsloth_kv_cache *caches[2];

static unsloth_kv_cache_stats stats_of(unsloth_kv_cache *cache) {
  unsloth_kv_cache_stats stats = UNSLOTH_KV_CACHE_STATS_INIT;
  CHECK_OK(unsloth_kv_cache_stats_get(cache, &stats));
  return stats;
}

static unsloth_kv_cache_sequence_info info_of(unsloth_kv_cache *cache, int64_t sequence) {
  unsloth_kv_cache_sequence_info info = UNSLOTH_KV_CACHE_SEQUENCE_INFO_INIT;
  CHECK_OK(unsloth_kv_cache_sequence_info_get(cache, sequence, &info));
  return info;
}

// Appends the batch's tokens to every layer; k of token t is first + t in every component, v its
// negative.
static void append(const test_device *device, unsloth_kv_cache *cache, int64_t num_tokens,
                   float first) {
  float k[16 * HEADS * DIM], v[16 * HEADS * DIM];
  const size_t size = (size_t)num_tokens * HEADS * DIM * sizeof *k;
  for (int64_t i = 0; i < num_tokens * HEADS * DIM; i++) {
    k[i] = first + (float)(i / (HEADS * DIM));
    v[i] = -k[i];
  }
  unsloth_kv_cache_append_params p = UNSLOTH_KV_CACHE_APPEND_PARAMS_INIT;
  p.k = f32_tensor(put(device, k, size), num_tokens, HEADS, DIM, -1);
  p.v = f32_tensor(put(device, v, size), num_tokens, HEADS, DIM, -1);
  for (p.layer = 0; p.layer < LAYERS; p.layer++) CHECK_OK(unsloth_kv_cache_append(cache, &p, NULL));
  CHECK_OK(unsloth_stream_synchronize(device->ctx, NULL));
  CHECK_OK(unsloth_memory_free(device->ctx, p.k.data));
  CHECK_OK(unsloth_memory_free(device->ctx, p.v.data));
}

// The first component of the key that a sequence holds at an index.
static float key_at(const test_device *device, unsloth_kv_cache *cache, int64_t layer,
                    int64_t sequence, int index) {
  float key = NAN;
  int32_t pages[PAGES];
  size_t num_pages = 0;
  unsloth_tensor k, v;
  CHECK_OK(unsloth_kv_cache_layer_get(cache, layer, &k, &v));
  CHECK_OK(unsloth_kv_cache_sequence_pages_get(cache, sequence, pages, PAGES, &num_pages));
  CHECK(index / PAGE < (int)num_pages);
  get(device, &key,
      (float *)k.data + pages[index / PAGE] * k.strides[0] + index % PAGE * k.strides[1],
      sizeof key);
  return key;
}

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_kv_cache *cache = NULL;
  unsloth_kv_cache_params p = UNSLOTH_KV_CACHE_PARAMS_INIT;
  p.dtype = UNSLOTH_DTYPE_F32;
  p.num_layers = LAYERS;
  p.num_kv_heads = HEADS;
  p.head_dim = DIM;
  p.page_size = PAGE;
  p.num_pages = PAGES;

  unsloth_kv_cache_memory memory = UNSLOTH_KV_CACHE_MEMORY_INIT;
  CHECK_OK(unsloth_kv_cache_memory_estimate(&p, &memory));
  CHECK_OK(unsloth_kv_cache_create(ctx, &p, &cache));
  unsloth_memory_stats used = UNSLOTH_MEMORY_STATS_INIT;
  CHECK_OK(unsloth_memory_stats_get(ctx, &used));
  CHECK(used.in_use == memory.total && stats_of(cache).total_bytes == memory.total);

  // A prompt of 6 tokens and one of 3, in one batch.
  int64_t ids[2] = {0, 0};
  CHECK_OK(unsloth_kv_cache_sequence_create(cache, &ids[0]));
  CHECK_OK(unsloth_kv_cache_sequence_create(cache, &ids[1]));
  const int64_t counts[2] = {6, 3};
  CHECK_OK(unsloth_kv_cache_extend(cache, ids, counts, 2, NULL));
  append(device, cache, 9, 1);
  CHECK(key_at(device, cache, 0, ids[0], 5) == 6 && key_at(device, cache, 1, ids[1], 0) == 7);
  CHECK(stats_of(cache).num_used_pages == 3);
  CHECK_NEAR(stats_of(cache).fragmentation, 0.25, 1e-12);

  unsloth_kv_cache_batch batch = UNSLOTH_KV_CACHE_BATCH_INIT;
  CHECK_OK(unsloth_kv_cache_batch_get(cache, &batch));
  CHECK(batch.num_tokens == 9 && batch.max_query_length == 6 && batch.max_sequence_length == 6);
  CHECK(batch.host_seq_lens[1] == 3 && batch.host_cu_seqlens[2] == 9 &&
        batch.host_positions[8] == 2);
  const int64_t row = batch.block_table.shape[1];
  CHECK(batch.host_block_table[1] == 1 && batch.host_block_table[row] == 2);
  int32_t positions[9];
  GET(device, positions, batch.positions.data);
  CHECK(memcmp(batch.host_positions, positions, sizeof positions) == 0);

  // Attention over one key per sequence position: the average of the values that a token sees.
  static float q[9 * HEADS * DIM], out[9 * HEADS * DIM];
  unsloth_attention_params a = UNSLOTH_ATTENTION_PARAMS_INIT;
  CHECK_OK(unsloth_kv_cache_attention_prepare(cache, 1, &a));
  void *there = PUT(device, out);
  a.q = f32_tensor(PUT(device, q), 9, HEADS, DIM, -1);
  a.out = f32_tensor(there, 9, HEADS, DIM, -1);
  if (served(device, unsloth_attention_supported(ctx, &a, NULL))) {
    CHECK_OK(unsloth_attention_workspace_size(ctx, &a, &a.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, a.workspace_size, &a.workspace));
    CHECK_OK(unsloth_attention_forward(ctx, &a, NULL));
    GET(device, out, there);
    CHECK_NEAR(out[5 * HEADS * DIM], -3.5, 1e-5);
    CHECK_NEAR(out[8 * HEADS * DIM], -8, 1e-5);
  }

  // A fork shares both pages until it writes to the second.
  int64_t fork = 0;
  CHECK_OK(unsloth_kv_cache_sequence_fork(cache, ids[0], &fork));
  CHECK(stats_of(cache).num_used_pages == 3 && stats_of(cache).num_shared_pages == 2);
  const int64_t one = 1;
  CHECK_OK(unsloth_kv_cache_extend(cache, &fork, &one, 1, NULL));
  append(device, cache, 1, 100);
  CHECK(stats_of(cache).num_used_pages == 4 && stats_of(cache).num_shared_pages == 1);
  CHECK(key_at(device, cache, 1, fork, 5) == 6 && key_at(device, cache, 1, fork, 6) == 100);
  CHECK(info_of(cache, ids[0]).length == 6 && info_of(cache, fork).length == 7);

  // Too long for the pages that are left: nothing changes.
  const int64_t many = 20;
  CHECK_FAILS(unsloth_kv_cache_extend(cache, &ids[1], &many, 1, NULL), UNSLOTH_STATUS_OUT_OF_PAGES,
              "kv_cache_extend: 5 pages are needed, 2 of 6 are free");
  CHECK(info_of(cache, ids[1]).length == 3);

  // The sink's page and the window's stay; positions go on.
  CHECK_OK(unsloth_kv_cache_sequence_free(cache, fork));
  CHECK_FAILS(unsloth_kv_cache_sequence_free(cache, fork), UNSLOTH_STATUS_INVALID_HANDLE,
              "kv_cache_sequence_free: sequence is not a live sequence handle (0x100000002)");
  CHECK_OK(unsloth_kv_cache_extend(cache, ids, &counts[0], 1, NULL));
  append(device, cache, 6, 7);
  int64_t evicted = 0;
  CHECK_OK(unsloth_kv_cache_sequence_evict(cache, ids[0], 1, 2, &evicted));
  CHECK(evicted == 4 && info_of(cache, ids[0]).length == 8 &&
        info_of(cache, ids[0]).position == 12);
  CHECK(key_at(device, cache, 0, ids[0], 3) == 4 && key_at(device, cache, 0, ids[0], 4) == 9);
  CHECK_OK(unsloth_kv_cache_sequence_truncate(cache, ids[0], 2));
  CHECK(info_of(cache, ids[0]).length == 2 && info_of(cache, ids[0]).num_pages == 1);

  caches[device->is_cpu] = cache;
}

int main(void) {
  on_every_device(run);
  // A cache outlives the handle of the context that it was made with.
  for (size_t i = 0; i < COUNT(caches); i++) {
    if (caches[i] == NULL) continue;
    CHECK_OK(unsloth_kv_cache_destroy(caches[i]));
    CHECK_STATUS(unsloth_kv_cache_destroy(caches[i]), UNSLOTH_STATUS_INVALID_HANDLE);
  }
  return 0;
}
