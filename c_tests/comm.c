// Groups: an id, a group of one rank, what it tells of itself, its end; arguments that are refused.
#include "check.h"

// Memory of the group: zero, counted as the context's, and freed once.
static void memory(unsloth_context *ctx, unsloth_comm *comm) {
  unsloth_memory_stats before = UNSLOTH_MEMORY_STATS_INIT, with = UNSLOTH_MEMORY_STATS_INIT;
  void *ptr = NULL, *none = NULL;
  CHECK_OK(unsloth_memory_stats_get(ctx, &before));
  CHECK_OK(unsloth_comm_memory_alloc(comm, 1000, &ptr));
  CHECK_OK(unsloth_comm_memory_alloc(comm, 0, &none));
  CHECK(none != NULL && none != ptr && (uintptr_t)ptr % 256 == 0);
  for (int i = 0; i < 1000; i++) CHECK(((char *)ptr)[i] == 0);
  CHECK_OK(unsloth_memory_stats_get(ctx, &with));
  CHECK(with.in_use == before.in_use + 1000);
  CHECK(with.num_allocations == before.num_allocations + 2);
  CHECK_OK(unsloth_comm_memory_free(comm, ptr));
  CHECK_OK(unsloth_memory_stats_get(ctx, &with));
  CHECK(with.in_use == before.in_use);
  CHECK_STATUS(unsloth_comm_memory_free(comm, ptr), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_STATUS(unsloth_memory_free(ctx, none), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_OK(unsloth_comm_memory_free(comm, NULL));
  CHECK_STATUS(unsloth_comm_memory_alloc(comm, SIZE_MAX, &ptr), UNSLOTH_STATUS_OUT_OF_MEMORY);
  CHECK_OK(unsloth_memory_limit_set(ctx, with.in_use + 64));
  CHECK_STATUS(unsloth_comm_memory_alloc(comm, 65, &ptr), UNSLOTH_STATUS_OUT_OF_MEMORY);
  CHECK_OK(unsloth_memory_limit_set(ctx, 0));
  // `none` is freed with the group.
}

int main(void) {
  unsloth_context *ctx = cpu_context();
  unsloth_comm_id_params of_id = UNSLOTH_COMM_ID_PARAMS_INIT;
  unsloth_comm_params p = UNSLOTH_COMM_PARAMS_INIT;
  unsloth_comm_info info = UNSLOTH_COMM_INFO_INIT;
  unsloth_comm *comm = NULL;
  unsloth_comm_id other;
  CHECK_OK(unsloth_comm_id_create(&of_id, &p.id));
  CHECK_OK(unsloth_comm_id_create(&of_id, &other));
  CHECK(memcmp(&other, &p.id, sizeof other) != 0);
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "comm_create: size is 0, allowed: 1 to 1024");
  p.size = 2;
  p.timeout_ms = 10;
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_COMM_ERROR,
              "comm_create: comm is broken: rank 0 waited 10ms in comm_create for rank 1");
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "comm_create: id has served: a group takes a new one");
  CHECK(comm == NULL);
  p.size = 1;
  p.id = other;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  CHECK_OK(unsloth_comm_info_get(comm, &info));
  CHECK(info.kind == UNSLOTH_COMM_KIND_LOCAL && info.rank == 0 && info.size == 1);
  CHECK_OK(unsloth_comm_warm_up(comm, NULL));
  CHECK_OK(unsloth_comm_error_get(comm));
  memory(ctx, comm);
  // It outlives its context.
  CHECK_OK(unsloth_context_destroy(ctx));
  CHECK_OK(unsloth_comm_warm_up(comm, NULL));
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_FAILS(unsloth_comm_error_get(comm), UNSLOTH_STATUS_COMM_ERROR,
              "comm_error_get: comm is broken: rank 0 aborted it");
  CHECK_FAILS(unsloth_comm_warm_up(comm, NULL), UNSLOTH_STATUS_COMM_ERROR,
              "comm_warm_up: comm is broken: rank 0 aborted it");
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK_STATUS(unsloth_comm_destroy(comm), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_OK(unsloth_comm_destroy(NULL));
  return 0;
}
