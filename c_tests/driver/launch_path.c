// What a call does on the host, beside a driver that counts: it launches its kernels, and neither
// allocates nor copies, waits or asks the driver for anything. A graph could not be captured, and a
// decoding step not be short, if it did.
#include "allocations.h"
#include "check.h"
#include "driver.h"

enum { HIDDEN = 512, HEADS = 8, KV_HEADS = 2, DIM = 64, FFN = 1024, VOCAB = 1000 };

enum { SKIPPED = 77 };

static unsloth_context *ctx;

// A tensor of its own at an address that nothing is at.
static unsloth_tensor make(unsloth_dtype dtype, int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
  void *data = NULL;
  CHECK_OK(unsloth_memory_alloc(ctx, 1 << 24, &data));
  return tensor(data, dtype, d0, d1, d2, d3);
}

static unsloth_tensor bf16(int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
  return make(UNSLOTH_DTYPE_BF16, d0, d1, d2, d3);
}

static void *memory(size_t size) {
  void *data = NULL;
  if (size > 0) CHECK_OK(unsloth_memory_alloc(ctx, size, &data));
  return data;
}

// Calls twice, since a first call may find out about its thread, and looks at the second.
#define CHECK_PATH(call, expected_launches) \
  do {                                      \
    CHECK_OK(call);                         \
    begin();                                \
    CHECK_OK(call);                         \
    end(#call, expected_launches);          \
  } while (0)

static void begin(void) {
  allocations = 0;
  memset(&driver, 0, sizeof driver);
}

static void end(const char *call, int launches) {
  const int allocated = allocations;
  if (allocated == 0 && driver.launches == launches && driver.copies == 0 && driver.others == 0)
    return;
  fprintf(stderr,
          "%s: %d allocations, %d launches (not %d), %d copies, %d other calls of the driver; %s\n",
          call, allocated, driver.launches, launches, driver.copies, driver.others,
          driver.last == NULL ? "" : driver.last);
  exit(1);
}

static void rows(void) {
  unsloth_rms_norm_params norm = UNSLOTH_RMS_NORM_PARAMS_INIT;
  norm.x = bf16(3, HIDDEN, -1, -1);
  norm.out = bf16(3, HIDDEN, -1, -1);
  norm.weight = bf16(HIDDEN, -1, -1, -1);
  norm.epsilon = 1e-5f;
  CHECK_PATH(unsloth_rms_norm_forward(ctx, &norm, NULL), 1);
  norm.residual = bf16(3, HIDDEN, -1, -1);
  norm.residual_out = norm.residual;
  CHECK_PATH(unsloth_rms_norm_forward(ctx, &norm, NULL), 1);

  unsloth_layer_norm_params centred = UNSLOTH_LAYER_NORM_PARAMS_INIT;
  centred.x = centred.out = bf16(3, HIDDEN, -1, -1);
  centred.weight = bf16(HIDDEN, -1, -1, -1);
  centred.epsilon = 1e-5f;
  CHECK_PATH(unsloth_layer_norm_forward(ctx, &centred, NULL), 1);

  unsloth_layer_norm_backward_params uncentred = UNSLOTH_LAYER_NORM_BACKWARD_PARAMS_INIT;
  uncentred.x = uncentred.dout = bf16(3, HIDDEN, -1, -1);
  uncentred.dx = uncentred.dresidual = bf16(3, HIDDEN, -1, -1);
  uncentred.dx = bf16(3, HIDDEN, -1, -1);
  uncentred.weight = bf16(HIDDEN, -1, -1, -1);
  uncentred.epsilon = 1e-5f;
  CHECK_PATH(unsloth_layer_norm_backward(ctx, &uncentred, NULL), 1);
  uncentred.dweight = bf16(HIDDEN, -1, -1, -1);
  uncentred.dbias = bf16(HIDDEN, -1, -1, -1);
  CHECK_OK(unsloth_layer_norm_backward_workspace_size(ctx, &uncentred, &uncentred.workspace_size));
  uncentred.workspace = memory(uncentred.workspace_size);
  CHECK_PATH(unsloth_layer_norm_backward(ctx, &uncentred, NULL), 2);

  unsloth_rms_norm_backward_params scaled = UNSLOTH_RMS_NORM_BACKWARD_PARAMS_INIT;
  scaled.x = scaled.dresidual = bf16(3, HIDDEN, -1, -1);
  scaled.dout = bf16(3, HIDDEN, -1, -1);
  scaled.weight = bf16(HIDDEN, -1, -1, -1);
  scaled.dweight = make(UNSLOTH_DTYPE_F32, HIDDEN, -1, -1, -1);
  scaled.accumulate = 1;
  scaled.epsilon = 1e-5f;
  CHECK_OK(unsloth_rms_norm_backward_workspace_size(ctx, &scaled, &scaled.workspace_size));
  scaled.workspace = memory(scaled.workspace_size);
  CHECK_PATH(unsloth_rms_norm_backward(ctx, &scaled, NULL), 2);

  unsloth_cross_entropy_params loss = UNSLOTH_CROSS_ENTROPY_PARAMS_INIT;
  loss.logits = loss.dlogits = bf16(3, HIDDEN, -1, -1);
  loss.targets = make(UNSLOTH_DTYPE_I32, 3, -1, -1, -1);
  loss.loss = make(UNSLOTH_DTYPE_F32, 1, -1, -1, -1);
  CHECK_OK(unsloth_cross_entropy_workspace_size(ctx, &loss, &loss.workspace_size));
  loss.workspace = memory(loss.workspace_size);
  CHECK_PATH(unsloth_cross_entropy_forward(ctx, &loss, NULL), 3);
  loss.reduction = UNSLOTH_REDUCTION_SUM;
  CHECK_PATH(unsloth_cross_entropy_forward(ctx, &loss, NULL), 2);

  unsloth_swiglu_backward_params ungated = UNSLOTH_SWIGLU_BACKWARD_PARAMS_INIT;
  ungated.gate_up = bf16(3, 2 * FFN, -1, -1);
  ungated.dout = ungated.out = bf16(3, FFN, -1, -1);
  CHECK_PATH(unsloth_swiglu_backward(ctx, &ungated, NULL), 1);

  unsloth_swiglu_params gated = UNSLOTH_SWIGLU_PARAMS_INIT;
  gated.gate_up = bf16(3, 2 * FFN, -1, -1);
  gated.out = bf16(3, FFN, -1, -1);
  CHECK_PATH(unsloth_swiglu_forward(ctx, &gated, NULL), 1);

  unsloth_rope_params rope = UNSLOTH_ROPE_PARAMS_INIT;
  rope.q = rope.q_out = bf16(1, 3, HEADS, DIM);
  rope.k = rope.k_out = bf16(1, 3, KV_HEADS, DIM);
  rope.positions = make(UNSLOTH_DTYPE_I32, 1, 3, -1, -1);
  CHECK_PATH(unsloth_rope_forward(ctx, &rope, NULL), 1);

  unsloth_qk_norm_rope_params qk = UNSLOTH_QK_NORM_ROPE_PARAMS_INIT;
  qk.q = rope.q;
  qk.k = rope.k;
  qk.positions = rope.positions;
  qk.q_weight = qk.k_weight = bf16(DIM, -1, -1, -1);
  qk.epsilon = 1e-5f;
  CHECK_PATH(unsloth_qk_norm_rope_forward(ctx, &qk, NULL), 1);

  unsloth_qk_norm_rope_backward_params dqk = UNSLOTH_QK_NORM_ROPE_BACKWARD_PARAMS_INIT;
  dqk.q = qk.q;
  dqk.k = qk.k;
  dqk.dq_out = bf16(1, 3, HEADS, DIM);
  dqk.dk_out = bf16(1, 3, KV_HEADS, DIM);
  dqk.positions = qk.positions;
  dqk.q_weight = dqk.k_weight = qk.q_weight;
  dqk.epsilon = 1e-5f;
  CHECK_PATH(unsloth_qk_norm_rope_backward(ctx, &dqk, NULL), 1);
  dqk.dq_weight = bf16(DIM, -1, -1, -1);
  dqk.dk_weight = bf16(DIM, -1, -1, -1);
  CHECK_OK(unsloth_qk_norm_rope_backward_workspace_size(ctx, &dqk, &dqk.workspace_size));
  dqk.workspace = memory(dqk.workspace_size);
  CHECK_PATH(unsloth_qk_norm_rope_backward(ctx, &dqk, NULL), 2);

  unsloth_embedding_params embedding = UNSLOTH_EMBEDDING_PARAMS_INIT;
  embedding.table = bf16(VOCAB, HIDDEN, -1, -1);
  embedding.ids = make(UNSLOTH_DTYPE_I32, 3, -1, -1, -1);
  embedding.out = bf16(3, HIDDEN, -1, -1);
  CHECK_PATH(unsloth_embedding_forward(ctx, &embedding, NULL), 1);

  unsloth_embedding_backward_params table = UNSLOTH_EMBEDDING_BACKWARD_PARAMS_INIT;
  table.dout = bf16(300, HIDDEN, -1, -1);
  table.ids = make(UNSLOTH_DTYPE_I32, 300, -1, -1, -1);
  table.dweight = bf16(VOCAB, HIDDEN, -1, -1);
  CHECK_OK(unsloth_embedding_backward_workspace_size(ctx, &table, &table.workspace_size));
  table.workspace = memory(table.workspace_size);
  // Ids of two digits: the first is counted, both are moved; rows and pieces; pieces joined.
  CHECK_PATH(unsloth_embedding_backward(ctx, &table, NULL), 5);

  unsloth_cast_params cast = UNSLOTH_CAST_PARAMS_INIT;
  cast.x = bf16(3, HIDDEN, -1, -1);
  cast.out = make(UNSLOTH_DTYPE_F32, 3, HIDDEN, -1, -1);
  CHECK_PATH(unsloth_cast_forward(ctx, &cast, NULL), 1);

  unsloth_quantize_params codes = UNSLOTH_QUANTIZE_PARAMS_INIT;
  codes.x = cast.x;
  codes.out = make(UNSLOTH_DTYPE_I8, 3, HIDDEN, -1, -1);
  codes.scale = make(UNSLOTH_DTYPE_F32, 3, -1, -1, -1);
  CHECK_OK(unsloth_quantize_workspace_size(ctx, &codes, &codes.workspace_size));
  CHECK(codes.workspace_size == 0);
  CHECK_PATH(unsloth_quantize_forward(ctx, &codes, NULL), 1);
  // One scale for all: what rows found, the scale; twice where a threshold follows from a mean.
  codes.out = make(UNSLOTH_DTYPE_TERNARY, 3, HIDDEN, -1, -1);
  codes.scale = make(UNSLOTH_DTYPE_F32, 1, -1, -1, -1);
  codes.rule = UNSLOTH_QUANTIZE_ABSMEAN;
  CHECK_OK(unsloth_quantize_workspace_size(ctx, &codes, &codes.workspace_size));
  CHECK(codes.workspace_size == 4 * 8);
  codes.workspace = memory(codes.workspace_size);
  CHECK_PATH(unsloth_quantize_forward(ctx, &codes, NULL), 3);
  codes.rule = UNSLOTH_QUANTIZE_THRESHOLD;
  CHECK_PATH(unsloth_quantize_forward(ctx, &codes, NULL), 5);
  codes.out = make(UNSLOTH_DTYPE_F8E4M3, 3, HIDDEN, -1, -1);
  codes.rule = UNSLOTH_QUANTIZE_ABSMAX;
  CHECK_PATH(unsloth_quantize_forward(ctx, &codes, NULL), 3);
  codes.workspace_size -= 1;
  CHECK(unsloth_quantize_forward(ctx, &codes, NULL) == UNSLOTH_STATUS_WORKSPACE_TOO_SMALL);

  unsloth_weight_repack_params repack = UNSLOTH_WEIGHT_REPACK_PARAMS_INIT;
  repack.packed = make(UNSLOTH_DTYPE_I8, 3 * HIDDEN / 4 + 32, -1, -1, -1);
  repack.out = make(UNSLOTH_DTYPE_TERNARY, 3, HIDDEN, -1, -1);
  repack.scale = make(UNSLOTH_DTYPE_F32, 1, -1, -1, -1);
  CHECK_PATH(unsloth_weight_repack_forward(ctx, &repack, NULL), 1);
  repack.out.data = repack.packed.data;
  CHECK_PATH(unsloth_weight_repack_forward(ctx, &repack, NULL), 1);

  unsloth_argmax_params argmax = UNSLOTH_ARGMAX_PARAMS_INIT;
  argmax.x = make(UNSLOTH_DTYPE_F32, 3, VOCAB, -1, -1);
  argmax.out = make(UNSLOTH_DTYPE_I32, 3, -1, -1, -1);
  CHECK_PATH(unsloth_argmax_forward(ctx, &argmax, NULL), 1);
}

static void products(void) {
  unsloth_linear_params linear = UNSLOTH_LINEAR_PARAMS_INIT;
  linear.weight = bf16(HIDDEN, HIDDEN, -1, -1);
  linear.bias = bf16(HIDDEN, -1, -1, -1);
  // One row, and a few: more go to cuBLAS where there is one.
  for (int64_t tokens = 1; tokens <= 4; tokens += 3) {
    linear.x = bf16(tokens, HIDDEN, -1, -1);
    linear.out = bf16(tokens, HIDDEN, -1, -1);
    CHECK_PATH(unsloth_linear_forward(ctx, &linear, NULL), 1);
  }

  // Both products, of dtypes that cuBLAS does not take, and the bias.
  unsloth_linear_backward_params gradients = UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  gradients.dout = bf16(3, HIDDEN, -1, -1);
  gradients.x = bf16(3, HIDDEN, -1, -1);
  gradients.dx = bf16(3, HIDDEN, -1, -1);
  gradients.weight = make(UNSLOTH_DTYPE_F32, HIDDEN, HIDDEN, -1, -1);
  gradients.dweight = make(UNSLOTH_DTYPE_F16, HIDDEN, HIDDEN, -1, -1);
  gradients.dbias = make(UNSLOTH_DTYPE_F16, HIDDEN, -1, -1, -1);
  CHECK_PATH(unsloth_linear_backward(ctx, &gradients, NULL), 3);
  // Of many rows parts are summed first.
  unsloth_linear_backward_params bias = UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  bias.dout = bf16(1000, HIDDEN, -1, -1);
  bias.dbias = make(UNSLOTH_DTYPE_F32, HIDDEN, -1, -1, -1);
  bias.accumulate = 1;
  CHECK_OK(unsloth_linear_backward_workspace_size(ctx, &bias, &bias.workspace_size));
  bias.workspace = memory(bias.workspace_size);
  CHECK_PATH(unsloth_linear_backward(ctx, &bias, NULL), 2);

  // Two chunks, of dtypes that cuBLAS does not take: tokens that count, a product, losses and two
  // gradients for each, the rounding of what they add up to, the sum of the losses.
  unsloth_linear_cross_entropy_params head = UNSLOTH_LINEAR_CROSS_ENTROPY_PARAMS_INIT;
  head.x = bf16(8, HIDDEN, -1, -1);
  head.dx = bf16(8, HIDDEN, -1, -1);
  head.weight = make(UNSLOTH_DTYPE_F32, VOCAB, HIDDEN, -1, -1);
  head.dweight = make(UNSLOTH_DTYPE_F16, VOCAB, HIDDEN, -1, -1);
  head.targets = make(UNSLOTH_DTYPE_I32, 8, -1, -1, -1);
  head.loss = make(UNSLOTH_DTYPE_F32, 1, -1, -1, -1);
  head.chunk_tokens = 4;
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &head, &head.workspace_size));
  head.workspace = memory(head.workspace_size);
  CHECK_PATH(unsloth_linear_cross_entropy_forward(ctx, &head, NULL), 1 + 2 * 4 + 1 + 1);
  head.dx = head.dweight = (unsloth_tensor){0};
  CHECK_PATH(unsloth_linear_cross_entropy_forward(ctx, &head, NULL), 1 + 2 * 2 + 1);

  unsloth_linear_logprob_params policy = UNSLOTH_LINEAR_LOGPROB_PARAMS_INIT;
  policy.x = head.x;
  policy.weight = head.weight;
  policy.ids = head.targets;
  policy.logprobs = make(UNSLOTH_DTYPE_F32, 8, -1, -1, -1);
  policy.chunk_tokens = 4;
  CHECK_OK(unsloth_linear_logprob_workspace_size(ctx, &policy, &policy.workspace_size));
  policy.workspace = memory(policy.workspace_size);
  CHECK_PATH(unsloth_linear_logprob_forward(ctx, &policy, NULL), 2 * 2);
  unsloth_linear_logprob_backward_params learns = UNSLOTH_LINEAR_LOGPROB_BACKWARD_PARAMS_INIT;
  learns.x = head.x;
  learns.weight = head.weight;
  learns.ids = head.targets;
  learns.dlogprobs = policy.logprobs;
  learns.dx = bf16(8, HIDDEN, -1, -1);
  learns.dweight = make(UNSLOTH_DTYPE_F16, VOCAB, HIDDEN, -1, -1);
  learns.chunk_tokens = 4;
  CHECK_OK(unsloth_linear_logprob_backward_workspace_size(ctx, &learns, &learns.workspace_size));
  learns.workspace = memory(learns.workspace_size);
  CHECK_PATH(unsloth_linear_logprob_backward(ctx, &learns, NULL), 2 * 4 + 1);

  // As large as real ones, which have a kernel for few rows.
  enum { WIDE = 4096 };
  unsloth_mlp_params mlp = UNSLOTH_MLP_PARAMS_INIT;
  mlp.x = bf16(1, HIDDEN, -1, -1);
  mlp.gate_weight = bf16(WIDE, HIDDEN, -1, -1);
  mlp.up_weight = bf16(WIDE, HIDDEN, -1, -1);
  mlp.down_weight = bf16(HIDDEN, WIDE, -1, -1);
  mlp.residual = bf16(1, HIDDEN, -1, -1);
  mlp.out = mlp.residual;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
  mlp.workspace = memory(mlp.workspace_size);
  // Gate and up with the activation, down with the residual; a norm takes no launch of its own.
  CHECK_PATH(unsloth_mlp_forward(ctx, &mlp, NULL), 2);
  mlp.x_norm = bf16(HIDDEN, -1, -1, -1);
  mlp.x_norm_epsilon = 1e-5f;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
  mlp.workspace = memory(mlp.workspace_size);
  CHECK_PATH(unsloth_mlp_forward(ctx, &mlp, NULL), 2);
  mlp.x_norm = (unsloth_tensor){0};

  // Gate and up kept: two products, the activation, down with the residual.
  mlp.gate_up_out = bf16(1, 2 * WIDE, -1, -1);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
  mlp.workspace = memory(mlp.workspace_size);
  CHECK_PATH(unsloth_mlp_forward(ctx, &mlp, NULL), 4);

  // Weights of another dtype than the rest are not for cuBLAS. Gate and up again, the gradient of
  // their product, theirs, then two products of each weight and one of the last.
  unsloth_mlp_backward_params block = UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  block.forward = &mlp;
  mlp.gate_weight.dtype = mlp.up_weight.dtype = mlp.down_weight.dtype = UNSLOTH_DTYPE_F32;
  block.dout = bf16(1, HIDDEN, -1, -1);
  block.dx = bf16(1, HIDDEN, -1, -1);
  block.dgate_weight = make(UNSLOTH_DTYPE_F16, WIDE, HIDDEN, -1, -1);
  block.dup_weight = make(UNSLOTH_DTYPE_F16, WIDE, HIDDEN, -1, -1);
  block.ddown_weight = make(UNSLOTH_DTYPE_F16, HIDDEN, WIDE, -1, -1);
  CHECK_OK(unsloth_mlp_backward_workspace_size(ctx, &block, &block.workspace_size));
  block.workspace = memory(block.workspace_size);
  CHECK_PATH(unsloth_mlp_backward(ctx, &block, NULL), 9);
  block.gate_up = mlp.gate_up_out;
  CHECK_PATH(unsloth_mlp_backward(ctx, &block, NULL), 7);
}

static void blocks(void) {
  unsloth_embedding_params embedding = UNSLOTH_EMBEDDING_PARAMS_INIT;
  embedding.table = make(UNSLOTH_DTYPE_Q6_K, VOCAB, HIDDEN, -1, -1);
  embedding.ids = make(UNSLOTH_DTYPE_I32, 3, -1, -1, -1);
  embedding.out = bf16(3, HIDDEN, -1, -1);
  CHECK_PATH(unsloth_embedding_forward(ctx, &embedding, NULL), 1);

  unsloth_linear_params linear = UNSLOTH_LINEAR_PARAMS_INIT;
  linear.weight = make(UNSLOTH_DTYPE_Q4_0, HIDDEN, HIDDEN, -1, -1);
  // Of another dtype than the rest: not for cuBLAS.
  linear.bias = make(UNSLOTH_DTYPE_F32, HIDDEN, -1, -1, -1);
  const int64_t tokens[] = {1, 8, 9, 32, 33};
  for (int i = 0; i < 5; i++) {
    linear.x = bf16(tokens[i], HIDDEN, -1, -1);
    linear.out = bf16(tokens[i], HIDDEN, -1, -1);
    CHECK_OK(unsloth_linear_workspace_size(ctx, &linear, &linear.workspace_size));
    // Others decode more rows' weights first, for which all ask for room; Hopper reads them as they
    // are.
    CHECK(linear.workspace_size == (tokens[i] > 32 ? (size_t)HIDDEN * HIDDEN * 2 : 0));
    linear.workspace = memory(linear.workspace_size);
    CHECK_PATH(unsloth_linear_forward(ctx, &linear, NULL), 1);
  }
  linear.workspace_size -= 1;
  CHECK(unsloth_linear_forward(ctx, &linear, NULL) == UNSLOTH_STATUS_WORKSPACE_TOO_SMALL);

  // 8-bit floats likewise, of some more rows.
  linear.weight = make(UNSLOTH_DTYPE_F8E4M3, HIDDEN, HIDDEN, -1, -1);
  const int64_t rows_of_floats[] = {1, 9, 64, 65};
  for (int i = 0; i < 4; i++) {
    linear.x = bf16(rows_of_floats[i], HIDDEN, -1, -1);
    linear.out = bf16(rows_of_floats[i], HIDDEN, -1, -1);
    CHECK_OK(unsloth_linear_workspace_size(ctx, &linear, &linear.workspace_size));
    const int decoded = rows_of_floats[i] > 64;
    CHECK(linear.workspace_size == (decoded ? (size_t)HIDDEN * HIDDEN * 2 : 0));
    linear.workspace = memory(linear.workspace_size);
    // Hopper decodes on the way, whatever it asked for.
    CHECK_PATH(unsloth_linear_forward(ctx, &linear, NULL), 1);
  }

  // By codes: x is rounded to codes first.
  linear.weight = make(UNSLOTH_DTYPE_TERNARY, HIDDEN, HIDDEN, -1, -1);
  linear.workspace_size = 0;
  CHECK(unsloth_linear_forward(ctx, &linear, NULL) == UNSLOTH_STATUS_WORKSPACE_TOO_SMALL);
  CHECK_OK(unsloth_linear_workspace_size(ctx, &linear, &linear.workspace_size));
  linear.workspace = memory(linear.workspace_size);
  CHECK_PATH(unsloth_linear_forward(ctx, &linear, NULL), 2);
  // The sums as they are.
  linear.out = make(UNSLOTH_DTYPE_F32, 65, HIDDEN, -1, -1);
  CHECK_PATH(unsloth_linear_forward(ctx, &linear, NULL), 2);

  unsloth_mlp_params mlp = UNSLOTH_MLP_PARAMS_INIT;
  mlp.x = bf16(2, HIDDEN, -1, -1);
  mlp.gate_weight = make(UNSLOTH_DTYPE_Q4_K, FFN, HIDDEN, -1, -1);
  mlp.up_weight = make(UNSLOTH_DTYPE_Q4_K, FFN, HIDDEN, -1, -1);
  mlp.down_weight = make(UNSLOTH_DTYPE_Q6_K, HIDDEN, FFN, -1, -1);
  mlp.out = bf16(2, HIDDEN, -1, -1);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
  mlp.workspace = memory(mlp.workspace_size);
  CHECK_PATH(unsloth_mlp_forward(ctx, &mlp, NULL), 2);
}

static void attention(int64_t dim, int64_t queries, int64_t keys, unsloth_implementation expected,
                      int launches) {
  unsloth_implementation implementation;
  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  p.causal = 1;
  p.q = bf16(1, queries, HEADS, dim);
  p.k = bf16(1, keys, KV_HEADS, dim);
  p.v = bf16(1, keys, KV_HEADS, dim);
  p.out = bf16(1, queries, HEADS, dim);
  CHECK_OK(unsloth_attention_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  CHECK_OK(unsloth_attention_supported(ctx, &p, &implementation));
  CHECK(implementation == expected);
  CHECK_PATH(unsloth_attention_forward(ctx, &p, NULL), launches);
}

static void attention_merge(void) {
  unsloth_attention_merge_params p = UNSLOTH_ATTENTION_MERGE_PARAMS_INIT;
  p.outs = make(UNSLOTH_DTYPE_F32, 2, 3, 4, 64);
  p.lses = make(UNSLOTH_DTYPE_F32, 2, 4, 3, -1);
  p.out = bf16(3, 4, 64, -1);
  p.lse = make(UNSLOTH_DTYPE_F32, 4, 3, -1, -1);
  CHECK_PATH(unsloth_attention_merge_forward(ctx, &p, NULL), 1);
}

static void attention_backward(void) {
  unsloth_attention_backward_params p = UNSLOTH_ATTENTION_BACKWARD_PARAMS_INIT;
  p.q = p.out = p.dout = bf16(1, 100, HEADS, DIM);
  p.k = p.v = bf16(1, 100, KV_HEADS, DIM);
  p.lse = make(UNSLOTH_DTYPE_F32, 1, HEADS, 100, -1);
  p.dv = bf16(1, 100, KV_HEADS, DIM);
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  // Statistics of rows, then the gradients: those of keys and values are one kernel.
  CHECK_PATH(unsloth_attention_backward(ctx, &p, NULL), 2);
  p.dk = bf16(1, 100, KV_HEADS, DIM);
  p.dq = bf16(1, 100, HEADS, DIM);
  // Those of queries are summed in memory by the same kernel.
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  CHECK_PATH(unsloth_attention_backward(ctx, &p, NULL), 2);
  p.sinks = make(UNSLOTH_DTYPE_F32, HEADS, -1, -1, -1);
  p.dsinks = make(UNSLOTH_DTYPE_F32, HEADS, -1, -1, -1);
  CHECK_PATH(unsloth_attention_backward(ctx, &p, NULL), 3);
  // A bias that all heads share has few tiles: parts of their sums, then the sums.
  p.bias = p.dbias = make(UNSLOTH_DTYPE_F32, 1, 1, 100, 100);
  p.dbias.data = memory(100 * 100 * sizeof(float));
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  CHECK_PATH(unsloth_attention_backward(ctx, &p, NULL), 6);
  // Dtypes that differ have a kernel for each gradient.
  p.dout = make(UNSLOTH_DTYPE_F32, 1, 100, HEADS, DIM);
  CHECK_PATH(unsloth_attention_backward(ctx, &p, NULL), 7);
}

// Forward, keeping what the backward pass takes, and backward; packed weights and norms of heads.
static void attention_block_backward(void) {
  enum { TOKENS = 100, COLUMNS = (HEADS + 2 * KV_HEADS) * DIM };
  unsloth_attention_block_params block = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  block.num_heads = HEADS;
  block.num_kv_heads = KV_HEADS;
  block.head_dim = DIM;
  block.rotate = 1;
  block.norm_epsilon = 1e-5f;
  block.x = bf16(1, TOKENS, HIDDEN, -1);
  // Not for cuBLAS.
  block.qkv_weight = make(UNSLOTH_DTYPE_F32, COLUMNS, HIDDEN, -1, -1);
  block.out_weight = make(UNSLOTH_DTYPE_F32, HIDDEN, HEADS * DIM, -1, -1);
  block.q_norm = block.k_norm = bf16(DIM, -1, -1, -1);
  block.out = bf16(1, TOKENS, HIDDEN, -1);
  block.qkv_out = bf16(1, TOKENS, COLUMNS, -1);
  block.attended_out = bf16(1, TOKENS, HEADS * DIM, -1);
  block.lse_out = make(UNSLOTH_DTYPE_F32, 1, HEADS, TOKENS, -1);
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &block, &block.workspace_size));
  block.workspace = memory(block.workspace_size);
  // The projection, norms with the rotation, attention, the output.
  CHECK_PATH(unsloth_attention_block_forward(ctx, &block, NULL), 4);

  unsloth_attention_block_backward_params p = UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  p.forward = &block;
  p.qkv = block.qkv_out;
  p.attended = block.attended_out;
  p.lse = block.lse_out;
  p.dout = bf16(1, TOKENS, HIDDEN, -1);
  p.dx = bf16(1, TOKENS, HIDDEN, -1);
  p.dqkv_weight = make(UNSLOTH_DTYPE_F16, COLUMNS, HIDDEN, -1, -1);
  p.dout_weight = make(UNSLOTH_DTYPE_F16, HIDDEN, HEADS * DIM, -1, -1);
  CHECK_OK(unsloth_attention_block_backward_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  // Norms and rotation again, the gradient of attention's output, two kernels of attention's,
  // rotation and norms back, three products.
  CHECK_PATH(unsloth_attention_block_backward(ctx, &p, NULL), 8);
  // Then the projection again, and attention.
  memset(&p.qkv, 0, sizeof p.qkv);
  memset(&p.attended, 0, sizeof p.attended);
  memset(&p.lse, 0, sizeof p.lse);
  CHECK_OK(unsloth_attention_block_backward_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  CHECK_PATH(unsloth_attention_block_backward(ctx, &p, NULL), 10);
}

// A layer that keeps all, and one that keeps its input alone.
static void decoder_layer(void) {
  enum { TOKENS = 100, COLUMNS = (HEADS + 2 * KV_HEADS) * DIM };
  unsloth_attention_block_params attention = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  attention.num_heads = HEADS;
  attention.num_kv_heads = KV_HEADS;
  attention.head_dim = DIM;
  attention.rotate = 1;
  // Not for cuBLAS.
  attention.qkv_weight = make(UNSLOTH_DTYPE_F32, COLUMNS, HIDDEN, -1, -1);
  attention.out_weight = make(UNSLOTH_DTYPE_F32, HIDDEN, HEADS * DIM, -1, -1);
  unsloth_mlp_params mlp = UNSLOTH_MLP_PARAMS_INIT;
  mlp.gate_up_weight = make(UNSLOTH_DTYPE_F32, 2 * FFN, HIDDEN, -1, -1);
  mlp.down_weight = make(UNSLOTH_DTYPE_F32, HIDDEN, FFN, -1, -1);
  unsloth_decoder_layer_params p = UNSLOTH_DECODER_LAYER_PARAMS_INIT;
  p.norm_epsilon = 1e-5f;
  p.attention = &attention;
  p.mlp = &mlp;
  p.x = bf16(1, TOKENS, HIDDEN, -1);
  p.out = bf16(1, TOKENS, HIDDEN, -1);
  p.attention_norm = p.mlp_norm = bf16(HIDDEN, -1, -1, -1);
  unsloth_attention_block_backward_params of_attention =
      UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  of_attention.dqkv_weight = make(UNSLOTH_DTYPE_F16, COLUMNS, HIDDEN, -1, -1);
  unsloth_mlp_backward_params of_mlp = UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  of_mlp.ddown_weight = make(UNSLOTH_DTYPE_F16, HIDDEN, FFN, -1, -1);
  unsloth_decoder_layer_backward_params b = UNSLOTH_DECODER_LAYER_BACKWARD_PARAMS_INIT;
  b.forward = &p;
  b.attention = &of_attention;
  b.mlp = &of_mlp;
  b.dout = bf16(1, TOKENS, HIDDEN, -1);
  static const struct {
    unsloth_checkpointing checkpointing;
    // The two norms, the projection, the rotation, attention, its output's product, gate and up,
    // the activation, down. Backward: the gradients of down (two products), the activation's, those
    // of gate and up; the norm's; attention's output's, two kernels of attention's, the rotation,
    // the projection's two; the norm's.
    int forward, backward;
  } cases[] = {{UNSLOTH_CHECKPOINTING_NONE, 9, 12}, {UNSLOTH_CHECKPOINTING_FULL, 9, 20}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    p.checkpointing = cases[i].checkpointing;
    CHECK_OK(unsloth_decoder_layer_saved_size(ctx, &p, &p.saved_size));
    CHECK_OK(unsloth_decoder_layer_workspace_size(ctx, &p, &p.workspace_size));
    p.saved = p.saved_size == 0 ? NULL : memory(p.saved_size);
    p.workspace = memory(p.workspace_size);
    CHECK_PATH(unsloth_decoder_layer_forward(ctx, &p, NULL), cases[i].forward);
    CHECK_OK(unsloth_decoder_layer_backward_workspace_size(ctx, &b, &b.workspace_size));
    b.workspace = memory(b.workspace_size);
    CHECK_PATH(unsloth_decoder_layer_backward(ctx, &b, NULL), cases[i].backward);
  }
}

// A decoding step of two sequences through a cache; in how many launches the block puts the new
// tokens into it and attends.
static void cached(unsloth_dtype dtype, int step) {
  enum { SEQUENCES = 2 };
  unsloth_kv_cache *cache = NULL;
  unsloth_kv_cache_params shape = UNSLOTH_KV_CACHE_PARAMS_INIT;
  shape.dtype = dtype;
  shape.num_layers = 2;
  shape.num_kv_heads = KV_HEADS;
  shape.head_dim = DIM;
  shape.page_size = 16;
  shape.num_pages = 8;
  CHECK_OK(unsloth_kv_cache_create(ctx, &shape, &cache));
  if (dtype == UNSLOTH_DTYPE_F8E4M3) {
    const float scale = 0.5F;
    CHECK_OK(unsloth_kv_cache_scales_set(cache, 1, &scale, &scale, 1, NULL));
  }
  int64_t sequences[SEQUENCES];
  const int64_t prompt[SEQUENCES] = {20, 5}, one[SEQUENCES] = {1, 1};
  for (int i = 0; i < SEQUENCES; i++)
    CHECK_OK(unsloth_kv_cache_sequence_create(cache, &sequences[i]));
  CHECK_OK(unsloth_kv_cache_extend(cache, sequences, prompt, SEQUENCES, NULL));
  CHECK_OK(unsloth_kv_cache_extend(cache, sequences, one, SEQUENCES, NULL));
  // A step's lengths and pages go over in one copy, behind which their memory is free again.
  memset(&driver, 0, sizeof driver);
  CHECK_OK(unsloth_kv_cache_extend(cache, sequences, one, SEQUENCES, NULL));
  CHECK(driver.copies == 1 && driver.launches == 0);

  unsloth_kv_cache_append_params append = UNSLOTH_KV_CACHE_APPEND_PARAMS_INIT;
  append.rotate = 1;
  append.layer = 1;
  append.k = bf16(SEQUENCES, KV_HEADS, DIM, -1);
  append.v = bf16(SEQUENCES, KV_HEADS, DIM, -1);
  CHECK_PATH(unsloth_kv_cache_append(cache, &append, NULL), 1);
  append.q = bf16(SEQUENCES, HEADS, DIM, -1);
  CHECK_PATH(unsloth_kv_cache_append(cache, &append, NULL), 1);

  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  p.causal = 1;
  p.q = bf16(SEQUENCES, HEADS, DIM, -1);
  p.out = bf16(SEQUENCES, HEADS, DIM, -1);
  CHECK_PATH(unsloth_kv_cache_attention_prepare(cache, 1, &p), 0);
  CHECK_OK(unsloth_attention_workspace_size(ctx, &p, &p.workspace_size));
  p.workspace = memory(p.workspace_size);
  CHECK_PATH(unsloth_attention_forward(ctx, &p, NULL), 1);

  unsloth_attention_block_params block = UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  block.num_heads = HEADS;
  block.num_kv_heads = KV_HEADS;
  block.head_dim = DIM;
  block.rotate = 1;
  block.cache = cache;
  block.x = bf16(SEQUENCES, HIDDEN, -1, -1);
  block.q_weight = bf16(HEADS * DIM, HIDDEN, -1, -1);
  block.k_weight = bf16(KV_HEADS * DIM, HIDDEN, -1, -1);
  block.v_weight = bf16(KV_HEADS * DIM, HIDDEN, -1, -1);
  block.out_weight = bf16(HIDDEN, HEADS * DIM, -1, -1);
  block.residual = bf16(SEQUENCES, HIDDEN, -1, -1);
  block.out = block.residual;
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &block, &block.workspace_size));
  block.workspace = memory(block.workspace_size);
  // Three projections; queries and keys rotated, keys and values stored, attention; output.
  CHECK_PATH(unsloth_attention_block_forward(ctx, &block, NULL), 4 + step);
  // A norm that three products share.
  block.x = block.residual;
  block.x_norm = bf16(HIDDEN, -1, -1, -1);
  block.norm_epsilon = 1e-5f;
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &block, &block.workspace_size));
  block.workspace = memory(block.workspace_size);
  CHECK_PATH(unsloth_attention_block_forward(ctx, &block, NULL), 5 + step);
  CHECK_OK(unsloth_kv_cache_destroy(cache));
}

// A step of two parameters; a change between steps goes over in one copy.
static void steps(void) {
  unsloth_parameter parameters[2];
  unsloth_parameter_group group = {1e-3f, 0.1f};
  unsloth_optimizer_params p = UNSLOTH_OPTIMIZER_PARAMS_INIT;
  unsloth_optimizer *optimizer = NULL;
  unsloth_tensor scale;
  memset(parameters, 0, sizeof parameters);
  for (int i = 0; i < 2; i++) {
    parameters[i].weight = bf16(HIDDEN, HIDDEN, -1, -1);
    parameters[i].gradient = make(UNSLOTH_DTYPE_F32, HIDDEN, HIDDEN, -1, -1);
  }
  p.decoupled = p.zero_gradients = 1;
  p.max_norm = 1;
  p.precision.master = UNSLOTH_MASTER_F32;
  p.precision.loss_scale.dynamic = 1;
  p.parameters = parameters;
  p.groups = &group;
  p.num_parameters = 2;
  p.num_groups = 1;
  CHECK_OK(unsloth_optimizer_state_size(ctx, &p, &p.state_size));
  p.state = memory(p.state_size);
  CHECK_OK(unsloth_optimizer_create(ctx, &p, NULL, &optimizer));
  CHECK_PATH(unsloth_optimizer_step(optimizer, NULL), 3);
  CHECK_PATH(unsloth_gradients_scale(optimizer, 0.5f, NULL), 1);
  CHECK_PATH(unsloth_optimizer_loss_scale(optimizer, &scale), 0);
  CHECK_OK(unsloth_optimizer_set_group(optimizer, 0, &group, NULL));
  memset(&driver, 0, sizeof driver);
  CHECK_OK(unsloth_optimizer_set_group(optimizer, 0, &group, NULL));
  CHECK(driver.copies == 1 && driver.launches == 0);
  CHECK_OK(unsloth_optimizer_destroy(optimizer));
}

int main(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  params.backend = UNSLOTH_BACKEND_CUDA;
  const unsloth_status status = unsloth_context_create(&params, &ctx);
  // A build for other architectures.
  if (status == UNSLOTH_STATUS_UNSUPPORTED_DEVICE) return SKIPPED;
  CHECK_OK(status);
  rows();
  products();
  blocks();
  attention(32, 1, 100, UNSLOTH_IMPLEMENTATION_CUDA, 1);
  // Split keys are joined by a second kernel, on Hopper by the one.
  attention(32, 1, 4096, UNSLOTH_IMPLEMENTATION_CUDA, 2);
  attention(DIM, 1, 4096, UNSLOTH_IMPLEMENTATION_CUDA_HOPPER, 1);
  attention(DIM, 1000, 1000, UNSLOTH_IMPLEMENTATION_CUDA_HOPPER, 1);
  attention_merge();
  attention_backward();
  attention_block_backward();
  decoder_layer();
  // Hopper has a kernel for the whole, but for codes.
  cached(UNSLOTH_DTYPE_BF16, 1);
  cached(UNSLOTH_DTYPE_F8E4M3, 2);
  steps();
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
