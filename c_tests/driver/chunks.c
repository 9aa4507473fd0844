// Layers whose sums run beside products, beside a driver and an NCCL that are none: what which
// stream is given in which order, and which events make one wait for the other. A graph that
// captures the caller's stream has all of it if the other one begins behind an event of the
// caller's, and the caller's waits for its last work.
#include "check.h"
#include "driver.h"
#include "nccl.h"

enum { SKIPPED = 77 };
enum { SIZE = 2, RANK = 1, ROWS = 8, HIDDEN = 16 };

static unsloth_context *ctx;
static unsloth_comm *comm;
static unsloth_stream stream;

static void *memory(size_t size) {
  void *data = NULL;
  if (size > 0) CHECK_OK(unsloth_memory_alloc(ctx, size, &data));
  return data;
}

// At an address that nothing is at.
static unsloth_tensor make(int64_t d0, int64_t d1) {
  const size_t elements = (size_t)(d0 + 1) * (size_t)(d1 > 0 ? d1 : 1);
  return tensor(memory(2 * elements), UNSLOTH_DTYPE_BF16, d0, d1, -1, -1);
}

static void begin(void) {
  memset(&driver, 0, sizeof driver);
  nccl.num_calls = 0;
}

// The steps as a text: those of the caller's stream in capitals, and kernels behind each other as
// one.
static const char *steps(void) {
  static char text[DRIVER_STEPS + 1];
  int length = 0;
  CHECK(driver.num_steps <= DRIVER_STEPS);
  for (int i = 0; i < driver.num_steps; i++) {
    const driver_stage *step = &driver.steps[i];
    const char what = step->stream == stream ? step->what : (char)(step->what + 'a' - 'A');
    if (what != 'L' || length == 0 || text[length - 1] != 'L') text[length++] = what;
  }
  text[length] = 0;
  return text;
}

static void check_steps(const char *expected) {
  if (strcmp(steps(), expected) == 0) return;
  fprintf(stderr, "the streams were given %s, not %s\n", steps(), expected);
  exit(1);
}

// Where an event was recorded last before a step.
static const driver_stage *recorded(int before, const void *event) {
  for (int i = before - 1; i >= 0; i--) {
    if (driver.steps[i].what == 'R' && driver.steps[i].event == event) return &driver.steps[i];
  }
  return NULL;
}

// What a stream waits for was recorded by the other one in the same call; the library's stream
// waits right behind that, and records right behind NCCL's work. The caller's has waited for the
// last of it.
static void check_events(void) {
  const void *last = NULL, *waited = NULL;
  for (int i = 0; i < driver.num_steps; i++) {
    const driver_stage *step = &driver.steps[i], *of = NULL;
    const int is_callers = step->stream == stream;
    if (step->what == 'R' && !is_callers) last = step->event;
    if (step->what != 'W') continue;
    of = recorded(i, step->event);
    CHECK(of != NULL && (of->stream == stream) != is_callers);
    if (is_callers) {
      waited = step->event;
    } else {
      CHECK(of == step - 1);
    }
  }
  CHECK(last != NULL && waited == last);
}

// Sums of as many elements each, behind each other.
static void check_sums(int first, int count, const void *out, size_t elements) {
  for (int i = first; i < first + count; i++) {
    const nccl_call *call = &nccl.calls[i];
    const char *at = (const char *)out + (size_t)(i - first) * elements * 2;
    CHECK(strcmp(call->name, "ncclAllReduce") == 0 && call->count == elements);
    CHECK(call->x == at && call->out == at && call->stream != stream);
  }
}

static unsloth_parallel group(int64_t chunk_rows) {
  unsloth_parallel parallel;
  memset(&parallel, 0, sizeof parallel);
  parallel.comm = comm;
  parallel.chunk_rows = chunk_rows;
  return parallel;
}

static unsloth_linear_params row_parallel(int64_t chunk_rows) {
  unsloth_linear_params p = UNSLOTH_LINEAR_PARAMS_INIT;
  p.parallel = group(chunk_rows);
  p.parallel.partition = UNSLOTH_PARTITION_ROW;
  p.x = make(ROWS, HIDDEN);
  p.weight = make(3, HIDDEN);
  p.out = make(ROWS, 3);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  return p;
}

static void products(void) {
  static const struct {
    int64_t chunk_rows;
    int chunks;
    const char *steps;
  } cases[] = {
      // So few rows are not divided unless that is asked for.
      {0, 1, "LN"},
      {8, 1, "LN"},
      {5, 1, "LN"},
      {4, 2, "LRwnrLRwnrW"},
      {2, 4, "LRwnrLRwnrLRwnrLRwnrW"},
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    unsloth_linear_params p = row_parallel(cases[i].chunk_rows);
    begin();
    CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
    check_steps(cases[i].steps);
    CHECK(nccl.num_calls == cases[i].chunks);
    if (cases[i].chunks == 1) continue;
    check_events();
    check_sums(0, cases[i].chunks, p.out.data, (size_t)(ROWS * 3 / cases[i].chunks));
  }
}

// Many rows are divided without being asked for. With rows that are not equally spaced a rank makes
// the product at once, and the same sums as the others.
static void large(void) {
  unsloth_linear_params p = row_parallel(0);
  p.x = make(8192, HIDDEN);
  p.weight = make(4096, HIDDEN);
  p.out = make(8192, 4096);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  check_steps("LRwnrLRwnrLRwnrLRwnrW");
  check_events();
  check_sums(0, 4, p.out.data, (size_t)2048 * 4096);

  p.x = tensor(p.x.data, UNSLOTH_DTYPE_BF16, 2, 4096, HIDDEN, -1);
  p.x.strides[0] = 4097 * HIDDEN;
  p.x.strides[1] = HIDDEN;
  p.x.strides[2] = 1;
  p.out = tensor(p.out.data, UNSLOTH_DTYPE_BF16, 2, 4096, 4096, -1);
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  check_steps("LRwnrRwnrRwnrRwnrW");
  check_events();
  check_sums(0, 4, p.out.data, (size_t)2048 * 4096);
}

// Of rows that are divided, a chunk has as many of each rank.
static void divided_rows(void) {
  unsloth_linear_params p = row_parallel(4);
  p.parallel.sequence = 1;
  p.out = make(ROWS / SIZE, 3);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  check_steps("LRwnrLRwnrW");
  check_events();
  for (size_t i = 0; i < 2; i++) {
    const nccl_call *call = &nccl.calls[i];
    CHECK(strcmp(call->name, "ncclReduceScatter") == 0 && call->count == 6);
    CHECK((const char *)call->x == (const char *)p.workspace + i * 24);
    CHECK((const char *)call->out == (const char *)p.out.data + i * 12);
  }
}

static unsloth_mlp_params mlp(unsloth_parallel parallel) {
  unsloth_mlp_params p = UNSLOTH_MLP_PARAMS_INIT;
  p.parallel = parallel;
  p.x = make(ROWS, HIDDEN);
  p.gate_weight = make(24, HIDDEN);
  p.up_weight = make(24, HIDDEN);
  p.down_weight = make(HIDDEN, 24);
  p.out = make(ROWS, HIDDEN);
  return p;
}

static unsloth_attention_block_params attention(unsloth_parallel parallel) {
  unsloth_attention_block_params p = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  p.parallel = parallel;
  p.num_heads = p.num_kv_heads = 2;
  p.head_dim = p.v_head_dim = 64;
  p.x = make(ROWS, HIDDEN);
  p.q_weight = make(128, HIDDEN);
  p.k_weight = make(128, HIDDEN);
  p.v_weight = make(128, HIDDEN);
  p.out_weight = make(HIDDEN, 128);
  p.out = make(ROWS, HIDDEN);
  return p;
}

static void blocks(void) {
  unsloth_mlp_params m = mlp(group(4));
  unsloth_attention_block_params a = attention(group(4));
  for (int keeps = 0; keeps < 2; keeps++) {
    if (keeps) m.gate_up_out = make(ROWS, 48);
    CHECK_OK(unsloth_mlp_workspace_size(ctx, &m, &m.workspace_size));
    m.workspace = memory(m.workspace_size);
    begin();
    CHECK_OK(unsloth_mlp_forward(ctx, &m, stream));
    check_steps("LRwnrLRwnrW");
    check_events();
    check_sums(0, 2, m.out.data, 4 * HIDDEN);
  }
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &a, &a.workspace_size));
  a.workspace = memory(a.workspace_size);
  begin();
  CHECK_OK(unsloth_attention_block_forward(ctx, &a, stream));
  check_steps("LRwnrLRwnrW");
  check_events();
  check_sums(0, 2, a.out.data, 4 * HIDDEN);
}

// The MLP of a chunk begins when that is added up, and the second sum runs beside the first one's.
static void layers(void) {
  unsloth_decoder_layer_params p = UNSLOTH_DECODER_LAYER_PARAMS_INIT;
  unsloth_decoder_layer_backward_params b = UNSLOTH_DECODER_LAYER_BACKWARD_PARAMS_INIT;
  unsloth_attention_block_backward_params attention_gradients =
      UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  unsloth_mlp_backward_params mlp_gradients = UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  const unsloth_attention_block_params of_attention = attention(group(4));
  const unsloth_mlp_params of_mlp = mlp(group(4));
  p.attention = &of_attention;
  p.mlp = &of_mlp;
  p.x = make(ROWS, HIDDEN);
  p.attention_norm = make(HIDDEN, -1);
  p.mlp_norm = make(HIDDEN, -1);
  p.out = make(ROWS, HIDDEN);
  p.norm_epsilon = 1e-5f;
  p.checkpointing = UNSLOTH_CHECKPOINTING_FULL;
  CHECK_OK(unsloth_decoder_layer_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  begin();
  CHECK_OK(unsloth_decoder_layer_forward(ctx, &p, stream));
  check_steps("LRwnrLRwnrWLRwnrWLRwnrW");
  check_events();
  // The first waits are for the first sums of attention's output.
  CHECK(nccl.num_calls == 4);
  check_sums(2, 2, p.out.data, 4 * HIDDEN);
  CHECK((const char *)nccl.calls[1].out == (const char *)nccl.calls[0].out + 8 * HIDDEN);

  // Computed again, and then the sums of two gradients beside those of weights.
  b.forward = &p;
  b.dout = make(ROWS, HIDDEN);
  b.dx = make(ROWS, HIDDEN);
  attention_gradients.dq_weight = make(128, HIDDEN);
  mlp_gradients.dgate_weight = make(24, HIDDEN);
  b.attention = &attention_gradients;
  b.mlp = &mlp_gradients;
  CHECK_OK(unsloth_decoder_layer_backward_workspace_size(ctx, &b, &b.workspace_size));
  b.workspace = memory(b.workspace_size);
  begin();
  CHECK_OK(unsloth_decoder_layer_backward(ctx, &b, stream));
  check_steps("LRwnrLRwnrWLRwnrLWLRwnrLWL");
  check_events();
  check_sums(3, 1, b.dx.data, ROWS * HIDDEN);
}

static void gradients(void) {
  unsloth_linear_backward_params b = UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  b.dout = make(ROWS, 3);
  b.x = make(ROWS, HIDDEN);
  b.weight = make(3, HIDDEN);
  b.dx = make(ROWS, HIDDEN);
  for (int of_weight = 0; of_weight < 2; of_weight++) {
    for (int64_t chunk_rows = 4; chunk_rows <= 8; chunk_rows += 4) {
      b.parallel = group(chunk_rows);
      if (of_weight) b.dweight = make(3, HIDDEN);
      CHECK_OK(unsloth_linear_backward_workspace_size(ctx, &b, &b.workspace_size));
      b.workspace = memory(b.workspace_size);
      begin();
      CHECK_OK(unsloth_linear_backward(ctx, &b, stream));
      // Beside what, if nothing else is asked for?
      const int beside = of_weight && chunk_rows == 4;
      check_steps(beside ? "LRwnrLW" : "LN");
      if (beside) check_events();
      CHECK(nccl.num_calls == 1 && nccl.calls[0].out == b.dx.data);
    }
  }
}

static void fail_next(char what, const void *of, const void *event) {
  driver_step(what, of, event);
  nccl.fails = "ncclAllReduce";
  nccl.status = 1;
}

// Whatever fails, the caller's stream waits for what the other one was given, and the next call
// works.
static void failures(void) {
  unsloth_linear_params p = row_parallel(4);
  nccl.fails = "ncclAllReduce";
  nccl.status = 1;
  begin();
  CHECK_FAILS(unsloth_linear_forward(ctx, &p, stream), UNSLOTH_STATUS_COMM_ERROR,
              "linear: comm failed: ncclAllReduce gave unhandled cuda error (1): "
              "the words of the library");
  check_steps("LRwrW");
  check_events();
  // The second sum.
  nccl.told = fail_next;
  begin();
  CHECK_STATUS(unsloth_linear_forward(ctx, &p, stream), UNSLOTH_STATUS_COMM_ERROR);
  check_steps("LRwnrLRwrWW");
  nccl.told = driver_step;
  // The second product.
  begin();
  driver.failing_launch = 2;
  CHECK_STATUS(unsloth_linear_forward(ctx, &p, stream), UNSLOTH_STATUS_CUDA_ERROR);
  check_steps("LRwnrW");
  check_events();
  begin();
  CHECK_OK(unsloth_linear_forward(ctx, &p, stream));
  check_steps("LRwnrLRwnrW");
}

int main(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  unsloth_comm_params of_group = UNSLOTH_COMM_PARAMS_INIT;
  params.backend = UNSLOTH_BACKEND_CUDA;
  const unsloth_status status = unsloth_context_create(&params, &ctx);
  // A build for other architectures.
  if (status == UNSLOTH_STATUS_UNSUPPORTED_DEVICE) return SKIPPED;
  CHECK_OK(status);
  CHECK_OK(unsloth_stream_create(ctx, &stream));
  of_group.kind = UNSLOTH_COMM_KIND_NCCL;
  of_group.rank = RANK;
  of_group.size = SIZE;
  of_group.get_symbol = nccl_symbol;
  of_group.user = &nccl;
  CHECK_OK(unsloth_comm_create(ctx, &of_group, &comm));
  nccl.told = driver_step;
  products();
  large();
  divided_rows();
  blocks();
  layers();
  gradients();
  failures();
  CHECK_OK(unsloth_comm_destroy(comm));
  CHECK_OK(unsloth_stream_destroy(ctx, stream));
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
