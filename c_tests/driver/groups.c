// Groups beside a driver and an NCCL that are none: whose library is taken, what is made, lent,
// ended and aborted, what old versions lack.
#include "collective.h"

// A group that is made here is ended here, or aborted.
static void made(void) {
  unsloth_comm_id_params of_id = UNSLOTH_COMM_ID_PARAMS_INIT;
  unsloth_comm_params p = of_group();
  unsloth_comm_info info = UNSLOTH_COMM_INFO_INIT;
  unsloth_all_reduce_params sum = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  of_id.kind = UNSLOTH_COMM_KIND_NCCL;
  // The library that the process has, which is this one.
  CHECK_OK(unsloth_comm_id_create(&of_id, &p.id));
  CHECK(p.id.bytes[0] == 0x5a && p.id.bytes[127] == 0x5a);
  of_id.library = "libnccl-of-nobody.so";
  CHECK_FAILS(unsloth_comm_id_create(&of_id, &p.id), UNSLOTH_STATUS_BACKEND_UNAVAILABLE,
              "comm_id_create: the nccl backend is unavailable: libnccl-of-nobody.so could not be "
              "loaded");
  nccl.fails = "ncclCommInitRank";
  nccl.status = 2;
  CHECK_STATUS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_COMM_ERROR);
  CHECK(comm == NULL);
  p.rank = SIZE;
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "comm_create: rank is 4, allowed: 0 to 3");
  p.rank = RANK;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  CHECK(nccl.made == 1 && nccl.made_size == SIZE && nccl.made_rank == RANK);
  CHECK(memcmp(nccl.made_id, &p.id, sizeof nccl.made_id) == 0);
  CHECK_OK(unsloth_comm_info_get(comm, &info));
  CHECK(info.kind == UNSLOTH_COMM_KIND_NCCL && info.rank == RANK && info.size == SIZE);
  CHECK(info.library_version == 22803);
  begin();
  CHECK_OK(unsloth_comm_warm_up(comm, stream));
  CHECK(nccl.num_calls == 1 && nccl.calls[0].count == 1 && nccl.calls[0].stream == stream);
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.destroyed == 1 && nccl.aborted == 0);

  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK(nccl.aborted == 1);
  sum.comm = comm;
  sum.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &sum, stream), UNSLOTH_STATUS_COMM_ERROR,
              "all_reduce: comm is broken: rank 1 aborted it");
  CHECK_STATUS(unsloth_comm_error_get(comm), UNSLOTH_STATUS_COMM_ERROR);
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.destroyed == 1 && nccl.aborted == 1);
}

// One that a program has is borrowed.
static void lent(void) {
  unsloth_comm_params p = UNSLOTH_COMM_PARAMS_INIT;
  unsloth_comm_info info = UNSLOTH_COMM_INFO_INIT;
  unsloth_all_reduce_params sum = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  p.kind = UNSLOTH_COMM_KIND_NCCL;
  p.nccl_comm = nccl_foreign;
  nccl.made = nccl.destroyed = nccl.aborted = 0;
  nccl.device = 3;
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "comm_create: nccl_comm is of device 3, ctx is of device 0");
  nccl.device = 0;
  nccl.fails = "ncclCommCount";
  nccl.status = 4;
  CHECK_STATUS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_COMM_ERROR);
  nccl.size = 7;
  nccl.rank = 5;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  CHECK_OK(unsloth_comm_info_get(comm, &info));
  CHECK(info.rank == 5 && info.size == 7);
  sum.comm = comm;
  sum.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  begin();
  CHECK_OK(unsloth_all_reduce_forward(ctx, &sum, stream));
  end(1, 0);
  // Who made it aborts it; this library leaves it alone from here on.
  CHECK_OK(unsloth_comm_abort(comm));
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &sum, stream), UNSLOTH_STATUS_COMM_ERROR,
              "all_reduce: comm is broken: rank 5 aborted it");
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK(nccl.made == 0 && nccl.destroyed == 0 && nccl.aborted == 0);
}

// What old versions lack is refused by its name.
static void versions(void) {
  unsloth_comm_params p = of_group();
  unsloth_all_reduce_params r = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  unsloth_send_receive_params s = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  unsloth_all_to_all_params a = UNSLOTH_ALL_TO_ALL_PARAMS_INIT;
  nccl.version = 2308;
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  r.comm = s.comm = a.comm = comm;
  CHECK_OK(unsloth_comm_error_get(comm));
  CHECK_FAILS(unsloth_comm_abort(comm), UNSLOTH_STATUS_UNSUPPORTED,
              "comm_abort: comm is of NCCL 2.3.8, which has no ncclCommAbort: 2.4 is needed");
  s.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  CHECK_FAILS(unsloth_send_receive_forward(ctx, &s, stream), UNSLOTH_STATUS_UNSUPPORTED,
              "send_receive: comm is of NCCL 2.3.8, which has no ncclSend: 2.7 is needed");
  a.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  a.out = make(UNSLOTH_DTYPE_F32, 8, -1);
  CHECK_STATUS(unsloth_all_to_all_supported(ctx, &a, NULL), UNSLOTH_STATUS_UNSUPPORTED);
  r.x = make(UNSLOTH_DTYPE_BF16, 8, -1);
  CHECK_FAILS(unsloth_all_reduce_supported(ctx, &r, NULL), UNSLOTH_STATUS_UNSUPPORTED,
              "all_reduce: x is bf16, comm is of NCCL 2.3.8: 2.10 is needed");
  r.x.dtype = UNSLOTH_DTYPE_F16;
  CHECK_OK(unsloth_all_reduce_forward(ctx, &r, stream));
  r.op = UNSLOTH_REDUCE_OP_AVG;
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &r, stream), UNSLOTH_STATUS_UNSUPPORTED,
              "all_reduce: op is avg, comm is of NCCL 2.3.8: 2.10 is needed");
  // It has no words of its own for what failed.
  r.op = UNSLOTH_REDUCE_OP_SUM;
  nccl.fails = "ncclAllReduce";
  nccl.status = 1;
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &r, stream), UNSLOTH_STATUS_COMM_ERROR,
              "all_reduce: comm failed: ncclAllReduce gave unhandled cuda error (1)");
  CHECK_OK(unsloth_comm_destroy(comm));
  nccl.version = 22803;
  p.user = NULL;
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_BACKEND_UNAVAILABLE,
              "comm_create: the nccl backend is unavailable: the library has no ncclGetVersion");
}

// A group is of its backend, and outlives its context.
static void contexts(void) {
  unsloth_context_params of_context = UNSLOTH_CONTEXT_PARAMS_INIT;
  unsloth_comm_params p = of_group();
  unsloth_context *other = NULL;
  p.kind = UNSLOTH_COMM_KIND_LOCAL;
  p.get_symbol = NULL;
  CHECK_FAILS(unsloth_comm_create(ctx, &p, &comm), UNSLOTH_STATUS_UNSUPPORTED,
              "comm_create: kind is local, which ctx of the cuda backend is not");
  p = of_group();
  of_context.backend = UNSLOTH_BACKEND_CUDA;
  CHECK_OK(unsloth_context_create(&of_context, &other));
  CHECK_OK(unsloth_comm_create(other, &p, &comm));
  CHECK_OK(unsloth_context_destroy(other));
  CHECK_OK(unsloth_comm_warm_up(comm, NULL));
  CHECK_OK(unsloth_comm_destroy(comm));
}

static void all(void) {
  made();
  lent();
  versions();
  contexts();
}

int main(void) { return with_context(all); }
