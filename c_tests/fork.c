// A child of `fork` has its parent's handles and not its threads: calls with them are refused
// there, the child makes its own, and the parent goes on. Python's multiprocessing comes to this.
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

// In place: 3 and 4 over the root of their mean square.
static unsloth_status normalise(unsloth_context *ctx) {
  float x[2] = {3, 4};
  unsloth_rms_norm_params p = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_status status;
  p.x = UNSLOTH_TENSOR(x, UNSLOTH_DTYPE_F32, 2);
  p.epsilon = 1e-6f;
  status = unsloth_rms_norm_forward(ctx, &p, NULL);
  if (status == UNSLOTH_STATUS_SUCCESS) CHECK_NEAR(x[0], 0.848528, 1e-5);
  return status;
}

static unsloth_kv_cache *small_cache(unsloth_context *ctx) {
  unsloth_kv_cache_params params = UNSLOTH_KV_CACHE_PARAMS_INIT;
  unsloth_kv_cache *cache = NULL;
  params.dtype = UNSLOTH_DTYPE_F32;
  params.num_layers = 1;
  params.num_kv_heads = 1;
  params.head_dim = 4;
  params.num_pages = 1;
  CHECK_OK(unsloth_kv_cache_create(ctx, &params, &cache));
  return cache;
}

// A group of one rank.
static unsloth_status group(unsloth_context *ctx, const unsloth_comm_id *id, unsloth_comm **comm) {
  unsloth_comm_params params = UNSLOTH_COMM_PARAMS_INIT;
  params.size = 1;
  params.id = *id;
  return unsloth_comm_create(ctx, &params, comm);
}

static unsloth_comm_id new_id(void) {
  unsloth_comm_id_params params = UNSLOTH_COMM_ID_PARAMS_INIT;
  unsloth_comm_id id;
  CHECK_OK(unsloth_comm_id_create(&params, &id));
  return id;
}

static void groups_in_the_child(unsloth_context *own, unsloth_comm *parents,
                                const unsloth_comm_id *parents_id) {
  const unsloth_comm_id id = new_id();
  unsloth_comm *comm = NULL;
  CHECK_STATUS(unsloth_comm_warm_up(parents, NULL), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_STATUS(unsloth_comm_destroy(parents), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_STATUS(group(own, parents_id, &comm), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_OK(group(own, &id, &comm));
  CHECK_OK(unsloth_comm_warm_up(comm, NULL));
  CHECK_OK(unsloth_comm_destroy(comm));
}

static void in_the_child(unsloth_context *parents, unsloth_kv_cache *parents_cache,
                         unsloth_comm *parents_comm, const unsloth_comm_id *parents_id) {
  char message[1024];
  int64_t sequence = 0;
  unsloth_context *own;
  unsloth_kv_cache *own_cache;

  CHECK_STATUS(normalise(parents), UNSLOTH_STATUS_INVALID_HANDLE);
  unsloth_last_error_message(message, sizeof message);
  CHECK(strstr(message, "forked") != NULL);
  CHECK_STATUS(unsloth_kv_cache_sequence_create(parents_cache, &sequence),
               UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_STATUS(unsloth_kv_cache_destroy(parents_cache), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_STATUS(unsloth_context_destroy(parents), UNSLOTH_STATUS_INVALID_HANDLE);

  own = cpu_context();
  CHECK(own != parents);
  CHECK_OK(normalise(own));
  groups_in_the_child(own, parents_comm, parents_id);
  own_cache = small_cache(own);
  CHECK_OK(unsloth_kv_cache_sequence_create(own_cache, &sequence));
  CHECK_STATUS(normalise(parents), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_OK(unsloth_kv_cache_destroy(own_cache));
  CHECK_OK(unsloth_context_destroy(own));
}

int main(void) {
  unsloth_context *ctx = cpu_context();
  unsloth_kv_cache *cache = small_cache(ctx);
  const unsloth_comm_id id = new_id(), unused = new_id();
  unsloth_comm *comm = NULL;
  int status = -1;
  CHECK_OK(normalise(ctx));
  CHECK_OK(group(ctx, &id, &comm));
  for (int round = 0; round < 3; round++) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      in_the_child(ctx, cache, comm, &unused);
      _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(normalise(ctx));
    CHECK_OK(unsloth_comm_warm_up(comm, NULL));
  }
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK_OK(unsloth_kv_cache_destroy(cache));
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
