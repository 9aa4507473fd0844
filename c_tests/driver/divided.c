// What ranks divide, beside a driver and an NCCL that are none: layers, sequences, a vocabulary and
// a head, and which collectives they make.
#include "collective.h"

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

static void all(void) {
  divided();
  divided_sequences();
  zigzag();
  chunks_together();
  vocabulary();
  head();
}

static void in_a_group(void) { with_group(all); }

int main(void) { return with_context(in_a_group); }
