// Threads make, use and destroy contexts and caches through the same places, so that most destroy
// what others use: every call either does what it is asked or says that the handle is not live.
#include <pthread.h>

#include "check.h"

enum { PLACES = 2, MAKERS = 2, USERS = 2, ROUNDS = 200 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsloth_context *contexts[PLACES];
static unsloth_kv_cache *caches[PLACES];
static int done;

static unsloth_context *small_context(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  unsloth_context *ctx = NULL;
  params.num_threads = 1;
  CHECK_OK(unsloth_context_create(&params, &ctx));
  return ctx;
}

static unsloth_kv_cache *small_cache(unsloth_context *ctx) {
  unsloth_kv_cache_params params = UNSLOTH_KV_CACHE_PARAMS_INIT;
  unsloth_kv_cache *cache = NULL;
  params.dtype = UNSLOTH_DTYPE_F32;
  params.num_layers = 1;
  params.num_kv_heads = 1;
  params.head_dim = 4;
  params.num_pages = 4;
  CHECK_OK(unsloth_kv_cache_create(ctx, &params, &cache));
  return cache;
}

static void *make(void *unused) {
  for (int round = 0; round < ROUNDS; round++) {
    unsloth_context *ctx = small_context(), *old;
    unsloth_kv_cache *cache = small_cache(ctx), *old_cache;
    const int at = round % PLACES;
    pthread_mutex_lock(&lock);
    old = contexts[at];
    old_cache = caches[at];
    contexts[at] = ctx;
    caches[at] = cache;
    pthread_mutex_unlock(&lock);
    // Outside the lock: others are inside calls with them. The context goes before its cache.
    CHECK_OK(unsloth_context_destroy(old));
    CHECK_OK(unsloth_kv_cache_destroy(old_cache));
    if (old == NULL) continue;
    CHECK_STATUS(unsloth_context_destroy(old), UNSLOTH_STATUS_INVALID_HANDLE);
  }
  return unused;
}

static int is_expected(unsloth_status status) {
  return status == UNSLOTH_STATUS_SUCCESS || status == UNSLOTH_STATUS_INVALID_HANDLE;
}

static void *use(void *unused) {
  float x[64];
  for (int round = 0, stop = 0; !stop; round++) {
    unsloth_rms_norm_params p = UNSLOTH_RMS_NORM_PARAMS_INIT;
    unsloth_kv_cache_stats stats = UNSLOTH_KV_CACHE_STATS_INIT;
    unsloth_context *ctx;
    unsloth_kv_cache *cache;
    int64_t sequence = 0;
    void *memory = NULL;
    pthread_mutex_lock(&lock);
    ctx = contexts[round % PLACES];
    cache = caches[round % PLACES];
    stop = done;
    pthread_mutex_unlock(&lock);
    if (ctx == NULL) continue;

    for (size_t i = 0; i < COUNT(x); i++) x[i] = 2;
    p.x = UNSLOTH_TENSOR(x, UNSLOTH_DTYPE_F32, 2, 32);
    p.epsilon = 1e-6f;
    const unsloth_status status = unsloth_rms_norm_forward(ctx, &p, NULL);
    CHECK(is_expected(status));
    CHECK_NEAR(x[63], status == UNSLOTH_STATUS_SUCCESS ? 1 : 2, 1e-5);
    CHECK(is_expected(unsloth_memory_alloc(ctx, 64, &memory)));

    const unsloth_status made = unsloth_kv_cache_sequence_create(cache, &sequence);
    CHECK(is_expected(made));
    CHECK(is_expected(unsloth_kv_cache_stats_get(cache, &stats)));
    // The sequence has gone with its cache, or is freed here.
    if (made == UNSLOTH_STATUS_SUCCESS)
      CHECK(is_expected(unsloth_kv_cache_sequence_free(cache, sequence)));
  }
  return unused;
}

int main(void) {
  pthread_t makers[MAKERS], users[USERS];
  for (int i = 0; i < USERS; i++) CHECK(pthread_create(&users[i], NULL, use, NULL) == 0);
  for (int i = 0; i < MAKERS; i++) CHECK(pthread_create(&makers[i], NULL, make, NULL) == 0);
  for (int i = 0; i < MAKERS; i++) CHECK(pthread_join(makers[i], NULL) == 0);
  pthread_mutex_lock(&lock);
  done = 1;
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < USERS; i++) CHECK(pthread_join(users[i], NULL) == 0);
  for (int i = 0; i < PLACES; i++) {
    CHECK_OK(unsloth_kv_cache_destroy(caches[i]));
    CHECK_OK(unsloth_context_destroy(contexts[i]));
  }
  return 0;
}
