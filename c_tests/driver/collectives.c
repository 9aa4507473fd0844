// Collectives on CUDA, beside a driver and an NCCL that are none: what each asks of NCCL, and that
// it asks the driver for nothing and the host for no memory; and what fails.
#include "collective.h"

static void reductions(void) {
  static const struct {
    unsloth_dtype dtype;
    int expected;
  } dtypes[] = {{UNSLOTH_DTYPE_F32, FLOAT32},   {UNSLOTH_DTYPE_F16, FLOAT16},
                {UNSLOTH_DTYPE_BF16, BFLOAT16}, {UNSLOTH_DTYPE_I32, INT32},
                {UNSLOTH_DTYPE_I64, INT64},     {UNSLOTH_DTYPE_I8, INT8}};
  static const int ops[] = {SUM, AVG, MAX, MIN, PROD};
  const int64_t counts[SIZE] = {1, 2, 0, 5};
  unsloth_all_reduce_params p = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  unsloth_reduce_scatter_params s = UNSLOTH_REDUCE_SCATTER_PARAMS_INIT;
  unsloth_implementation implementation = 0;
  p.comm = s.comm = comm;
  for (size_t i = 0; i < COUNT(dtypes); i++) {
    for (size_t op = 0; op < COUNT(ops); op++) {
      if (ops[op] == AVG && i > 2) continue;
      p.op = (unsloth_reduce_op)op;
      p.x = make(dtypes[i].dtype, 8, 3);
      p.out = make(dtypes[i].dtype, 8, 3);
      CHECK_OK(unsloth_all_reduce_supported(ctx, &p, &implementation));
      CHECK(implementation == UNSLOTH_IMPLEMENTATION_CUDA);
      begin();
      CHECK_OK(unsloth_all_reduce_forward(ctx, &p, stream));
      end(1, 0);
      check_call(0, "ncclAllReduce", p.x.data, p.out.data, 24, dtypes[i].expected, ops[op], -1);
    }
  }
  p.out = p.x;
  begin();
  CHECK_OK(unsloth_all_reduce_forward(ctx, &p, stream));
  check_call(0, "ncclAllReduce", p.x.data, p.x.data, 24, INT8, PROD, -1);
  p.x.shape[0] = p.out.shape[0] = 0;
  begin();
  CHECK_OK(unsloth_all_reduce_forward(ctx, &p, stream));
  end(0, 0);

  s.op = UNSLOTH_REDUCE_OP_AVG;
  s.x = make(UNSLOTH_DTYPE_BF16, 8, 3);
  s.out = make(UNSLOTH_DTYPE_BF16, 2, 3);
  begin();
  CHECK_OK(unsloth_reduce_scatter_forward(ctx, &s, stream));
  end(1, 0);
  check_call(0, "ncclReduceScatter", s.x.data, s.out.data, 6, BFLOAT16, AVG, -1);
  // In place: the rank's rows.
  s.out.data = byte(s.x, 2 * 3 * 2);
  begin();
  CHECK_OK(unsloth_reduce_scatter_forward(ctx, &s, stream));
  check_call(0, "ncclReduceScatter", s.x.data, byte(s.x, 12), 6, BFLOAT16, AVG, -1);
  // By counts: a reduction to each rank that has rows, in one group.
  s.counts = counts;
  s.out = make(UNSLOTH_DTYPE_BF16, 2, 3);
  begin();
  CHECK_OK(unsloth_reduce_scatter_forward(ctx, &s, stream));
  end(3, 1);
  check_call(0, "ncclReduce", s.x.data, s.x.data, 3, BFLOAT16, AVG, 0);
  check_call(1, "ncclReduce", byte(s.x, 6), s.out.data, 6, BFLOAT16, AVG, 1);
  check_call(2, "ncclReduce", byte(s.x, 18), byte(s.x, 18), 15, BFLOAT16, AVG, 3);
}

static void gathers(void) {
  const int64_t counts[SIZE] = {1, 2, 0, 5};
  unsloth_all_gather_params p = UNSLOTH_ALL_GATHER_PARAMS_INIT;
  p.comm = comm;
  p.x = make(UNSLOTH_DTYPE_BF16, 2, 3);
  p.out = make(UNSLOTH_DTYPE_BF16, 8, 3);
  CHECK_OK(unsloth_all_gather_supported(ctx, &p, NULL));
  begin();
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, stream));
  end(1, 0);
  // What is moved is of any dtype of its size.
  check_call(0, "ncclAllGather", p.x.data, p.out.data, 6, FLOAT16, -1, -1);
  p.x.data = byte(p.out, 12);
  begin();
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, stream));
  check_call(0, "ncclAllGather", byte(p.out, 12), p.out.data, 6, FLOAT16, -1, -1);
  p.counts = counts;
  p.x = make(UNSLOTH_DTYPE_BF16, 2, 3);
  begin();
  CHECK_OK(unsloth_all_gather_forward(ctx, &p, stream));
  end(3, 1);
  check_call(0, "ncclBroadcast", p.out.data, p.out.data, 3, FLOAT16, -1, 0);
  check_call(1, "ncclBroadcast", p.x.data, byte(p.out, 6), 6, FLOAT16, -1, 1);
  check_call(2, "ncclBroadcast", byte(p.out, 18), byte(p.out, 18), 15, FLOAT16, -1, 3);
}

static void moves(void) {
  const int64_t send[SIZE] = {1, 0, 3, 0}, receive[SIZE] = {0, 0, 2, 1};
  unsloth_broadcast_params b = UNSLOTH_BROADCAST_PARAMS_INIT;
  unsloth_all_to_all_params a = UNSLOTH_ALL_TO_ALL_PARAMS_INIT;
  unsloth_send_receive_params s = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  b.comm = a.comm = s.comm = comm;
  b.root = 3;
  b.out = make(UNSLOTH_DTYPE_I64, 5, 2);
  CHECK_OK(unsloth_broadcast_supported(ctx, &b, NULL));
  begin();
  CHECK_OK(unsloth_broadcast_forward(ctx, &b, stream));
  end(1, 0);
  check_call(0, "ncclBroadcast", b.out.data, b.out.data, 10, INT64, -1, 3);
  b.root = RANK;
  b.x = make(UNSLOTH_DTYPE_I64, 5, 2);
  begin();
  CHECK_OK(unsloth_broadcast_forward(ctx, &b, stream));
  check_call(0, "ncclBroadcast", b.x.data, b.out.data, 10, INT64, -1, 1);

  a.x = make(UNSLOTH_DTYPE_F32, 4, 3);
  a.out = make(UNSLOTH_DTYPE_F32, 4, 3);
  CHECK_OK(unsloth_all_to_all_supported(ctx, &a, NULL));
  begin();
  CHECK_OK(unsloth_all_to_all_forward(ctx, &a, stream));
  end(2 * SIZE, 1);
  for (int i = 0; i < SIZE; i++) {
    const size_t at = (size_t)i * 12;
    check_call(2 * i, "ncclSend", byte(a.x, at), NULL, 3, INT32, -1, i);
    check_call(2 * i + 1, "ncclRecv", NULL, byte(a.out, at), 3, INT32, -1, i);
  }
  a.out = make(UNSLOTH_DTYPE_F32, 3, 3);
  a.send_counts = send;
  a.receive_counts = receive;
  begin();
  CHECK_OK(unsloth_all_to_all_forward(ctx, &a, stream));
  end(4, 1);
  check_call(0, "ncclSend", a.x.data, NULL, 3, INT32, -1, 0);
  check_call(1, "ncclSend", byte(a.x, 12), NULL, 9, INT32, -1, 2);
  check_call(2, "ncclRecv", NULL, a.out.data, 6, INT32, -1, 2);
  check_call(3, "ncclRecv", NULL, byte(a.out, 24), 3, INT32, -1, 3);

  s.x = make(UNSLOTH_DTYPE_BOOL, 7, -1);
  s.out = make(UNSLOTH_DTYPE_F16, 5, -1);
  s.to = 2;
  s.from = 0;
  CHECK_OK(unsloth_send_receive_supported(ctx, &s, NULL));
  begin();
  CHECK_OK(unsloth_send_receive_forward(ctx, &s, stream));
  end(2, 1);
  check_call(0, "ncclSend", s.x.data, NULL, 7, INT8, -1, 2);
  check_call(1, "ncclRecv", NULL, s.out.data, 5, FLOAT16, -1, 0);
  memset(&s.x, 0, sizeof s.x);
  begin();
  CHECK_OK(unsloth_send_receive_forward(ctx, &s, stream));
  end(1, 1);
}

// A call that fails ends its group; what fails later is asked for.
static void failures(void) {
  unsloth_all_reduce_params p = UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  unsloth_send_receive_params s = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  p.comm = s.comm = comm;
  p.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  nccl.fails = "ncclAllReduce";
  nccl.status = 1;
  CHECK_FAILS(unsloth_all_reduce_forward(ctx, &p, stream), UNSLOTH_STATUS_COMM_ERROR,
              "all_reduce: comm failed: ncclAllReduce gave unhandled cuda error (1): "
              "the words of the library");
  s.x = make(UNSLOTH_DTYPE_F32, 8, -1);
  s.to = 2;
  nccl.fails = "ncclSend";
  nccl.status = 2;
  CHECK_FAILS(unsloth_send_receive_forward(ctx, &s, stream), UNSLOTH_STATUS_COMM_ERROR,
              "send_receive: comm failed: ncclSend gave unhandled system error (2): "
              "the words of the library");
  CHECK(nccl.depth == 0);
  nccl.fails = "ncclGroupEnd";
  CHECK_STATUS(unsloth_send_receive_forward(ctx, &s, stream), UNSLOTH_STATUS_COMM_ERROR);
  CHECK_OK(unsloth_send_receive_forward(ctx, &s, stream));
  CHECK_OK(unsloth_comm_error_get(comm));
  nccl.async_status = 7;
  CHECK_OK(unsloth_comm_error_get(comm));
  nccl.async_status = 6;
  CHECK_FAILS(unsloth_comm_error_get(comm), UNSLOTH_STATUS_COMM_ERROR,
              "comm_error_get: comm failed: an earlier collective gave remote process exited or "
              "there was a network error (6): the words of the library");
  nccl.async_status = 0;
}

static void all(void) {
  reductions();
  gathers();
  moves();
  failures();
}

static void in_a_group(void) { with_group(all); }

int main(void) { return with_context(in_a_group); }
