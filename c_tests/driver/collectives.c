// Collectives on CUDA, beside a driver and an NCCL that are none: what each asks of NCCL, and that
// it asks the driver for nothing and the host for no memory; whose library is taken; versions,
// failures, ends.
#include "allocations.h"
#include "check.h"
#include "driver.h"
#include "nccl.h"

enum { SKIPPED = 77 };
enum { INT8 = 0, INT32 = 2, INT64 = 4, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };
enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3, AVG = 4 };
enum { SIZE = 4, RANK = 1 };

static unsloth_context *ctx;
static unsloth_comm *comm;
static unsloth_stream stream;

// At an address that nothing is at.
static unsloth_tensor make(unsloth_dtype dtype, int64_t d0, int64_t d1) {
  void *data = NULL;
  CHECK_OK(unsloth_memory_alloc(ctx, 1 << 20, &data));
  return tensor(data, dtype, d0, d1, -1, -1);
}

static void begin(void) {
  allocations = nccl.num_calls = nccl.groups = 0;
  memset(&driver, 0, sizeof driver);
}

// As many calls of NCCL, in a group or not, and none of the driver.
static void end(int calls, int groups) {
  CHECK(allocations == 0);
  CHECK(nccl.num_calls == calls && nccl.groups == groups && nccl.depth == 0);
  CHECK(driver.launches == 0 && driver.copies == 0 && driver.others == 0);
  for (int i = 0; i < calls; i++) {
    CHECK(nccl.calls[i].stream == stream && nccl.calls[i].depth == groups);
  }
}

static void check_call(int at, const char *name, const void *x, const void *out, size_t count,
                       int dtype, int op, int peer) {
  const nccl_call *c = &nccl.calls[at];
  if (strcmp(c->name, name) == 0 && c->x == x && c->out == out && c->count == count &&
      c->dtype == dtype && c->op == op && c->peer == peer)
    return;
  fprintf(stderr, "%s of %zu, dtype %d, op %d, peer %d, not %s of %zu, dtype %d, op %d, peer %d\n",
          c->name, c->count, c->dtype, c->op, c->peer, name, count, dtype, op, peer);
  exit(1);
}

static char *byte(unsloth_tensor t, size_t offset) { return (char *)t.data + offset; }

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

// Layers that ranks divide launch their kernels and one collective, and ask for nothing else.
static void end_divided(const char *name, const void *out, size_t count) {
  CHECK(allocations == 0);
  CHECK(nccl.num_calls == 1 && nccl.groups == 0 && nccl.calls[0].stream == stream);
  CHECK(driver.launches > 0 && driver.copies == 0 && driver.others == 0);
  CHECK(strcmp(nccl.calls[0].name, name) == 0 && nccl.calls[0].count == count);
  CHECK(out == NULL || nccl.calls[0].out == out);
}

static void divided(void) {
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  unsloth_linear_backward_params b = UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  p.parallel.comm = comm;
  p.parallel.partition = UNSLOTH_PARTITION_ROW;
  p.x = make(UNSLOTH_DTYPE_BF16, 8, 16);
  p.weight = make(UNSLOTH_DTYPE_BF16, 3, 16);
  p.residual = make(UNSLOTH_DTYPE_BF16, 8, 3);
  p.out = make(UNSLOTH_DTYPE_BF16, 8, 3);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  end_divided("ncclAllReduce", p.out.data, 24);
  CHECK(nccl.calls[0].dtype == BFLOAT16 && nccl.calls[0].op == SUM);
  // Of two rows each the residual is added to this rank's.
  p.parallel.sequence = 1;
  p.residual = make(UNSLOTH_DTYPE_BF16, 2, 3);
  p.out = make(UNSLOTH_DTYPE_BF16, 2, 3);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  end_divided("ncclReduceScatter", p.out.data, 6);
  p.parallel.partition = UNSLOTH_PARTITION_COLUMN;
  memset(&p.residual, 0, sizeof p.residual);
  p.x = make(UNSLOTH_DTYPE_BF16, 2, 16);
  p.out = make(UNSLOTH_DTYPE_BF16, 8, 3);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  end_divided("ncclAllGather", p.workspace, 32);

  b.parallel.comm = comm;
  b.dout = make(UNSLOTH_DTYPE_BF16, 8, 3);
  b.weight = p.weight;
  b.dx = make(UNSLOTH_DTYPE_BF16, 8, 16);
  CHECK_OK(unsloth_linear_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
  begin();
  CHECK_OK(unsloth_linear_backward(ctx, &b, stream));
  end_divided("ncclAllReduce", b.dx.data, 128);
}

// Attention over divided sequences: as many exchanges as tensors, each a group, and kernels.
static void end_exchanges(int exchanges) {
  CHECK(allocations == 0);
  CHECK(nccl.num_calls == exchanges * 2 * SIZE && nccl.groups == exchanges);
  CHECK(driver.launches > exchanges && driver.copies == 0 && driver.others == 0);
}

static unsloth_tensor make4(int64_t batch, int64_t tokens, int64_t heads, int64_t dim) {
  unsloth_tensor t = make(UNSLOTH_DTYPE_F16, 1, -1);
  const int64_t shape[4] = {batch, tokens, heads, dim};
  t.rank = 4;
  memcpy(t.shape, shape, sizeof shape);
  return t;
}

static void divided_sequences(void) {
  unsloth_context_parallel_attention_params p = UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
  unsloth_context_parallel_attention_backward_params b =
      UNSLOTH_CONTEXT_PARALLEL_ATTENTION_BACKWARD_PARAMS_INIT;
  p.comm = b.comm = comm;
  p.causal = b.causal = 1;
  p.q = b.q = make4(2, 5, 2 * SIZE, 64);
  p.k = b.k = make4(2, 5, SIZE, 64);
  p.v = b.v = make4(2, 5, SIZE, 64);
  p.out = b.out = make4(2, 5, 2 * SIZE, 64);
  b.dout = make4(2, 5, 2 * SIZE, 64);
  b.dq = make4(2, 5, 2 * SIZE, 64);
  b.dk = make4(2, 5, SIZE, 64);
  b.dv = make4(2, 5, SIZE, 64);
  p.lse = make(UNSLOTH_DTYPE_F32, 2, 2 * SIZE);
  p.lse.rank = 3;
  p.lse.shape[2] = 5;
  b.lse = p.lse;
  CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_context_parallel_attention_forward(ctx, &p, stream));
  end_exchanges(5);
  CHECK_OK(unsloth_context_parallel_attention_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
  begin();
  CHECK_OK(unsloth_context_parallel_attention_backward(ctx, &b, stream));
  end_exchanges(9);

  // Keys and values are gathered, and the gradients of all tokens' added up.
  p.method = b.method = UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
  CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_context_parallel_attention_forward(ctx, &p, stream));
  CHECK(allocations == 0 && nccl.num_calls == 2 && nccl.groups == 1);
  check_call(0, "ncclAllGather", p.k.data, nccl.calls[0].out, 2 * 5 * SIZE * 64, FLOAT16, -1, -1);
  check_call(1, "ncclAllGather", p.v.data, nccl.calls[1].out, 2 * 5 * SIZE * 64, FLOAT16, -1, -1);
  CHECK_OK(unsloth_context_parallel_attention_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
  begin();
  CHECK_OK(unsloth_context_parallel_attention_backward(ctx, &b, stream));
  CHECK(allocations == 0 && nccl.num_calls == 4 && nccl.groups == 1);
  check_call(2, "ncclReduceScatter", nccl.calls[2].x, b.dk.data, 2 * 5 * SIZE * 64, FLOAT16, SUM,
             -1);
  check_call(3, "ncclReduceScatter", nccl.calls[3].x, b.dv.data, 2 * 5 * SIZE * 64, FLOAT16, SUM,
             -1);
}

// What a rank sends to one and receives from another, `pairs` times from call `at` on.
static void check_hops(int at, int pairs, size_t count, int dtype, int to, int from) {
  for (int i = at; i < at + 2 * pairs; i += 2) {
    check_call(i, "ncclSend", nccl.calls[i].x, NULL, count, dtype, -1, to);
    check_call(i + 1, "ncclRecv", NULL, nccl.calls[i + 1].out, count, dtype, -1, from);
  }
}

// What a rank gathers of two chunks of keys and values: the first ones of all ranks by a call each,
// the second ones by sends, the last rank's first; both in one group.
static void check_chunks(size_t keys) {
  for (int i = 0; i < 2; i++) {
    check_call(i, "ncclAllGather", nccl.calls[i].x, nccl.calls[i].out, keys / 2, FLOAT16, -1, -1);
    for (int rank = 0; rank < SIZE; rank++) {
      const int at = 2 + 2 * (SIZE * i + rank);
      const char *first = (const char *)nccl.calls[2 + 2 * SIZE * (i + 1) - 1].out;
      check_call(at, "ncclSend", nccl.calls[2 + 2 * SIZE * i].x, NULL, keys / 2, FLOAT16, -1, rank);
      check_call(at + 1, "ncclRecv", NULL, first + (SIZE - 1 - rank) * (keys / 2) * 2, keys / 2,
                 FLOAT16, -1, rank);
    }
  }
}

// Two chunks of each sequence on a rank, whose keys are gathered in two groups, or travel.
static void zigzag(void) {
  unsloth_context_parallel_attention_params p = UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
  unsloth_context_parallel_attention_backward_params b =
      UNSLOTH_CONTEXT_PARALLEL_ATTENTION_BACKWARD_PARAMS_INIT;
  const size_t keys = 2 * 6 * 2 * 64;
  p.comm = b.comm = comm;
  p.causal = b.causal = 1;
  p.order = b.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
  p.q = b.q = make4(2, 6, 4, 64);
  p.k = b.k = make4(2, 6, 2, 64);
  p.v = b.v = make4(2, 6, 2, 64);
  p.out = b.out = make4(2, 6, 4, 64);
  b.dout = make4(2, 6, 4, 64);
  b.dq = make4(2, 6, 4, 64);
  b.dk = make4(2, 6, 2, 64);
  b.dv = make4(2, 6, 2, 64);
  b.lse = make(UNSLOTH_DTYPE_F32, 2, 4);
  b.lse.rank = 3;
  b.lse.shape[2] = 6;
  for (int ring = 0; ring < 2; ring++) {
    p.method = b.method = ring ? UNSLOTH_CONTEXT_METHOD_RING : UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
    CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, &p, &p.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
    CHECK_OK(
        unsloth_context_parallel_attention_backward_workspace_size(ctx, &b, &b.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
    begin();
    CHECK_OK(unsloth_context_parallel_attention_forward(ctx, &p, stream));
    CHECK(driver.copies == 0 && driver.others == 0);
    if (ring) {
      // Keys and values to the next rank, three times.
      CHECK(nccl.num_calls == 12 && nccl.groups == 6);
      check_hops(0, 6, keys, FLOAT16, RANK + 1, RANK - 1);
      CHECK(nccl.calls[0].x == p.k.data && nccl.calls[2].x == p.v.data);
      CHECK(nccl.calls[4].x == nccl.calls[1].out && nccl.calls[8].x == nccl.calls[5].out);
    } else {
      // A group of each, and one of the sends of each tensor inside.
      CHECK(nccl.num_calls == 2 + 4 * SIZE && nccl.groups == 4);
      check_chunks(keys);
    }
    begin();
    CHECK_OK(unsloth_context_parallel_attention_backward(ctx, &b, stream));
    CHECK(driver.copies == 0 && driver.others == 0);
    if (ring) {
      // Sums of gradients with them, as words, and once more, to whom they are of.
      CHECK(nccl.num_calls == 28 && nccl.groups == 14);
      for (int i = 0; i < 3; i++) {
        check_hops(8 * i, 2, keys, FLOAT16, RANK + 1, RANK - 1);
        check_hops(8 * i + 4, 2, keys, INT32, RANK + 1, RANK - 1);
      }
      check_hops(24, 2, keys, INT32, RANK + 1, RANK - 1);
    } else {
      CHECK(nccl.num_calls == 6 + 4 * SIZE && nccl.groups == 4);
      check_chunks(keys);
      for (int i = 2 + 4 * SIZE; i < 6 + 4 * SIZE; i++) {
        check_call(i, "ncclReduceScatter", nccl.calls[i].x, nccl.calls[i].out, keys / 2, FLOAT16,
                   SUM, -1);
      }
    }
  }
}

// Without gaps nothing is copied, and both chunks' queries attend in one launch, if tiles end where
// chunks do.
static void chunks_together(void) {
  for (int tokens = 256; tokens >= 200; tokens -= 56) {
    unsloth_context_parallel_attention_params p = UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
    p.comm = comm;
    p.causal = 1;
    p.method = UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
    p.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
    p.q = make4(1, tokens, 4, 64);
    p.k = make4(1, tokens, 2, 64);
    p.v = make4(1, tokens, 2, 64);
    p.out = make4(1, tokens, 4, 64);
    CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, &p, &p.workspace_size));
    CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
    begin();
    CHECK_OK(unsloth_context_parallel_attention_forward(ctx, &p, stream));
    CHECK(allocations == 0 && driver.copies == 0 && driver.others == 0);
    check_chunks((size_t)tokens * 2 * 64);
    CHECK(nccl.calls[0].x == p.k.data && nccl.calls[0].out == p.workspace);
    CHECK(driver.launches == (tokens == 256 ? 1 : 2));
  }
}

// A vocabulary: the second rank of four has its rows from 3 on.
static void vocabulary(void) {
  unsloth_embedding_params p = UNSLOTH_EMBEDDING_PARAMS_INIT;
  unsloth_embedding_backward_params b = UNSLOTH_EMBEDDING_BACKWARD_PARAMS_INIT;
  p.parallel.comm = comm;
  p.vocab_begin = 3;
  p.vocab_size = 12;
  p.table = make(UNSLOTH_DTYPE_BF16, 3, 16);
  p.ids = make(UNSLOTH_DTYPE_I64, 8, -1);
  p.out = make(UNSLOTH_DTYPE_F32, 8, 16);
  CHECK_OK(unsloth_embedding_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(p.workspace_size == 0);
  begin();
  CHECK_OK(unsloth_embedding_forward(ctx, &p, stream));
  end_divided("ncclAllReduce", p.out.data, 128);
  CHECK(driver.launches == 1);
  p.parallel.sequence = 1;
  p.out = make(UNSLOTH_DTYPE_F32, 2, 16);
  CHECK_OK(unsloth_embedding_workspace_size(ctx, &p, &p.workspace_size));
  CHECK(p.workspace_size == 512);
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_embedding_forward(ctx, &p, stream));
  end_divided("ncclReduceScatter", p.out.data, 32);

  b.parallel = p.parallel;
  b.vocab_begin = 3;
  b.vocab_size = 12;
  b.dout = make(UNSLOTH_DTYPE_BF16, 2, 16);
  b.ids = p.ids;
  b.dweight = make(UNSLOTH_DTYPE_F32, 3, 16);
  CHECK_OK(unsloth_embedding_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
  begin();
  CHECK_OK(unsloth_embedding_backward(ctx, &b, stream));
  end_divided("ncclAllGather", b.workspace, 32);
}

// A head whose vocabulary is divided: for each chunk what tokens' logits come to, at last the
// gradient.
static void head(void) {
  unsloth_linear_cross_entropy_params p = UNSLOTH_LINEAR_CROSS_ENTROPY_PARAMS_INIT;
  p.parallel.comm = comm;
  p.vocab_begin = 3;
  p.vocab_size = 12;
  p.chunk_tokens = 4;
  p.x = make(UNSLOTH_DTYPE_BF16, 8, 16);
  p.weight = make(UNSLOTH_DTYPE_BF16, 3, 16);
  p.targets = make(UNSLOTH_DTYPE_I64, 8, -1);
  p.loss = make(UNSLOTH_DTYPE_F32, 1, -1);
  p.dx = make(UNSLOTH_DTYPE_BF16, 8, 16);
  p.dweight = make(UNSLOTH_DTYPE_F32, 3, 16);
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_linear_cross_entropy_forward(ctx, &p, stream));
  CHECK(allocations == 0);
  CHECK(nccl.num_calls == 3 && nccl.groups == 0);
  CHECK(driver.launches > 0 && driver.copies == 0 && driver.others == 0);
  // Of four ranks this is the second; of four tokens each gives four numbers.
  for (int i = 0; i < 2; i++) {
    const nccl_call *gather = &nccl.calls[i];
    CHECK(strcmp(gather->name, "ncclAllGather") == 0 && gather->count == 16);
    CHECK((const char *)gather->x == (const char *)gather->out + 16 * sizeof(float));
  }
  CHECK(strcmp(nccl.calls[2].name, "ncclAllReduce") == 0 && nccl.calls[2].count == 128);
  CHECK(nccl.calls[2].out == p.dx.data && nccl.calls[2].dtype == BFLOAT16);

  p.parallel.sequence = 1;
  p.x = make(UNSLOTH_DTYPE_BF16, 2, 16);
  p.dx = make(UNSLOTH_DTYPE_BF16, 2, 16);
  p.chunk_tokens = 0;
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &p, &p.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.workspace_size, &p.workspace));
  begin();
  CHECK_OK(unsloth_linear_cross_entropy_forward(ctx, &p, stream));
  CHECK(nccl.num_calls == 3 && allocations == 0);
  CHECK(strcmp(nccl.calls[0].name, "ncclAllGather") == 0 && nccl.calls[0].x == p.x.data);
  CHECK(strcmp(nccl.calls[2].name, "ncclReduceScatter") == 0 && nccl.calls[2].out == p.dx.data);
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

static unsloth_comm_params of_group(void) {
  unsloth_comm_params p = UNSLOTH_COMM_PARAMS_INIT;
  p.kind = UNSLOTH_COMM_KIND_NCCL;
  p.rank = RANK;
  p.size = SIZE;
  p.get_symbol = nccl_symbol;
  p.user = &nccl;
  return p;
}

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
  reductions();
  gathers();
  moves();
  divided();
  divided_sequences();
  zigzag();
  chunks_together();
  vocabulary();
  head();
  failures();
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
  CHECK_FAILS(unsloth_comm_abort(comm), UNSLOTH_STATUS_UNSUPPORTED,
              "comm_abort: comm was lent: who made it aborts it");
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

int main(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  params.backend = UNSLOTH_BACKEND_CUDA;
  const unsloth_status status = unsloth_context_create(&params, &ctx);
  // A build for other architectures.
  if (status == UNSLOTH_STATUS_UNSUPPORTED_DEVICE) return SKIPPED;
  CHECK_OK(status);
  CHECK_OK(unsloth_stream_create(ctx, &stream));
  made();
  lent();
  versions();
  contexts();
  CHECK_OK(unsloth_stream_destroy(ctx, stream));
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
