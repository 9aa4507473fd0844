// What ranks send each other as it is, beside an NCCL that is none: in windows one call that copy
// engines may serve, and sums of a rank's rows by an exchange and a launch of this library's.
#include "collective.h"

enum { ROWS = 8, DIM = 64 };

static void join(void) {
  unsloth_comm_params p = of_group();
  begin();
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
}

// In memory that the group gives, or elsewhere.
static unsloth_tensor rows(int in_group, int64_t count, int64_t dim) {
  void *data = NULL;
  if (!in_group) return make(UNSLOTH_DTYPE_BF16, count, dim);
  CHECK_OK(unsloth_comm_memory_alloc(comm, 1 << 20, &data));
  return tensor(data, UNSLOTH_DTYPE_BF16, count, dim, -1, -1);
}

static unsloth_all_reduce_rms_norm_params normalised(int x_in_group, int out_in_group,
                                                     int64_t dim) {
  unsloth_all_reduce_rms_norm_params p = UNSLOTH_ALL_REDUCE_RMS_NORM_PARAMS_INIT;
  p.comm = comm;
  p.sequence = 1;
  p.epsilon = 1e-5f;
  p.x = rows(x_in_group, ROWS, dim);
  p.out = rows(out_in_group, ROWS, dim);
  p.residual = make(UNSLOTH_DTYPE_BF16, ROWS / SIZE, dim);
  return p;
}

// The calls of NCCL, with one launch between them, which follow each other on one stream.
static void takes(unsloth_all_reduce_rms_norm_params p, const char *first) {
  const size_t count = (size_t)(ROWS / SIZE * p.x.shape[1]);
  const int exchanges = strcmp(first, "ncclAlltoAll") == 0;
  void *const own = byte(p.out, RANK * count * 2);
  begin();
  CHECK_OK(unsloth_all_reduce_rms_norm_forward(ctx, &p, stream));
  CHECK(driver.launches == 1 && nccl.num_calls == 2);
  CHECK(allocations == 0 && driver.copies == 0 && driver.others == 0);
  check_call(0, first, p.x.data, exchanges ? p.out.data : own, count,
             exchanges ? FLOAT16 : BFLOAT16, exchanges ? -1 : SUM, -1);
  check_call(1, "ncclAllGather", own, p.out.data, count, FLOAT16, -1, -1);
  CHECK(nccl.calls[0].stream == stream && nccl.calls[1].stream == stream);
}

static void sums(void) {
  unsloth_all_reduce_rms_norm_params p;
  join();
  takes(normalised(1, 1, DIM), "ncclAlltoAll");
  // Rows of 32 KiB are the longest.
  takes(normalised(1, 1, 16384), "ncclAlltoAll");
  takes(normalised(1, 1, 16392), "ncclReduceScatter");
  takes(normalised(1, 1, 60), "ncclReduceScatter");
  takes(normalised(1, 0, DIM), "ncclReduceScatter");
  takes(normalised(0, 1, DIM), "ncclReduceScatter");
  p = normalised(1, 1, DIM);
  p.out = p.x;
  takes(p, "ncclReduceScatter");
  // No rows, of nobody.
  p = normalised(1, 1, DIM);
  p.x.shape[0] = p.out.shape[0] = p.residual.shape[0] = 0;
  begin();
  CHECK_OK(unsloth_all_reduce_rms_norm_forward(ctx, &p, stream));
  CHECK(driver.launches == 0 && nccl.num_calls == 0);
  p.x.shape[0] = p.out.shape[0] = 6;
  CHECK_FAILS(unsloth_all_reduce_rms_norm_forward(ctx, &p, stream), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "all_reduce_rms_norm: x has 6 rows, which 4 ranks do not share evenly");
  CHECK_OK(unsloth_comm_destroy(comm));
}

// Copy engines refuse the default stream of old: the group's own stream has the call, between
// forks.
static void moves(void) {
  const unsloth_stream given = stream;
  unsloth_all_to_all_params p = UNSLOTH_ALL_TO_ALL_PARAMS_INIT;
  join();
  p.comm = comm;
  p.x = rows(1, ROWS, DIM);
  p.out = rows(1, ROWS, DIM);
  begin();
  CHECK_OK(unsloth_all_to_all_forward(ctx, &p, stream));
  end(1, 0);
  check_call(0, "ncclAlltoAll", p.x.data, p.out.data, ROWS / SIZE * DIM, FLOAT16, -1, -1);
  begin();
  nccl.told = driver_step;
  CHECK_OK(unsloth_all_to_all_forward(ctx, &p, NULL));
  nccl.told = NULL;
  CHECK(nccl.num_calls == 1 && nccl.calls[0].stream != NULL && nccl.calls[0].stream != given);
  CHECK(driver.num_steps == 5);
  for (int i = 0; i < 5; i++) CHECK(driver.steps[i].what == "RWNRW"[i]);
  CHECK(driver.steps[0].stream == NULL && driver.steps[4].stream == NULL);
  // Elsewhere it is sends and receipts, on the caller's stream.
  p.out = rows(0, ROWS, DIM);
  begin();
  CHECK_OK(unsloth_all_to_all_forward(ctx, &p, NULL));
  CHECK(nccl.num_calls == 2 * SIZE && nccl.groups == 1 && nccl.calls[0].stream == NULL);
  CHECK_OK(unsloth_comm_destroy(comm));
}

// Blocks of NCCL's are left out where it knows how, and only there.
static void policies(void) {
  const int version = nccl.version;
  nccl.policy = 0;
  join();
  CHECK(nccl.policy == 2);
  CHECK_OK(unsloth_comm_destroy(comm));
  nccl.version = 22703;
  nccl.policy = 0;
  join();
  CHECK(nccl.policy == 0);
  takes(normalised(1, 1, DIM), "ncclReduceScatter");
  CHECK_OK(unsloth_comm_destroy(comm));
  nccl.version = version;
}

static void all(void) {
  sums();
  moves();
  policies();
}

int main(void) { return with_context(all); }
