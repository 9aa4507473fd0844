// Slots of a group beside an NCCL that is none: when ranks have them, what they take, and that a
// sum and its norm are one launch by them, and NCCL's sum and a norm without.
#include "collective.h"

static const float yes = 1, no = 0;
// Two halves, of each rank eight rows of 2048 lines of 16 bytes; and a number for each row.
enum { BYTES = 2 * SIZE * 8 * 2048 * 16 + 8 * 4 };

static uint64_t in_use(void) {
  unsloth_memory_stats stats = UNSLOTH_MEMORY_STATS_INIT;
  CHECK_OK(unsloth_memory_stats_get(ctx, &stats));
  return stats.in_use;
}

// A group whose other ranks say so, whenever all are asked.
static void join(const float *others) {
  unsloth_comm_params p = of_group();
  begin();
  nccl.unreached = -1;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  driver.said = others;
}

static unsloth_all_reduce_rms_norm_params rows(int64_t count, int64_t dim) {
  unsloth_all_reduce_rms_norm_params p = UNSLOTH_ALL_REDUCE_RMS_NORM_PARAMS_INIT;
  p.comm = comm;
  p.epsilon = 1e-5f;
  p.x = make(UNSLOTH_DTYPE_BF16, count, dim);
  p.out = make(UNSLOTH_DTYPE_BF16, count, dim);
  return p;
}

// So many launches of this library's and calls of NCCL's, and nothing else of the driver's.
static void takes(unsloth_all_reduce_rms_norm_params p, int launches, int calls) {
  begin();
  CHECK_OK(unsloth_all_reduce_rms_norm_forward(ctx, &p, stream));
  CHECK(driver.launches == launches && nccl.num_calls == calls);
  CHECK(allocations == 0 && driver.copies == 0 && driver.others == 0);
}

static void none_left(uint64_t before) {
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.memories == 0 && nccl.windows == 0 && in_use() == before);
}

static void made(void) {
  unsloth_all_reduce_rms_norm_params p;
  uint64_t before;
  join(&yes);
  before = in_use();
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.memories == 1 && nccl.windows == 1 && in_use() == before + BYTES);
  // They are made once.
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.memories == 1 && nccl.windows == 1 && in_use() == before + BYTES);
  p = rows(1, 64);
  takes(p, 1, 0);
  p.residual = p.out;
  p.out = p.x;
  takes(p, 1, 0);
  takes(rows(8, 8192), 1, 0);
  takes(rows(0, 64), 0, 0);
  // Too many, too long, and not of whole lines.
  takes(rows(9, 64), 1, 1);
  takes(rows(1, 8196), 1, 1);
  takes(rows(1, 6), 1, 1);
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.memories == 0 && nccl.windows == 0);
}

static void without(void) {
  const uint64_t before = in_use();
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.memories == 0 && nccl.windows == 0 && in_use() == before);
  takes(rows(1, 64), 1, 1);
  CHECK_OK(unsloth_comm_destroy(comm));
}

// None has slots where one does not; and a call goes on without.
static void refused(void) {
  const char *const fail[] = {"ncclMemAlloc", "ncclCommWindowRegister", "ncclGetPeerDevicePointer"};
  const int version = nccl.version;
  unsloth_memory_stats stats = UNSLOTH_MEMORY_STATS_INIT;
  join(&no);
  without();
  nccl.version = 22803;
  join(&yes);
  without();
  nccl.version = version;
  for (size_t i = 0; i < sizeof fail / sizeof *fail; i++) {
    join(&yes);
    nccl.status = 1;
    nccl.fails = fail[i];
    without();
  }
  join(&yes);
  nccl.unreached = SIZE - 1;
  without();
  join(&yes);
  CHECK_OK(unsloth_memory_stats_get(ctx, &stats));
  CHECK_OK(unsloth_memory_limit_set(ctx, stats.in_use + BYTES - 1));
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.memories == 0);
  CHECK_OK(unsloth_memory_limit_set(ctx, UINT64_MAX));
  CHECK_OK(unsloth_comm_destroy(comm));
}

// All are asked twice behind the first sum; what was made till then is freed.
static void broken(void) {
  for (int asked = 0; asked < 2; asked++) {
    const uint64_t before = in_use();
    join(&yes);
    nccl.status = 6;
    nccl.spared = 1 + asked;
    nccl.fails = "ncclAllReduce";
    CHECK_STATUS(unsloth_comm_warm_up(comm, stream), UNSLOTH_STATUS_COMM_ERROR);
    CHECK(nccl.fails == NULL);
    none_left(before);
  }
}

// What a program lends gets its window back, and may be aborted here while its owner has not done
// so.
static void lent(void) {
  const uint64_t before = in_use();
  unsloth_comm_params p = of_group();
  unsloth_all_reduce_rms_norm_params call;
  begin();
  p.nccl_comm = nccl_foreign;
  nccl.size = SIZE;
  nccl.rank = RANK;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  driver.said = &yes;
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.windows == 1);
  none_left(before);
  begin();
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  driver.said = &yes;
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  call = rows(1, 64);
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_FAILS(unsloth_all_reduce_rms_norm_forward(ctx, &call, stream), UNSLOTH_STATUS_COMM_ERROR,
              "all_reduce_rms_norm: comm is broken: rank 1 aborted it");
  CHECK_OK(unsloth_comm_destroy(comm));
  // Its owner ends the window with the communicator.
  CHECK(nccl.memories == 0 && nccl.windows == 1 && nccl.aborted == 0);
  nccl.windows = 0;
}

static void all(void) {
  nccl.version = 22903;
  made();
  refused();
  broken();
  lent();
}

int main(void) { return with_context(all); }
