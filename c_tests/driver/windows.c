// Memory of a group beside an NCCL that is none: what is registered, and that all of it ends,
// whatever fails and in whatever order.
#include "collective.h"

enum { PAGE = 4096 };

static void join(void) {
  unsloth_comm_params p = of_group();
  begin();
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
}

static uint64_t in_use(void) {
  unsloth_memory_stats stats = UNSLOTH_MEMORY_STATS_INIT;
  CHECK_OK(unsloth_memory_stats_get(ctx, &stats));
  return stats.in_use;
}

static void none_left(uint64_t before) {
  CHECK(nccl.memories == 0 && nccl.windows == 0 && in_use() == before);
}

// Whole pages of it are registered, and the bytes that were asked for are counted.
static void registered(void) {
  const uint64_t before = in_use();
  void *first = NULL, *second = NULL;
  join();
  CHECK_OK(unsloth_comm_memory_alloc(comm, 1, &first));
  CHECK(nccl.memories == 1 && nccl.windows == 1 && nccl.registered == PAGE);
  CHECK_OK(unsloth_comm_memory_alloc(comm, PAGE + 1, &second));
  CHECK(nccl.memories == 2 && nccl.windows == 2 && nccl.registered == 2 * PAGE);
  CHECK(in_use() == before + PAGE + 2);
  CHECK_OK(unsloth_comm_memory_free(comm, first));
  CHECK(nccl.memories == 1 && nccl.windows == 1 && in_use() == before + PAGE + 1);
  CHECK_STATUS(unsloth_comm_memory_free(comm, first), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_STATUS(unsloth_memory_free(ctx, second), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_STATUS(unsloth_comm_memory_alloc(comm, SIZE_MAX, &first), UNSLOTH_STATUS_INVALID_ARGUMENT);
  // The rest ends with the group.
  CHECK_OK(unsloth_comm_destroy(comm));
  none_left(before);
}

static void failures(void) {
  const uint64_t before = in_use();
  void *ptr = NULL;
  join();
  nccl.status = 1;
  nccl.fails = "ncclMemAlloc";
  CHECK_FAILS(unsloth_comm_memory_alloc(comm, 64, &ptr), UNSLOTH_STATUS_COMM_ERROR,
              "comm_memory_alloc: comm failed: ncclMemAlloc gave unhandled cuda error (1): the "
              "words of the library");
  none_left(before);
  nccl.fails = "ncclCommWindowRegister";
  CHECK_STATUS(unsloth_comm_memory_alloc(comm, 64, &ptr), UNSLOTH_STATUS_COMM_ERROR);
  CHECK(ptr == NULL);
  none_left(before);
  // What fails at its end is gone all the same.
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &ptr));
  nccl.fails = "ncclCommWindowDeregister";
  CHECK_STATUS(unsloth_comm_memory_free(comm, ptr), UNSLOTH_STATUS_COMM_ERROR);
  none_left(before);
  // An abort takes windows along, and not the memory.
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &ptr));
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_STATUS(unsloth_comm_memory_alloc(comm, 64, &ptr), UNSLOTH_STATUS_COMM_ERROR);
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.memories == 0 && nccl.windows == 1 && in_use() == before);
  nccl.windows = 0;
}

// A communicator of the program's gets its windows back.
static void lent(void) {
  const uint64_t before = in_use();
  unsloth_comm_params p = of_group();
  void *ptr = NULL;
  p.nccl_comm = nccl_foreign;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &ptr));
  CHECK(nccl.windows == 1);
  CHECK_OK(unsloth_comm_destroy(comm));
  none_left(before);
}

// What has no windows gives memory of the device.
static void old(void) {
  const uint64_t before = in_use();
  void *ptr = NULL;
  nccl.version = 22608;
  join();
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &ptr));
  CHECK(ptr != NULL && nccl.memories == 0 && in_use() == before + 64);
  CHECK_OK(unsloth_comm_memory_free(comm, ptr));
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &ptr));
  CHECK_OK(unsloth_comm_destroy(comm));
  none_left(before);
}

static void all(void) {
  registered();
  failures();
  lent();
  old();
}

int main(void) { return with_context(all); }
