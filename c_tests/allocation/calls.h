// One call of each function of the library, and what it is made with. A new function is a line of
// CALLS, and where it takes parameters a function that sets them.
#ifndef UNSLOTH_TEST_CALLS_H
#define UNSLOTH_TEST_CALLS_H

#include "check.h"

enum { TOKENS = 70, HIDDEN = 64, HEADS = 4, KV_HEADS = 2, DIM = 16, FFN = 96, VOCAB = 50 };
enum { SEQUENCES = 2, PAGES = 24, PAGE = 8 };

// What calls are made with: in memory that a process has to itself.

static unsloth_context *ctx, *created, *other;
static unsloth_kv_cache *cache, *created_cache;
static int64_t sequences[SEQUENCES], sequence, number;
static const int64_t steps[SEQUENCES] = {9, 3};
static int32_t device_count;
static size_t size;
static unsloth_implementation implementation;
static void *block, *given;
static unsloth_stream stream;
static char text[64];

// Inputs and outputs. What a call writes is checked against what it writes when nothing fails.
static float inputs[1 << 18];
static float outputs[1 << 16];
static size_t inputs_used, outputs_used;
static int32_t ids[TOKENS], positions[TOKENS], starts[2];
static _Alignas(256) char workspace[1 << 22];

static unsloth_tensor in2(int64_t d0, int64_t d1) {
  float *const at = inputs + inputs_used;
  inputs_used += (size_t)(d0 * (d1 < 0 ? 1 : d1));
  CHECK(inputs_used <= COUNT(inputs));
  return f32_tensor(at, d0, d1, -1, -1);
}

static unsloth_tensor out2(int64_t d0, int64_t d1) {
  float *const at = outputs + outputs_used;
  outputs_used += (size_t)(d0 * (d1 < 0 ? 1 : d1));
  CHECK(outputs_used <= COUNT(outputs));
  return f32_tensor(at, d0, d1, -1, -1);
}

// Rows as heads.
static unsloth_tensor heads(unsloth_tensor t, int64_t batch, int64_t tokens, int64_t num) {
  return f32_tensor(t.data, batch, tokens, num, DIM);
}

static void nothing(void) {}

static void with_context(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  params.num_threads = 2;
  CHECK_OK(unsloth_context_create(&params, &ctx));
}

static unsloth_event *event, *later, *made;
static float milliseconds;
static uint32_t is_done;
static void events_ready(void) {
  with_context();
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &event));
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &later));
  CHECK_OK(unsloth_event_record(event, NULL));
  CHECK_OK(unsloth_event_record(later, NULL));
}

static unsloth_context_parallel_tokens_params of_tokens;
static int64_t num_tokens, token_ids[8];
static void context_tokens_ready(void) {
  of_tokens = (unsloth_context_parallel_tokens_params)UNSLOTH_CONTEXT_PARALLEL_TOKENS_PARAMS_INIT;
  of_tokens.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
  of_tokens.size = 2;
  of_tokens.batch = 2;
  of_tokens.length = 7;
}

static unsloth_context_parallel_packed_params of_packed;
static int32_t packed_starts[2] = {0, 7}, packed_lengths[2][2];
static void context_packed_ready(void) {
  of_packed = (unsloth_context_parallel_packed_params)UNSLOTH_CONTEXT_PARALLEL_PACKED_PARAMS_INIT;
  of_packed.size = 2;
  of_packed.tokens = 4;
  of_packed.batch = 1;
  of_packed.cu_seqlens = packed_starts;
}

static unsloth_shard_params of_shard;
static unsloth_shard shard;
static void shard_ready(void) {
  of_shard = (unsloth_shard_params)UNSLOTH_SHARD_PARAMS_INIT;
  shard = (unsloth_shard)UNSLOTH_SHARD_INIT;
  of_shard.dtype = UNSLOTH_DTYPE_F32;
  of_shard.rows = of_shard.columns = 8;
  of_shard.size = 2;
}

static unsloth_pipeline_schedule_params of_pipeline;
static unsloth_pipeline_summary pipeline_summary;
static unsloth_pipeline_action pipeline_actions[64];
static unsloth_pipeline_simulate_params of_simulation;
static unsloth_pipeline_simulation simulation;
static void pipeline_ready(void) {
  of_pipeline = (unsloth_pipeline_schedule_params)UNSLOTH_PIPELINE_SCHEDULE_PARAMS_INIT;
  pipeline_summary = (unsloth_pipeline_summary)UNSLOTH_PIPELINE_SUMMARY_INIT;
  of_simulation = (unsloth_pipeline_simulate_params)UNSLOTH_PIPELINE_SIMULATE_PARAMS_INIT;
  simulation = (unsloth_pipeline_simulation)UNSLOTH_PIPELINE_SIMULATION_INIT;
  of_pipeline.stages = of_simulation.stages = 2;
  of_pipeline.micro_batches = of_simulation.micro_batches = 3;
  of_simulation.forward = 1;
}

static unsloth_comm *comm, *created_comm;
static unsloth_comm_id_params of_id;
static unsloth_comm_params of_comm;
static unsloth_comm_info comm_info;
static unsloth_comm_id comm_id;
static void group_params(void) {
  of_id = (unsloth_comm_id_params)UNSLOTH_COMM_ID_PARAMS_INIT;
  of_comm = (unsloth_comm_params)UNSLOTH_COMM_PARAMS_INIT;
  comm_info = (unsloth_comm_info)UNSLOTH_COMM_INFO_INIT;
  CHECK_OK(unsloth_comm_id_create(&of_id, &of_comm.id));
  of_comm.size = 1;
}
static void comm_params_ready(void) {
  with_context();
  group_params();
}
// An id serves once.
static unsloth_status ask_unsloth_comm_create(void) {
  CHECK_OK(unsloth_comm_id_create(&of_id, &of_comm.id));
  return unsloth_comm_create(ctx, &of_comm, &created_comm);
}
static void comm_ready(void) {
  comm_params_ready();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
}

static void *comm_memory;
static void comm_memory_ready(void) {
  comm_ready();
  CHECK_OK(unsloth_comm_memory_alloc(comm, 64, &comm_memory));
}

static unsloth_all_reduce_params all_reduce;
static void all_reduce_ready(void) {
  comm_ready();
  all_reduce = (unsloth_all_reduce_params)UNSLOTH_ALL_REDUCE_PARAMS_INIT;
  all_reduce.comm = comm;
  all_reduce.x = in2(TOKENS, HIDDEN);
  all_reduce.out = out2(TOKENS, HIDDEN);
}

static unsloth_all_reduce_rms_norm_params all_reduce_rms_norm;
static void all_reduce_rms_norm_ready(void) {
  comm_ready();
  all_reduce_rms_norm = (unsloth_all_reduce_rms_norm_params)UNSLOTH_ALL_REDUCE_RMS_NORM_PARAMS_INIT;
  all_reduce_rms_norm.comm = comm;
  all_reduce_rms_norm.epsilon = 1e-5f;
  all_reduce_rms_norm.x = in2(TOKENS, HIDDEN);
  all_reduce_rms_norm.out = out2(TOKENS, HIDDEN);
  all_reduce_rms_norm.weight = in2(HIDDEN, -1);
  all_reduce_rms_norm.residual = in2(TOKENS, HIDDEN);
  all_reduce_rms_norm.residual_out = out2(TOKENS, HIDDEN);
}

static unsloth_all_gather_params all_gather;
static void all_gather_ready(void) {
  comm_ready();
  all_gather = (unsloth_all_gather_params)UNSLOTH_ALL_GATHER_PARAMS_INIT;
  all_gather.comm = comm;
  all_gather.x = in2(TOKENS, HIDDEN);
  all_gather.out = out2(TOKENS, HIDDEN);
}

static unsloth_reduce_scatter_params reduce_scatter;
static void reduce_scatter_ready(void) {
  comm_ready();
  reduce_scatter = (unsloth_reduce_scatter_params)UNSLOTH_REDUCE_SCATTER_PARAMS_INIT;
  reduce_scatter.comm = comm;
  reduce_scatter.x = in2(TOKENS, HIDDEN);
  reduce_scatter.out = out2(TOKENS, HIDDEN);
}

static unsloth_broadcast_params broadcast;
static void broadcast_ready(void) {
  comm_ready();
  broadcast = (unsloth_broadcast_params)UNSLOTH_BROADCAST_PARAMS_INIT;
  broadcast.comm = comm;
  broadcast.x = in2(TOKENS, HIDDEN);
  broadcast.out = out2(TOKENS, HIDDEN);
}

static unsloth_all_to_all_params all_to_all;
static void all_to_all_ready(void) {
  comm_ready();
  all_to_all = (unsloth_all_to_all_params)UNSLOTH_ALL_TO_ALL_PARAMS_INIT;
  all_to_all.comm = comm;
  all_to_all.x = in2(TOKENS, HIDDEN);
  all_to_all.out = out2(TOKENS, HIDDEN);
}

static unsloth_send_receive_params send_receive;
static void send_receive_ready(void) {
  comm_ready();
  send_receive = (unsloth_send_receive_params)UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  send_receive.comm = comm;
  send_receive.x = in2(TOKENS, HIDDEN);
  send_receive.out = out2(TOKENS, HIDDEN);
}

static unsloth_argmax_params argmax;
static void argmax_ready(void) {
  with_context();
  argmax = (unsloth_argmax_params)UNSLOTH_ARGMAX_PARAMS_INIT;
  argmax.x = in2(TOKENS, VOCAB);
  argmax.out = tensor(ids, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
}

static unsloth_cast_params cast;
static void cast_ready(void) {
  with_context();
  cast = (unsloth_cast_params)UNSLOTH_CAST_PARAMS_INIT;
  cast.x = in2(TOKENS, HIDDEN);
  cast.out = tensor(outputs, UNSLOTH_DTYPE_BF16, TOKENS, HIDDEN, -1, -1);
}

static unsloth_quantize_params quantize;
static void quantize_ready(void) {
  with_context();
  quantize = (unsloth_quantize_params)UNSLOTH_QUANTIZE_PARAMS_INIT;
  quantize.x = in2(TOKENS, HIDDEN);
  quantize.out = out2(TOKENS, HIDDEN);
  quantize.out.dtype = UNSLOTH_DTYPE_I8;
  quantize.scale = out2(TOKENS, -1);
  quantize.sum = out2(TOKENS, -1);
  quantize.sum.dtype = UNSLOTH_DTYPE_I32;
}
static void quantize_all_ready(void) {
  quantize_ready();
  quantize.scale.shape[0] = 1;
}

static unsloth_weight_repack_params weight_repack;
static void weight_repack_ready(void) {
  with_context();
  weight_repack = (unsloth_weight_repack_params)UNSLOTH_WEIGHT_REPACK_PARAMS_INIT;
  weight_repack.packed = tensor(inputs, UNSLOTH_DTYPE_I8, TOKENS * 128 / 4 + 32, -1, -1, -1);
  weight_repack.out = out2(TOKENS, 128);
  weight_repack.out.dtype = UNSLOTH_DTYPE_TERNARY;
}

static unsloth_cross_entropy_params cross_entropy;
static void cross_entropy_ready(void) {
  with_context();
  cross_entropy = (unsloth_cross_entropy_params)UNSLOTH_CROSS_ENTROPY_PARAMS_INIT;
  cross_entropy.logits = in2(TOKENS, VOCAB);
  cross_entropy.dlogits = out2(TOKENS, VOCAB);
  cross_entropy.targets = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  cross_entropy.loss = out2(1, -1);
  CHECK_OK(
      unsloth_cross_entropy_workspace_size(ctx, &cross_entropy, &cross_entropy.workspace_size));
  cross_entropy.workspace = workspace;
}

static unsloth_embedding_params embedding;
static void embedding_ready(void) {
  with_context();
  embedding = (unsloth_embedding_params)UNSLOTH_EMBEDDING_PARAMS_INIT;
  embedding.table = in2(VOCAB, HIDDEN);
  embedding.ids = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  embedding.out = out2(TOKENS, HIDDEN);
}

// Divided among a group.
static void embedding_parallel_ready(void) {
  embedding_ready();
  group_params();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
  embedding.parallel.comm = comm;
  embedding.parallel.sequence = 1;
  embedding.vocab_size = VOCAB;
  CHECK_OK(unsloth_embedding_workspace_size(ctx, &embedding, &embedding.workspace_size));
  embedding.workspace = workspace;
}

static unsloth_embedding_backward_params embedding_backward;
static void embedding_backward_ready(void) {
  with_context();
  embedding_backward = (unsloth_embedding_backward_params)UNSLOTH_EMBEDDING_BACKWARD_PARAMS_INIT;
  embedding_backward.dout = in2(TOKENS, HIDDEN);
  embedding_backward.ids = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  embedding_backward.dweight = out2(VOCAB, HIDDEN);
}

static unsloth_rms_norm_params rms_norm;
static void rms_norm_ready(void) {
  with_context();
  rms_norm = (unsloth_rms_norm_params)UNSLOTH_RMS_NORM_PARAMS_INIT;
  rms_norm.x = in2(TOKENS, HIDDEN);
  rms_norm.weight = in2(HIDDEN, -1);
  rms_norm.residual = in2(TOKENS, HIDDEN);
  rms_norm.residual_out = out2(TOKENS, HIDDEN);
  rms_norm.out = out2(TOKENS, HIDDEN);
  rms_norm.epsilon = 1e-5f;
}

static unsloth_layer_norm_params layer_norm;
static void layer_norm_ready(void) {
  with_context();
  layer_norm = (unsloth_layer_norm_params)UNSLOTH_LAYER_NORM_PARAMS_INIT;
  layer_norm.x = in2(TOKENS, HIDDEN);
  layer_norm.weight = layer_norm.bias = in2(HIDDEN, -1);
  layer_norm.out = out2(TOKENS, HIDDEN);
  layer_norm.epsilon = 1e-5f;
}

static unsloth_rms_norm_backward_params rms_norm_backward;
static void rms_norm_backward_ready(void) {
  with_context();
  rms_norm_backward = (unsloth_rms_norm_backward_params)UNSLOTH_RMS_NORM_BACKWARD_PARAMS_INIT;
  rms_norm_backward.x = rms_norm_backward.dout = in2(TOKENS, HIDDEN);
  rms_norm_backward.weight = in2(HIDDEN, -1);
  rms_norm_backward.dx = out2(TOKENS, HIDDEN);
  rms_norm_backward.dweight = out2(HIDDEN, -1);
  rms_norm_backward.epsilon = 1e-5f;
  CHECK_OK(unsloth_rms_norm_backward_workspace_size(ctx, &rms_norm_backward,
                                                    &rms_norm_backward.workspace_size));
  rms_norm_backward.workspace = workspace;
}

static unsloth_layer_norm_backward_params layer_norm_backward;
static void layer_norm_backward_ready(void) {
  with_context();
  layer_norm_backward = (unsloth_layer_norm_backward_params)UNSLOTH_LAYER_NORM_BACKWARD_PARAMS_INIT;
  layer_norm_backward.x = layer_norm_backward.dout = in2(TOKENS, HIDDEN);
  layer_norm_backward.dx = out2(TOKENS, HIDDEN);
  layer_norm_backward.dbias = out2(HIDDEN, -1);
  layer_norm_backward.epsilon = 1e-5f;
  CHECK_OK(unsloth_layer_norm_backward_workspace_size(ctx, &layer_norm_backward,
                                                      &layer_norm_backward.workspace_size));
  layer_norm_backward.workspace = workspace;
}

static unsloth_swiglu_backward_params swiglu_backward;
static void swiglu_backward_ready(void) {
  with_context();
  swiglu_backward = (unsloth_swiglu_backward_params)UNSLOTH_SWIGLU_BACKWARD_PARAMS_INIT;
  swiglu_backward.gate_up = in2(TOKENS, 2 * HIDDEN);
  swiglu_backward.dout = in2(TOKENS, HIDDEN);
  swiglu_backward.dgate_up = out2(TOKENS, 2 * HIDDEN);
  swiglu_backward.out = out2(TOKENS, HIDDEN);
}

static unsloth_rope_params rope;
static void rope_ready(void) {
  with_context();
  rope = (unsloth_rope_params)UNSLOTH_ROPE_PARAMS_INIT;
  rope.q = heads(in2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  rope.q_out = heads(out2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  rope.k = heads(in2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  rope.k_out = heads(out2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  for (int i = 0; i < TOKENS; i++) positions[i] = 3 * i;
  rope.positions = tensor(positions, UNSLOTH_DTYPE_I32, 1, TOKENS, -1, -1);
  rope.rotation.scaling = UNSLOTH_ROPE_SCALING_YARN;
  rope.rotation.factor = 4;
  rope.rotation.original_max_positions = 128;
}

static unsloth_qk_norm_rope_params qk_norm_rope;
static void qk_norm_rope_ready(void) {
  rope_ready();
  qk_norm_rope = (unsloth_qk_norm_rope_params)UNSLOTH_QK_NORM_ROPE_PARAMS_INIT;
  qk_norm_rope.q = rope.q;
  qk_norm_rope.q_out = rope.q_out;
  qk_norm_rope.k = rope.k;
  qk_norm_rope.k_out = rope.k_out;
  qk_norm_rope.positions = rope.positions;
  qk_norm_rope.rotation = rope.rotation;
  qk_norm_rope.q_weight = qk_norm_rope.k_weight = in2(DIM, -1);
  qk_norm_rope.epsilon = 1e-5f;
}

static unsloth_qk_norm_rope_backward_params qk_norm_rope_backward;
static void qk_norm_rope_backward_ready(void) {
  unsloth_qk_norm_rope_backward_params *p = &qk_norm_rope_backward;
  qk_norm_rope_ready();
  *p = (unsloth_qk_norm_rope_backward_params)UNSLOTH_QK_NORM_ROPE_BACKWARD_PARAMS_INIT;
  p->q = p->dq_out = qk_norm_rope.q;
  p->dq = qk_norm_rope.q_out;
  p->k = p->dk_out = qk_norm_rope.k;
  p->dk = qk_norm_rope.k_out;
  p->positions = qk_norm_rope.positions;
  p->rotation = qk_norm_rope.rotation;
  p->q_weight = p->k_weight = qk_norm_rope.q_weight;
  p->dq_weight = out2(DIM, -1);
  p->epsilon = 1e-5f;
  CHECK_OK(unsloth_qk_norm_rope_backward_workspace_size(ctx, p, &p->workspace_size));
  p->workspace = workspace;
}

static unsloth_swiglu_params swiglu;
static void swiglu_ready(void) {
  with_context();
  swiglu = (unsloth_swiglu_params)UNSLOTH_SWIGLU_PARAMS_INIT;
  swiglu.gate_up = in2(TOKENS, 2 * FFN);
  swiglu.out = out2(TOKENS, FFN);
}

static unsloth_linear_params linear;
static void linear_of(int64_t rows, unsloth_dtype dtype) {
  with_context();
  linear = (unsloth_linear_params)UNSLOTH_LINEAR_PARAMS_INIT;
  linear.x = in2(rows, HIDDEN);
  linear.weight = in2(FFN, HIDDEN);
  linear.bias = in2(FFN, -1);
  linear.out = out2(rows, FFN);
  linear.x.dtype = linear.weight.dtype = linear.bias.dtype = linear.out.dtype = dtype;
  CHECK_OK(unsloth_linear_workspace_size(ctx, &linear, &linear.workspace_size));
  linear.workspace = workspace;
}
static void linear_ready(void) { linear_of(TOKENS, UNSLOTH_DTYPE_F32); }
static void linear_of_halves_ready(void) { linear_of(TOKENS, UNSLOTH_DTYPE_BF16); }
static void linear_of_a_row_ready(void) { linear_of(1, UNSLOTH_DTYPE_F32); }
static void linear_of_blocks_ready(void) {
  linear_of(4, UNSLOTH_DTYPE_F32);
  linear.weight.dtype = UNSLOTH_DTYPE_Q4_1;
}
static void linear_of_codes_ready(void) {
  linear_of(4, UNSLOTH_DTYPE_F32);
  linear.weight.dtype = UNSLOTH_DTYPE_I8;
}

static unsloth_linear_backward_params linear_backward;
static void linear_backward_of(unsloth_dtype dtype) {
  with_context();
  linear_backward = (unsloth_linear_backward_params)UNSLOTH_LINEAR_BACKWARD_PARAMS_INIT;
  linear_backward.dout = in2(TOKENS, FFN);
  linear_backward.x = in2(TOKENS, HIDDEN);
  linear_backward.weight = in2(FFN, HIDDEN);
  linear_backward.dx = out2(TOKENS, HIDDEN);
  linear_backward.dweight = out2(FFN, HIDDEN);
  linear_backward.dbias = out2(FFN, -1);
  linear_backward.dout.dtype = linear_backward.x.dtype = linear_backward.dx.dtype = dtype;
  linear_backward.weight.dtype = dtype;
  CHECK_OK(unsloth_linear_backward_workspace_size(ctx, &linear_backward,
                                                  &linear_backward.workspace_size));
  linear_backward.workspace = workspace;
}
static void linear_backward_ready(void) { linear_backward_of(UNSLOTH_DTYPE_F32); }
static void linear_backward_of_halves_ready(void) { linear_backward_of(UNSLOTH_DTYPE_BF16); }

static unsloth_linear_cross_entropy_params head;
static void head_of(unsloth_dtype dtype) {
  with_context();
  head = (unsloth_linear_cross_entropy_params)UNSLOTH_LINEAR_CROSS_ENTROPY_PARAMS_INIT;
  head.x = in2(TOKENS, HIDDEN);
  head.weight = in2(VOCAB, HIDDEN);
  head.targets = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  head.loss = out2(1, -1);
  head.losses = out2(TOKENS, -1);
  head.dx = out2(TOKENS, HIDDEN);
  head.dweight = out2(VOCAB, HIDDEN);
  head.x.dtype = head.weight.dtype = head.dx.dtype = head.dweight.dtype = dtype;
  // Chunks of many rows, and one of few.
  head.chunk_tokens = 40;
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &head, &head.workspace_size));
  CHECK(head.workspace_size <= sizeof workspace);
  head.workspace = workspace;
}
// Divided among a group.
static void head_parallel_ready(void) {
  head_of(UNSLOTH_DTYPE_F32);
  group_params();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
  head.parallel.comm = comm;
  head.parallel.sequence = 1;
  head.vocab_size = VOCAB;
  CHECK_OK(unsloth_linear_cross_entropy_workspace_size(ctx, &head, &head.workspace_size));
  CHECK(head.workspace_size <= sizeof workspace);
}
static unsloth_linear_logprob_params logprob;
static void logprob_ready(void) {
  with_context();
  logprob = (unsloth_linear_logprob_params)UNSLOTH_LINEAR_LOGPROB_PARAMS_INIT;
  logprob.x = in2(TOKENS, HIDDEN);
  logprob.weight = in2(VOCAB, HIDDEN);
  logprob.ids = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  logprob.logprobs = out2(TOKENS, -1);
  logprob.chunk_tokens = 40;
  CHECK_OK(unsloth_linear_logprob_workspace_size(ctx, &logprob, &logprob.workspace_size));
  CHECK(logprob.workspace_size <= sizeof workspace);
  logprob.workspace = workspace;
}
static unsloth_linear_logprob_backward_params logprob_backward;
static void logprob_backward_ready(void) {
  with_context();
  logprob_backward =
      (unsloth_linear_logprob_backward_params)UNSLOTH_LINEAR_LOGPROB_BACKWARD_PARAMS_INIT;
  logprob_backward.x = in2(TOKENS, HIDDEN);
  logprob_backward.weight = in2(VOCAB, HIDDEN);
  logprob_backward.ids = tensor(positions, UNSLOTH_DTYPE_I32, TOKENS, -1, -1, -1);
  for (int i = 0; i < TOKENS; i++) positions[i] = i % VOCAB;
  logprob_backward.dlogprobs = in2(TOKENS, -1);
  logprob_backward.dx = out2(TOKENS, HIDDEN);
  logprob_backward.dweight = out2(VOCAB, HIDDEN);
  logprob_backward.chunk_tokens = 40;
  CHECK_OK(unsloth_linear_logprob_backward_workspace_size(ctx, &logprob_backward,
                                                          &logprob_backward.workspace_size));
  CHECK(logprob_backward.workspace_size <= sizeof workspace);
  logprob_backward.workspace = workspace;
}
static void head_ready(void) { head_of(UNSLOTH_DTYPE_F32); }
static void head_of_halves_ready(void) { head_of(UNSLOTH_DTYPE_BF16); }

static unsloth_mlp_params mlp;
static void mlp_ready(void) {
  with_context();
  mlp = (unsloth_mlp_params)UNSLOTH_MLP_PARAMS_INIT;
  mlp.x = in2(TOKENS, HIDDEN);
  mlp.gate_weight = in2(FFN, HIDDEN);
  mlp.up_weight = in2(FFN, HIDDEN);
  mlp.down_weight = in2(HIDDEN, FFN);
  mlp.out = out2(TOKENS, HIDDEN);
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
  mlp.workspace = workspace;
}

// Divided among a group.
static void mlp_parallel_ready(void) {
  mlp_ready();
  group_params();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
  mlp.parallel.comm = comm;
  mlp.parallel.sequence = 1;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
}

// In chunks, of which there are more than a list of parts holds.
static void mlp_chunks_ready(void) {
  mlp_parallel_ready();
  mlp.parallel.sequence = 0;
  mlp.parallel.chunk_rows = TOKENS / 8;
  CHECK_OK(unsloth_mlp_workspace_size(ctx, &mlp, &mlp.workspace_size));
}

static unsloth_mlp_backward_params mlp_backward;
static void mlp_backward_ready(void) {
  mlp_ready();
  mlp_backward = (unsloth_mlp_backward_params)UNSLOTH_MLP_BACKWARD_PARAMS_INIT;
  mlp_backward.forward = &mlp;
  mlp_backward.dout = in2(TOKENS, HIDDEN);
  mlp_backward.dx = out2(TOKENS, HIDDEN);
  mlp_backward.dgate_weight = out2(FFN, HIDDEN);
  mlp_backward.dup_weight = out2(FFN, HIDDEN);
  mlp_backward.ddown_weight = out2(HIDDEN, FFN);
  CHECK_OK(unsloth_mlp_backward_workspace_size(ctx, &mlp_backward, &mlp_backward.workspace_size));
  mlp_backward.workspace = workspace;
}

static unsloth_attention_params attention;
static void attention_of(int64_t queries) {
  with_context();
  attention = (unsloth_attention_params)UNSLOTH_ATTENTION_PARAMS_INIT;
  attention.causal = 1;
  attention.q = heads(in2(queries, HEADS * DIM), 1, queries, HEADS);
  attention.k = heads(in2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention.v = heads(in2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention.out = heads(out2(queries, HEADS * DIM), 1, queries, HEADS);
  CHECK_OK(unsloth_attention_workspace_size(ctx, &attention, &attention.workspace_size));
  attention.workspace = workspace;
}
static void attention_ready(void) { attention_of(TOKENS); }
static void attention_of_a_query_ready(void) { attention_of(1); }
static void attention_packed_ready(void) {
  attention_ready();
  starts[0] = 0;
  starts[1] = TOKENS;
  attention.q = f32_tensor(attention.q.data, TOKENS, HEADS, DIM, -1);
  attention.out = f32_tensor(attention.out.data, TOKENS, HEADS, DIM, -1);
  attention.cu_seqlens_q = tensor(starts, UNSLOTH_DTYPE_I32, 2, -1, -1, -1);
  CHECK_OK(unsloth_attention_workspace_size(ctx, &attention, &attention.workspace_size));
}

static unsloth_attention_backward_params attention_backward;
static void attention_backward_ready(void) {
  with_context();
  attention_backward = (unsloth_attention_backward_params)UNSLOTH_ATTENTION_BACKWARD_PARAMS_INIT;
  attention_backward.causal = 1;
  attention_backward.q = heads(in2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  attention_backward.k = heads(in2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention_backward.v = heads(in2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention_backward.out = heads(in2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  attention_backward.lse = f32_tensor(in2(HEADS, TOKENS).data, 1, HEADS, TOKENS, -1);
  attention_backward.dout = heads(in2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  attention_backward.bias = f32_tensor(in2(HEADS, 1).data, 1, HEADS, 1, 1);
  attention_backward.dq = heads(out2(TOKENS, HEADS * DIM), 1, TOKENS, HEADS);
  attention_backward.dk = heads(out2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention_backward.dv = heads(out2(TOKENS, KV_HEADS * DIM), 1, TOKENS, KV_HEADS);
  attention_backward.dbias = f32_tensor(out2(HEADS, 1).data, 1, HEADS, 1, 1);
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &attention_backward,
                                                     &attention_backward.workspace_size));
  attention_backward.workspace = workspace;
}

static unsloth_attention_merge_params attention_merge;
static void attention_merge_ready(void) {
  with_context();
  attention_merge = (unsloth_attention_merge_params)UNSLOTH_ATTENTION_MERGE_PARAMS_INIT;
  attention_merge.outs = heads(in2(2 * TOKENS, HEADS * DIM), 2, TOKENS, HEADS);
  attention_merge.lses = f32_tensor(in2(2 * HEADS, TOKENS).data, 2, HEADS, TOKENS, -1);
  attention_merge.out = f32_tensor(out2(TOKENS, HEADS * DIM).data, TOKENS, HEADS, DIM, -1);
}

static unsloth_context_parallel_attention_params context_parallel;
static void context_parallel_ready(void) {
  attention_ready();
  group_params();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
  context_parallel =
      (unsloth_context_parallel_attention_params)UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
  context_parallel.comm = comm;
  context_parallel.causal = 1;
  context_parallel.q = attention.q;
  context_parallel.k = attention.k;
  context_parallel.v = attention.v;
  context_parallel.out = attention.out;
  CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, &context_parallel,
                                                             &context_parallel.workspace_size));
  context_parallel.workspace = workspace;
}

static unsloth_context_parallel_attention_backward_params context_backward;
static void context_backward_ready(void) {
  attention_backward_ready();
  group_params();
  CHECK_OK(unsloth_comm_create(ctx, &of_comm, &comm));
  context_backward = (unsloth_context_parallel_attention_backward_params)
      UNSLOTH_CONTEXT_PARALLEL_ATTENTION_BACKWARD_PARAMS_INIT;
  context_backward.comm = comm;
  context_backward.causal = 1;
  context_backward.q = attention_backward.q;
  context_backward.k = attention_backward.k;
  context_backward.v = attention_backward.v;
  context_backward.out = attention_backward.out;
  context_backward.lse = attention_backward.lse;
  context_backward.dout = attention_backward.dout;
  context_backward.dq = attention_backward.dq;
  context_backward.dk = attention_backward.dk;
  context_backward.dv = attention_backward.dv;
  CHECK_OK(unsloth_context_parallel_attention_backward_workspace_size(
      ctx, &context_backward, &context_backward.workspace_size));
  context_backward.workspace = workspace;
}

static unsloth_kv_cache_params cache_params;
static void cache_params_ready(void) {
  with_context();
  cache_params = (unsloth_kv_cache_params)UNSLOTH_KV_CACHE_PARAMS_INIT;
  cache_params.dtype = UNSLOTH_DTYPE_F32;
  cache_params.num_layers = 2;
  cache_params.num_kv_heads = KV_HEADS;
  cache_params.head_dim = DIM;
  cache_params.page_size = PAGE;
  cache_params.num_pages = PAGES;
}

static void cache_ready(void) {
  cache_params_ready();
  CHECK_OK(unsloth_kv_cache_create(ctx, &cache_params, &cache));
  for (int i = 0; i < SEQUENCES; i++)
    CHECK_OK(unsloth_kv_cache_sequence_create(cache, &sequences[i]));
}

// Two sequences with tokens, the first shared with a fork that has a page of its own.
static void batch_ready(void) {
  int64_t fork, one = 2 * PAGE;
  cache_ready();
  CHECK_OK(unsloth_kv_cache_extend(cache, sequences, steps, SEQUENCES, NULL));
  CHECK_OK(unsloth_kv_cache_sequence_fork(cache, sequences[0], &fork));
  CHECK_OK(unsloth_kv_cache_extend(cache, &fork, &one, 1, NULL));
  CHECK_OK(unsloth_kv_cache_extend(cache, sequences, steps, SEQUENCES, NULL));
}

static const float cache_scale = 0.5F;
static void cache_of_codes_ready(void) {
  cache_params_ready();
  cache_params.dtype = UNSLOTH_DTYPE_F8E4M3;
  CHECK_OK(unsloth_kv_cache_create(ctx, &cache_params, &cache));
}

static unsloth_kv_cache_append_params append;
static void append_ready(void) {
  const int64_t tokens = steps[0] + steps[1];
  batch_ready();
  append = (unsloth_kv_cache_append_params)UNSLOTH_KV_CACHE_APPEND_PARAMS_INIT;
  append.rotate = 1;
  append.k = in2(tokens, KV_HEADS * DIM);
  append.v = in2(tokens, KV_HEADS * DIM);
  append.k = f32_tensor(append.k.data, tokens, KV_HEADS, DIM, -1);
  append.v = f32_tensor(append.v.data, tokens, KV_HEADS, DIM, -1);
  append.q = in2(tokens, HEADS * DIM);
  append.q = f32_tensor(append.q.data, tokens, HEADS, DIM, -1);
}

static void prepare_ready(void) {
  const int64_t tokens = steps[0] + steps[1];
  append_ready();
  for (append.layer = 0; append.layer < 2; append.layer++)
    CHECK_OK(unsloth_kv_cache_append(cache, &append, NULL));
  attention = (unsloth_attention_params)UNSLOTH_ATTENTION_PARAMS_INIT;
  attention.causal = 1;
  attention.q = f32_tensor(in2(tokens, HEADS * DIM).data, tokens, HEADS, DIM, -1);
  attention.out = f32_tensor(out2(tokens, HEADS * DIM).data, tokens, HEADS, DIM, -1);
}
static void attention_paged_ready(void) {
  prepare_ready();
  CHECK_OK(unsloth_kv_cache_attention_prepare(cache, 1, &attention));
  CHECK_OK(unsloth_attention_workspace_size(ctx, &attention, &attention.workspace_size));
  attention.workspace = workspace;
}

static unsloth_attention_block_params attention_block;
static void attention_block_of(int64_t tokens) {
  unsloth_attention_block_params *const p = &attention_block;
  *p = (unsloth_attention_block_params)UNSLOTH_ATTENTION_BLOCK_PARAMS_INIT;
  p->num_heads = HEADS;
  p->num_kv_heads = KV_HEADS;
  p->head_dim = DIM;
  p->rotate = 1;
  p->norm_epsilon = 1e-5f;
  p->x = in2(tokens, HIDDEN);
  p->qkv_weight = in2((HEADS + 2 * KV_HEADS) * DIM, HIDDEN);
  p->q_norm = in2(DIM, -1);
  p->k_norm = in2(DIM, -1);
  p->out_weight = in2(HIDDEN, HEADS * DIM);
  p->out = out2(tokens, HIDDEN);
}
static void attention_block_ready(void) {
  with_context();
  attention_block_of(TOKENS);
  attention_block.x = f32_tensor(attention_block.x.data, 1, TOKENS, HIDDEN, -1);
  attention_block.out = f32_tensor(attention_block.out.data, 1, TOKENS, HIDDEN, -1);
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &attention_block,
                                                  &attention_block.workspace_size));
  attention_block.workspace = workspace;
}

static unsloth_attention_block_params of_layer;
static unsloth_mlp_params mlp_of_layer;
static unsloth_decoder_layer_params decoder_layer;
static void decoder_layer_ready(void) {
  attention_block_ready();
  of_layer = attention_block;
  memset(&of_layer.q_norm, 0, sizeof of_layer.q_norm);
  memset(&of_layer.k_norm, 0, sizeof of_layer.k_norm);
  mlp_of_layer = (unsloth_mlp_params)UNSLOTH_MLP_PARAMS_INIT;
  mlp_of_layer.gate_up_weight = in2(2 * HIDDEN, HIDDEN);
  mlp_of_layer.down_weight = in2(HIDDEN, HIDDEN);
  decoder_layer = (unsloth_decoder_layer_params)UNSLOTH_DECODER_LAYER_PARAMS_INIT;
  decoder_layer.checkpointing = UNSLOTH_CHECKPOINTING_FULL;
  decoder_layer.norm_epsilon = 1e-5f;
  decoder_layer.attention = &of_layer;
  decoder_layer.mlp = &mlp_of_layer;
  decoder_layer.x = of_layer.x;
  decoder_layer.attention_norm = decoder_layer.mlp_norm = in2(HIDDEN, -1);
  decoder_layer.out = of_layer.out;
  CHECK_OK(
      unsloth_decoder_layer_workspace_size(ctx, &decoder_layer, &decoder_layer.workspace_size));
  decoder_layer.workspace = workspace;
}

static unsloth_decoder_layer_backward_params layer_backward;
static void layer_backward_ready(void) {
  decoder_layer_ready();
  layer_backward =
      (unsloth_decoder_layer_backward_params)UNSLOTH_DECODER_LAYER_BACKWARD_PARAMS_INIT;
  layer_backward.forward = &decoder_layer;
  layer_backward.dout = f32_tensor(out2(TOKENS, HIDDEN).data, 1, TOKENS, HIDDEN, -1);
  layer_backward.dmlp_norm = out2(HIDDEN, -1);
  CHECK_OK(unsloth_decoder_layer_backward_workspace_size(ctx, &layer_backward,
                                                         &layer_backward.workspace_size));
  layer_backward.workspace = workspace;
}

static unsloth_attention_block_backward_params block_backward;
static void block_backward_ready(void) {
  attention_block_ready();
  block_backward =
      (unsloth_attention_block_backward_params)UNSLOTH_ATTENTION_BLOCK_BACKWARD_PARAMS_INIT;
  block_backward.forward = &attention_block;
  block_backward.dout = f32_tensor(in2(TOKENS, HIDDEN).data, 1, TOKENS, HIDDEN, -1);
  block_backward.dx = f32_tensor(out2(TOKENS, HIDDEN).data, 1, TOKENS, HIDDEN, -1);
  block_backward.dqkv_weight = out2((HEADS + 2 * KV_HEADS) * DIM, HIDDEN);
  block_backward.dq_norm = out2(DIM, -1);
  block_backward.dout_weight = out2(HIDDEN, HEADS * DIM);
  CHECK_OK(unsloth_attention_block_backward_workspace_size(ctx, &block_backward,
                                                           &block_backward.workspace_size));
  block_backward.workspace = workspace;
}

static void attention_block_cached_ready(void) {
  batch_ready();
  attention_block_of(steps[0] + steps[1]);
  attention_block.cache = cache;
  attention_block.layer = 1;
  CHECK_OK(unsloth_attention_block_workspace_size(ctx, &attention_block,
                                                  &attention_block.workspace_size));
  attention_block.workspace = workspace;
}

static unsloth_model_params model;
static unsloth_parameter_count parameters;
static unsloth_attention_memory_params of_attention;
static unsloth_attention_memory attention_memory;
static unsloth_kv_cache_memory cache_memory;
static unsloth_inference_memory_params of_inference;
static unsloth_inference_memory inference_memory;
static unsloth_training_memory_params of_training, of_step;
static unsloth_training_memory training_memory;
static unsloth_checkpoint_plan_params stack;
static unsloth_checkpoint_summary planned;
static unsloth_checkpoint_action actions[64];
static void plan_ready(void) {
  stack = (unsloth_checkpoint_plan_params)UNSLOTH_CHECKPOINT_PLAN_PARAMS_INIT;
  planned = (unsloth_checkpoint_summary)UNSLOTH_CHECKPOINT_SUMMARY_INIT;
  stack.num_layers = 9;
  stack.hidden_bytes = 10;
  stack.saved_bytes = 40;
}

static void estimates_ready(void) {
  cache_params_ready();
  model = (unsloth_model_params)UNSLOTH_MODEL_PARAMS_INIT;
  model.vocab_size = VOCAB;
  model.hidden_size = HIDDEN;
  model.intermediate_size = FFN;
  model.num_layers = 2;
  model.num_heads = HEADS;
  model.num_kv_heads = KV_HEADS;
  model.head_dim = DIM;
  parameters = (unsloth_parameter_count)UNSLOTH_PARAMETER_COUNT_INIT;
  of_attention = (unsloth_attention_memory_params)UNSLOTH_ATTENTION_MEMORY_PARAMS_INIT;
  of_attention.dtype = UNSLOTH_DTYPE_F32;
  of_attention.batch_size = 1;
  of_attention.num_queries = of_attention.num_keys = TOKENS;
  of_attention.num_heads = HEADS;
  of_attention.num_kv_heads = KV_HEADS;
  of_attention.head_dim = DIM;
  attention_memory = (unsloth_attention_memory)UNSLOTH_ATTENTION_MEMORY_INIT;
  cache_memory = (unsloth_kv_cache_memory)UNSLOTH_KV_CACHE_MEMORY_INIT;
  of_inference = (unsloth_inference_memory_params)UNSLOTH_INFERENCE_MEMORY_PARAMS_INIT;
  of_inference.weight_dtype = of_inference.dtype = UNSLOTH_DTYPE_F32;
  of_inference.model = &model;
  of_inference.kv_cache = &cache_params;
  of_inference.batch_size = 1;
  of_inference.num_tokens = TOKENS;
  of_inference.num_logits = 1;
  inference_memory = (unsloth_inference_memory)UNSLOTH_INFERENCE_MEMORY_INIT;
  of_training = (unsloth_training_memory_params)UNSLOTH_TRAINING_MEMORY_PARAMS_INIT;
  of_training.dtype = UNSLOTH_DTYPE_BF16;
  of_training.model = &model;
  of_training.batch_size = 1;
  of_training.sequence_length = TOKENS;
  training_memory = (unsloth_training_memory)UNSLOTH_TRAINING_MEMORY_INIT;
  of_step = of_training;
  of_step.gradient_dtype = UNSLOTH_DTYPE_F32;
  of_step.segment_layers = 1;
  of_step.ctx = ctx;
}

static unsloth_memory_stats stats;
static unsloth_kv_cache_stats cache_stats;
static unsloth_kv_cache_batch batch;
static unsloth_kv_cache_sequence_info info;
static unsloth_device_info device_info;
static unsloth_tensor keys, values;
static unsloth_context_params of_context;
static void structs_ready(void) {
  batch_ready();
  stats = (unsloth_memory_stats)UNSLOTH_MEMORY_STATS_INIT;
  cache_stats = (unsloth_kv_cache_stats)UNSLOTH_KV_CACHE_STATS_INIT;
  batch = (unsloth_kv_cache_batch)UNSLOTH_KV_CACHE_BATCH_INIT;
  info = (unsloth_kv_cache_sequence_info)UNSLOTH_KV_CACHE_SEQUENCE_INFO_INIT;
  device_info = (unsloth_device_info)UNSLOTH_DEVICE_INFO_INIT;
}
static void context_params_ready(void) {
  of_context = (unsloth_context_params)UNSLOTH_CONTEXT_PARAMS_INIT;
  of_context.num_threads = 2;
}
static void memory_ready(void) {
  with_context();
  context_params_ready();
  CHECK_OK(unsloth_context_create(&of_context, &other));
  CHECK_OK(unsloth_memory_alloc(ctx, 4096, &given));
}

// A small DLTensor of dlpack.h: f32 [2, 3] on the host.
static struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} capsule;
static int64_t capsule_shape[2] = {2, 3};
static void capsule_ready(void) {
  capsule.data = outputs;
  capsule.device_type = 1;
  capsule.ndim = 2;
  capsule.code = 2;
  capsule.bits = 32;
  capsule.lanes = 1;
  capsule.shape = capsule_shape;
}
// A DLManagedTensorVersioned of it.
static struct {
  uint32_t major, minor;
  void *manager;
  void (*deleter)(void *self);
  uint64_t flags;
  unsigned char tensor[sizeof capsule];
} versioned;
static void versioned_ready(void) {
  capsule_ready();
  versioned.major = 1;
  memcpy(versioned.tensor, &capsule, sizeof capsule);
}
static void bad_capsule_ready(void) {
  capsule_ready();
  capsule.lanes = 4;
}

// An optimizer of two parameters.
static unsloth_optimizer *optimizer, *created_optimizer;
static unsloth_optimizer_params of_optimizer;
static unsloth_parameter parameters_of[2];
static unsloth_parameter_group group;
static unsloth_optimizer_status optimizer_status;
static char saved_optimizer[1 << 17];
static size_t saved_size;
static void optimizer_params_ready(void) {
  with_context();
  of_optimizer = (unsloth_optimizer_params)UNSLOTH_OPTIMIZER_PARAMS_INIT;
  group.learning_rate = 0.01f;
  for (int i = 0; i < 2; i++) {
    unsloth_parameter *const p = &parameters_of[i];
    p->weight = out2(HIDDEN, FFN);
    p->gradient = out2(HIDDEN, FFN);
    fill_random((float *)p->weight.data, HIDDEN * FFN, (uint32_t)i);
    fill_random((float *)p->gradient.data, HIDDEN * FFN, (uint32_t)i + 2);
  }
  of_optimizer.max_norm = 1;
  of_optimizer.parameters = parameters_of;
  of_optimizer.num_parameters = 2;
  of_optimizer.groups = &group;
  of_optimizer.num_groups = 1;
  of_optimizer.state = workspace;
  of_optimizer.state_size = sizeof workspace;
}
static void optimizer_ready(void) {
  optimizer_params_ready();
  CHECK_OK(unsloth_optimizer_create(ctx, &of_optimizer, NULL, &optimizer));
  optimizer_status = (unsloth_optimizer_status)UNSLOTH_OPTIMIZER_STATUS_INIT;
}
static void saved_ready(void) {
  optimizer_ready();
  CHECK_OK(unsloth_optimizer_saved_size(optimizer, &saved_size));
  CHECK(saved_size <= sizeof saved_optimizer);
  CHECK_OK(unsloth_optimizer_save(optimizer, saved_optimizer, saved_size, NULL));
}

// Arguments that are refused, in words that have a value in them.
static void refused_norm_ready(void) {
  rms_norm_ready();
  rms_norm.x.shape[1] = 0x7777;
}
static void refused_attention_ready(void) {
  attention_ready();
  attention.k.shape[3] = 7;
}
static void refused_block_ready(void) {
  attention_block_ready();
  attention_block.qkv_weight.shape[0] = 7;
}
// Functions that cannot fail.
static unsloth_status ask_unsloth_version(void) { return unsloth_version() == NULL; }
static unsloth_status ask_unsloth_build_info(void) { return unsloth_build_info() == NULL; }
static unsloth_status ask_unsloth_status_name(void) { return unsloth_status_name(7) == NULL; }
static unsloth_status ask_unsloth_format_bytes(void) {
  return unsloth_format_bytes(1 << 30, text, sizeof text) == 0;
}
static unsloth_status ask_unsloth_last_error_message(void) {
  return unsloth_last_error_message(text, sizeof text) != 0;
}

// More pages than there are, though each sequence may be so long.
static const int64_t too_many[SEQUENCES] = {150, 150};

// name, what makes it ready, function, arguments, expected status
#define OK UNSLOTH_STATUS_SUCCESS
#define INVALID UNSLOTH_STATUS_INVALID_ARGUMENT
#define CALLS(X)                                                                                   \
  X(warm_up, with_context, unsloth_context_warm_up, (ctx, NULL, 0), OK)                            \
  X(argmax_supported, argmax_ready, unsloth_argmax_supported, (ctx, &argmax, NULL), OK)            \
  X(argmax, argmax_ready, unsloth_argmax_forward, (ctx, &argmax, NULL), OK)                        \
  X(cast_supported, cast_ready, unsloth_cast_supported, (ctx, &cast, NULL), OK)                    \
  X(cast, cast_ready, unsloth_cast_forward, (ctx, &cast, NULL), OK)                                \
  X(quantize_supported, quantize_ready, unsloth_quantize_supported, (ctx, &quantize, NULL), OK)    \
  X(quantize_workspace, quantize_ready, unsloth_quantize_workspace_size, (ctx, &quantize, &size),  \
    OK)                                                                                            \
  X(quantize, quantize_ready, unsloth_quantize_forward, (ctx, &quantize, NULL), OK)                \
  X(quantize_all, quantize_all_ready, unsloth_quantize_forward, (ctx, &quantize, NULL), OK)        \
  X(weight_repack_supported, weight_repack_ready, unsloth_weight_repack_supported,                 \
    (ctx, &weight_repack, NULL), OK)                                                               \
  X(weight_repack, weight_repack_ready, unsloth_weight_repack_forward,                             \
    (ctx, &weight_repack, NULL), OK)                                                               \
  X(embedding_supported, embedding_ready, unsloth_embedding_supported, (ctx, &embedding, NULL),    \
    OK)                                                                                            \
  X(embedding_workspace, embedding_parallel_ready, unsloth_embedding_workspace_size,               \
    (ctx, &embedding, &size), OK)                                                                  \
  X(embedding, embedding_ready, unsloth_embedding_forward, (ctx, &embedding, NULL), OK)            \
  X(embedding_parallel, embedding_parallel_ready, unsloth_embedding_forward,                       \
    (ctx, &embedding, NULL), OK)                                                                   \
  X(embedding_backward_supported, embedding_backward_ready, unsloth_embedding_backward_supported,  \
    (ctx, &embedding_backward, NULL), OK)                                                          \
  X(embedding_backward_workspace, embedding_backward_ready,                                        \
    unsloth_embedding_backward_workspace_size, (ctx, &embedding_backward, &size), OK)              \
  X(embedding_backward, embedding_backward_ready, unsloth_embedding_backward,                      \
    (ctx, &embedding_backward, NULL), OK)                                                          \
  X(rms_norm_supported, rms_norm_ready, unsloth_rms_norm_supported, (ctx, &rms_norm, NULL), OK)    \
  X(rms_norm, rms_norm_ready, unsloth_rms_norm_forward, (ctx, &rms_norm, NULL), OK)                \
  X(cross_entropy_supported, cross_entropy_ready, unsloth_cross_entropy_supported,                 \
    (ctx, &cross_entropy, NULL), OK)                                                               \
  X(cross_entropy_workspace, cross_entropy_ready, unsloth_cross_entropy_workspace_size,            \
    (ctx, &cross_entropy, &size), OK)                                                              \
  X(cross_entropy, cross_entropy_ready, unsloth_cross_entropy_forward,                             \
    (ctx, &cross_entropy, NULL), OK)                                                               \
  X(rms_norm_backward_supported, rms_norm_backward_ready, unsloth_rms_norm_backward_supported,     \
    (ctx, &rms_norm_backward, NULL), OK)                                                           \
  X(rms_norm_backward_workspace, rms_norm_backward_ready,                                          \
    unsloth_rms_norm_backward_workspace_size, (ctx, &rms_norm_backward, &size), OK)                \
  X(rms_norm_backward, rms_norm_backward_ready, unsloth_rms_norm_backward,                         \
    (ctx, &rms_norm_backward, NULL), OK)                                                           \
  X(layer_norm_backward_supported, layer_norm_backward_ready,                                      \
    unsloth_layer_norm_backward_supported, (ctx, &layer_norm_backward, NULL), OK)                  \
  X(layer_norm_backward_workspace, layer_norm_backward_ready,                                      \
    unsloth_layer_norm_backward_workspace_size, (ctx, &layer_norm_backward, &size), OK)            \
  X(layer_norm_backward, layer_norm_backward_ready, unsloth_layer_norm_backward,                   \
    (ctx, &layer_norm_backward, NULL), OK)                                                         \
  X(swiglu_backward_supported, swiglu_backward_ready, unsloth_swiglu_backward_supported,           \
    (ctx, &swiglu_backward, NULL), OK)                                                             \
  X(swiglu_backward, swiglu_backward_ready, unsloth_swiglu_backward,                               \
    (ctx, &swiglu_backward, NULL), OK)                                                             \
  X(layer_norm_supported, layer_norm_ready, unsloth_layer_norm_supported,                          \
    (ctx, &layer_norm, NULL), OK)                                                                  \
  X(layer_norm, layer_norm_ready, unsloth_layer_norm_forward, (ctx, &layer_norm, NULL), OK)        \
  X(rope_supported, rope_ready, unsloth_rope_supported, (ctx, &rope, NULL), OK)                    \
  X(rope, rope_ready, unsloth_rope_forward, (ctx, &rope, NULL), OK)                                \
  X(qk_norm_rope_supported, qk_norm_rope_ready, unsloth_qk_norm_rope_supported,                    \
    (ctx, &qk_norm_rope, NULL), OK)                                                                \
  X(qk_norm_rope, qk_norm_rope_ready, unsloth_qk_norm_rope_forward, (ctx, &qk_norm_rope, NULL),    \
    OK)                                                                                            \
  X(qk_norm_rope_backward_supported, qk_norm_rope_backward_ready,                                  \
    unsloth_qk_norm_rope_backward_supported, (ctx, &qk_norm_rope_backward, NULL), OK)              \
  X(qk_norm_rope_backward_workspace, qk_norm_rope_backward_ready,                                  \
    unsloth_qk_norm_rope_backward_workspace_size, (ctx, &qk_norm_rope_backward, &size), OK)        \
  X(qk_norm_rope_backward, qk_norm_rope_backward_ready, unsloth_qk_norm_rope_backward,             \
    (ctx, &qk_norm_rope_backward, NULL), OK)                                                       \
  X(swiglu_supported, swiglu_ready, unsloth_swiglu_supported, (ctx, &swiglu, NULL), OK)            \
  X(swiglu, swiglu_ready, unsloth_swiglu_forward, (ctx, &swiglu, NULL), OK)                        \
  X(linear_supported, linear_ready, unsloth_linear_supported, (ctx, &linear, &implementation), OK) \
  X(linear_workspace, linear_ready, unsloth_linear_workspace_size, (ctx, &linear, &size), OK)      \
  X(linear, linear_ready, unsloth_linear_forward, (ctx, &linear, NULL), OK)                        \
  X(linear_halves, linear_of_halves_ready, unsloth_linear_forward, (ctx, &linear, NULL), OK)       \
  X(linear_row, linear_of_a_row_ready, unsloth_linear_forward, (ctx, &linear, NULL), OK)           \
  X(linear_blocks, linear_of_blocks_ready, unsloth_linear_forward, (ctx, &linear, NULL), OK)       \
  X(linear_codes, linear_of_codes_ready, unsloth_linear_forward, (ctx, &linear, NULL), OK)         \
  X(linear_backward_supported, linear_backward_ready, unsloth_linear_backward_supported,           \
    (ctx, &linear_backward, NULL), OK)                                                             \
  X(linear_backward_workspace, linear_backward_ready, unsloth_linear_backward_workspace_size,      \
    (ctx, &linear_backward, &size), OK)                                                            \
  X(linear_backward, linear_backward_ready, unsloth_linear_backward,                               \
    (ctx, &linear_backward, NULL), OK)                                                             \
  X(linear_backward_halves, linear_backward_of_halves_ready, unsloth_linear_backward,              \
    (ctx, &linear_backward, NULL), OK)                                                             \
  X(linear_cross_entropy_supported, head_ready, unsloth_linear_cross_entropy_supported,            \
    (ctx, &head, NULL), OK)                                                                        \
  X(linear_cross_entropy_workspace, head_ready, unsloth_linear_cross_entropy_workspace_size,       \
    (ctx, &head, &size), OK)                                                                       \
  X(linear_cross_entropy, head_ready, unsloth_linear_cross_entropy_forward, (ctx, &head, NULL),    \
    OK)                                                                                            \
  X(linear_cross_entropy_parallel, head_parallel_ready, unsloth_linear_cross_entropy_forward,      \
    (ctx, &head, NULL), OK)                                                                        \
  X(linear_cross_entropy_halves, head_of_halves_ready, unsloth_linear_cross_entropy_forward,       \
    (ctx, &head, NULL), OK)                                                                        \
  X(linear_logprob_supported, logprob_ready, unsloth_linear_logprob_supported,                     \
    (ctx, &logprob, NULL), OK)                                                                     \
  X(linear_logprob_workspace, logprob_ready, unsloth_linear_logprob_workspace_size,                \
    (ctx, &logprob, &size), OK)                                                                    \
  X(linear_logprob, logprob_ready, unsloth_linear_logprob_forward, (ctx, &logprob, NULL), OK)      \
  X(linear_logprob_backward_supported, logprob_backward_ready,                                     \
    unsloth_linear_logprob_backward_supported, (ctx, &logprob_backward, NULL), OK)                 \
  X(linear_logprob_backward_workspace, logprob_backward_ready,                                     \
    unsloth_linear_logprob_backward_workspace_size, (ctx, &logprob_backward, &size), OK)           \
  X(linear_logprob_backward, logprob_backward_ready, unsloth_linear_logprob_backward,              \
    (ctx, &logprob_backward, NULL), OK)                                                            \
  X(mlp_supported, mlp_ready, unsloth_mlp_supported, (ctx, &mlp, NULL), OK)                        \
  X(mlp_workspace, mlp_ready, unsloth_mlp_workspace_size, (ctx, &mlp, &size), OK)                  \
  X(mlp, mlp_ready, unsloth_mlp_forward, (ctx, &mlp, NULL), OK)                                    \
  X(mlp_parallel, mlp_parallel_ready, unsloth_mlp_forward, (ctx, &mlp, NULL), OK)                  \
  X(mlp_chunks, mlp_chunks_ready, unsloth_mlp_forward, (ctx, &mlp, NULL), OK)                      \
  X(mlp_backward_supported, mlp_backward_ready, unsloth_mlp_backward_supported,                    \
    (ctx, &mlp_backward, NULL), OK)                                                                \
  X(mlp_backward_workspace, mlp_backward_ready, unsloth_mlp_backward_workspace_size,               \
    (ctx, &mlp_backward, &size), OK)                                                               \
  X(mlp_backward, mlp_backward_ready, unsloth_mlp_backward, (ctx, &mlp_backward, NULL), OK)        \
  X(attention_supported, attention_ready, unsloth_attention_supported, (ctx, &attention, NULL),    \
    OK)                                                                                            \
  X(attention_workspace, attention_ready, unsloth_attention_workspace_size,                        \
    (ctx, &attention, &size), OK)                                                                  \
  X(attention, attention_ready, unsloth_attention_forward, (ctx, &attention, NULL), OK)            \
  X(attention_query, attention_of_a_query_ready, unsloth_attention_forward,                        \
    (ctx, &attention, NULL), OK)                                                                   \
  X(attention_packed, attention_packed_ready, unsloth_attention_forward, (ctx, &attention, NULL),  \
    OK)                                                                                            \
  X(attention_paged, attention_paged_ready, unsloth_attention_forward, (ctx, &attention, NULL),    \
    OK)                                                                                            \
  X(attention_backward_supported, attention_backward_ready, unsloth_attention_backward_supported,  \
    (ctx, &attention_backward, NULL), OK)                                                          \
  X(attention_backward_workspace, attention_backward_ready,                                        \
    unsloth_attention_backward_workspace_size, (ctx, &attention_backward, &size), OK)              \
  X(attention_backward, attention_backward_ready, unsloth_attention_backward,                      \
    (ctx, &attention_backward, NULL), OK)                                                          \
  X(attention_merge_supported, attention_merge_ready, unsloth_attention_merge_supported,           \
    (ctx, &attention_merge, NULL), OK)                                                             \
  X(attention_merge, attention_merge_ready, unsloth_attention_merge_forward,                       \
    (ctx, &attention_merge, NULL), OK)                                                             \
  X(context_parallel_supported, context_parallel_ready,                                            \
    unsloth_context_parallel_attention_supported, (ctx, &context_parallel, NULL), OK)              \
  X(context_parallel_workspace, context_parallel_ready,                                            \
    unsloth_context_parallel_attention_workspace_size, (ctx, &context_parallel, &size), OK)        \
  X(context_parallel, context_parallel_ready, unsloth_context_parallel_attention_forward,          \
    (ctx, &context_parallel, NULL), OK)                                                            \
  X(context_backward_supported, context_backward_ready,                                            \
    unsloth_context_parallel_attention_backward_supported, (ctx, &context_backward, NULL), OK)     \
  X(context_backward_workspace, context_backward_ready,                                            \
    unsloth_context_parallel_attention_backward_workspace_size, (ctx, &context_backward, &size),   \
    OK)                                                                                            \
  X(context_backward, context_backward_ready, unsloth_context_parallel_attention_backward,         \
    (ctx, &context_backward, NULL), OK)                                                            \
  X(block_supported, attention_block_ready, unsloth_attention_block_supported,                     \
    (ctx, &attention_block, NULL), OK)                                                             \
  X(block_workspace, attention_block_ready, unsloth_attention_block_workspace_size,                \
    (ctx, &attention_block, &size), OK)                                                            \
  X(block, attention_block_ready, unsloth_attention_block_forward, (ctx, &attention_block, NULL),  \
    OK)                                                                                            \
  X(block_backward_supported, block_backward_ready, unsloth_attention_block_backward_supported,    \
    (ctx, &block_backward, NULL), OK)                                                              \
  X(block_backward_workspace, block_backward_ready,                                                \
    unsloth_attention_block_backward_workspace_size, (ctx, &block_backward, &size), OK)            \
  X(block_backward, block_backward_ready, unsloth_attention_block_backward,                        \
    (ctx, &block_backward, NULL), OK)                                                              \
  X(layer_supported, decoder_layer_ready, unsloth_decoder_layer_supported,                         \
    (ctx, &decoder_layer, NULL), OK)                                                               \
  X(layer_saved, decoder_layer_ready, unsloth_decoder_layer_saved_size,                            \
    (ctx, &decoder_layer, &size), OK)                                                              \
  X(layer_workspace, decoder_layer_ready, unsloth_decoder_layer_workspace_size,                    \
    (ctx, &decoder_layer, &size), OK)                                                              \
  X(layer, decoder_layer_ready, unsloth_decoder_layer_forward, (ctx, &decoder_layer, NULL), OK)    \
  X(layer_backward_supported, layer_backward_ready, unsloth_decoder_layer_backward_supported,      \
    (ctx, &layer_backward, NULL), OK)                                                              \
  X(layer_backward_workspace, layer_backward_ready, unsloth_decoder_layer_backward_workspace_size, \
    (ctx, &layer_backward, &size), OK)                                                             \
  X(layer_backward, layer_backward_ready, unsloth_decoder_layer_backward,                          \
    (ctx, &layer_backward, NULL), OK)                                                              \
  X(block_cached, attention_block_cached_ready, unsloth_attention_block_forward,                   \
    (ctx, &attention_block, NULL), OK)                                                             \
  X(optimizer_supported, optimizer_params_ready, unsloth_optimizer_supported,                      \
    (ctx, &of_optimizer, &implementation), OK)                                                     \
  X(optimizer_state_size, optimizer_params_ready, unsloth_optimizer_state_size,                    \
    (ctx, &of_optimizer, &size), OK)                                                               \
  X(optimizer_create, optimizer_params_ready, unsloth_optimizer_create,                            \
    (ctx, &of_optimizer, NULL, &created_optimizer), OK)                                            \
  X(optimizer_destroy, optimizer_ready, unsloth_optimizer_destroy, (optimizer), OK)                \
  X(optimizer_step, optimizer_ready, unsloth_optimizer_step, (optimizer, NULL), OK)                \
  X(gradients_scale, optimizer_ready, unsloth_gradients_scale, (optimizer, 0.5f, NULL), OK)        \
  X(optimizer_set_group, optimizer_ready, unsloth_optimizer_set_group,                             \
    (optimizer, 0, &group, NULL), OK)                                                              \
  X(optimizer_loss_scale, optimizer_ready, unsloth_optimizer_loss_scale, (optimizer, &keys), OK)   \
  X(optimizer_read, optimizer_ready, unsloth_optimizer_read, (optimizer, NULL, &optimizer_status), \
    OK)                                                                                            \
  X(optimizer_saved_size, optimizer_ready, unsloth_optimizer_saved_size, (optimizer, &size), OK)   \
  X(optimizer_save, saved_ready, unsloth_optimizer_save,                                           \
    (optimizer, saved_optimizer, saved_size, NULL), OK)                                            \
  X(optimizer_load, saved_ready, unsloth_optimizer_load,                                           \
    (optimizer, saved_optimizer, saved_size, NULL), OK)                                            \
  X(all_reduce_supported, all_reduce_ready, unsloth_all_reduce_supported,                          \
    (ctx, &all_reduce, &implementation), OK)                                                       \
  X(all_reduce, all_reduce_ready, unsloth_all_reduce_forward, (ctx, &all_reduce, NULL), OK)        \
  X(all_reduce_rms_norm_supported, all_reduce_rms_norm_ready,                                      \
    unsloth_all_reduce_rms_norm_supported, (ctx, &all_reduce_rms_norm, &implementation), OK)       \
  X(all_reduce_rms_norm, all_reduce_rms_norm_ready, unsloth_all_reduce_rms_norm_forward,           \
    (ctx, &all_reduce_rms_norm, NULL), OK)                                                         \
  X(all_gather_supported, all_gather_ready, unsloth_all_gather_supported,                          \
    (ctx, &all_gather, &implementation), OK)                                                       \
  X(all_gather, all_gather_ready, unsloth_all_gather_forward, (ctx, &all_gather, NULL), OK)        \
  X(reduce_scatter_supported, reduce_scatter_ready, unsloth_reduce_scatter_supported,              \
    (ctx, &reduce_scatter, &implementation), OK)                                                   \
  X(reduce_scatter, reduce_scatter_ready, unsloth_reduce_scatter_forward,                          \
    (ctx, &reduce_scatter, NULL), OK)                                                              \
  X(broadcast_supported, broadcast_ready, unsloth_broadcast_supported,                             \
    (ctx, &broadcast, &implementation), OK)                                                        \
  X(broadcast, broadcast_ready, unsloth_broadcast_forward, (ctx, &broadcast, NULL), OK)            \
  X(all_to_all_supported, all_to_all_ready, unsloth_all_to_all_supported,                          \
    (ctx, &all_to_all, &implementation), OK)                                                       \
  X(all_to_all, all_to_all_ready, unsloth_all_to_all_forward, (ctx, &all_to_all, NULL), OK)        \
  X(send_receive_supported, send_receive_ready, unsloth_send_receive_supported,                    \
    (ctx, &send_receive, &implementation), OK)                                                     \
  X(send_receive, send_receive_ready, unsloth_send_receive_forward, (ctx, &send_receive, NULL),    \
    OK)                                                                                            \
  X(shard, shard_ready, unsloth_shard_get, (&of_shard, &shard), OK)                                \
  X(context_packed, context_packed_ready, unsloth_context_parallel_packed_get,                     \
    (&of_packed, packed_lengths[0], packed_lengths[1], NULL), OK)                                  \
  X(context_tokens, context_tokens_ready, unsloth_context_parallel_tokens_get,                     \
    (&of_tokens, &num_tokens, NULL, token_ids, COUNT(token_ids)), OK)                              \
  X(pipeline_schedule, pipeline_ready, unsloth_pipeline_schedule,                                  \
    (&of_pipeline, &pipeline_summary, pipeline_actions, COUNT(pipeline_actions)), OK)              \
  X(pipeline_simulate, pipeline_ready, unsloth_pipeline_simulate,                                  \
    (&of_simulation, &simulation, NULL, 0), OK)                                                    \
  X(comm_id, comm_params_ready, unsloth_comm_id_create, (&of_id, &comm_id), OK)                    \
  X(comm_create, comm_params_ready, ask_unsloth_comm_create, (), OK)                               \
  X(comm_info, comm_ready, unsloth_comm_info_get, (comm, &comm_info), OK)                          \
  X(comm_warm_up, comm_ready, unsloth_comm_warm_up, (comm, NULL), OK)                              \
  X(comm_memory, comm_ready, unsloth_comm_memory_alloc, (comm, 64, &comm_memory), OK)              \
  X(comm_memory_free, comm_memory_ready, unsloth_comm_memory_free, (comm, comm_memory), OK)        \
  X(comm_error, comm_ready, unsloth_comm_error_get, (comm), OK)                                    \
  X(comm_abort, comm_ready, unsloth_comm_abort, (comm), OK)                                        \
  X(comm_destroy, comm_ready, unsloth_comm_destroy, (comm), OK)                                    \
  X(device_count, nothing, unsloth_device_count, (UNSLOTH_BACKEND_CPU, &device_count), OK)         \
  X(device_info, structs_ready, unsloth_device_info_get, (UNSLOTH_BACKEND_CPU, 0, &device_info),   \
    OK)                                                                                            \
  X(context_create, context_params_ready, unsloth_context_create, (&of_context, &created), OK)     \
  X(context_destroy, with_context, unsloth_context_destroy, (ctx), OK)                             \
  X(stream_create, with_context, unsloth_stream_create, (ctx, &stream), OK)                        \
  X(stream_synchronize, with_context, unsloth_stream_synchronize, (ctx, NULL), OK)                 \
  X(stream_destroy, with_context, unsloth_stream_destroy, (ctx, NULL), OK)                         \
  X(event_create, with_context, unsloth_event_create, (ctx, 0, &made), OK)                         \
  X(event_record, events_ready, unsloth_event_record, (event, NULL), OK)                           \
  X(event_query, events_ready, unsloth_event_query, (event, &is_done), OK)                         \
  X(event_synchronize, events_ready, unsloth_event_synchronize, (event), OK)                       \
  X(event_elapsed, events_ready, unsloth_event_elapsed, (event, later, &milliseconds), OK)         \
  X(event_destroy, events_ready, unsloth_event_destroy, (event), OK)                               \
  X(stream_wait_event, events_ready, unsloth_stream_wait_event, (ctx, NULL, event), OK)            \
  X(memory_alloc, memory_ready, unsloth_memory_alloc, (ctx, 4096, &block), OK)                     \
  X(memory_alloc_async, memory_ready, unsloth_memory_alloc_async, (ctx, 4096, &block, NULL), OK)   \
  X(memory_free, memory_ready, unsloth_memory_free, (ctx, given), OK)                              \
  X(memory_free_async, memory_ready, unsloth_memory_free_async, (ctx, given, NULL), OK)            \
  X(memory_copy, memory_ready, unsloth_memory_copy,                                                \
    (ctx, outputs, given, 64, UNSLOTH_COPY_KIND_DEVICE_TO_HOST, NULL), OK)                         \
  X(memory_copy_peer, memory_ready, unsloth_memory_copy_peer,                                      \
    (ctx, given, other, inputs, 64, NULL), OK)                                                     \
  X(memory_set, memory_ready, unsloth_memory_set, (ctx, outputs, 1, 64, NULL), OK)                 \
  X(memory_stats, structs_ready, unsloth_memory_stats_get, (ctx, &stats), OK)                      \
  X(memory_peak_reset, with_context, unsloth_memory_peak_reset, (ctx), OK)                         \
  X(memory_limit_set, with_context, unsloth_memory_limit_set, (ctx, 1 << 20), OK)                  \
  X(memory_pool_trim, with_context, unsloth_memory_pool_trim, (ctx, 0), OK)                        \
  X(cache_create, cache_params_ready, unsloth_kv_cache_create,                                     \
    (ctx, &cache_params, &created_cache), OK)                                                      \
  X(cache_destroy, cache_ready, unsloth_kv_cache_destroy, (cache), OK)                             \
  X(cache_extend, cache_ready, unsloth_kv_cache_extend,                                            \
    (cache, sequences, steps, SEQUENCES, NULL), OK)                                                \
  X(cache_extend_again, batch_ready, unsloth_kv_cache_extend,                                      \
    (cache, sequences, steps, SEQUENCES, NULL), OK)                                                \
  X(cache_scales, cache_of_codes_ready, unsloth_kv_cache_scales_set,                               \
    (cache, 1, &cache_scale, &cache_scale, 1, NULL), OK)                                           \
  X(cache_append, append_ready, unsloth_kv_cache_append, (cache, &append, NULL), OK)               \
  X(cache_batch, structs_ready, unsloth_kv_cache_batch_get, (cache, &batch), OK)                   \
  X(cache_layer, structs_ready, unsloth_kv_cache_layer_get, (cache, 1, &keys, &values), OK)        \
  X(cache_stats, structs_ready, unsloth_kv_cache_stats_get, (cache, &cache_stats), OK)             \
  X(cache_attention, prepare_ready, unsloth_kv_cache_attention_prepare, (cache, 1, &attention),    \
    OK)                                                                                            \
  X(sequence_create, batch_ready, unsloth_kv_cache_sequence_create, (cache, &sequence), OK)        \
  X(sequence_free, batch_ready, unsloth_kv_cache_sequence_free, (cache, sequences[0]), OK)         \
  X(sequence_fork, batch_ready, unsloth_kv_cache_sequence_fork, (cache, sequences[0], &sequence),  \
    OK)                                                                                            \
  X(sequence_truncate, batch_ready, unsloth_kv_cache_sequence_truncate, (cache, sequences[0], 3),  \
    OK)                                                                                            \
  X(sequence_evict, batch_ready, unsloth_kv_cache_sequence_evict,                                  \
    (cache, sequences[0], 1, 2, &number), OK)                                                      \
  X(sequence_reserve, batch_ready, unsloth_kv_cache_sequence_reserve,                              \
    (cache, sequences[0], 5 * PAGE, NULL), OK)                                                     \
  X(sequence_info, structs_ready, unsloth_kv_cache_sequence_info_get,                              \
    (cache, sequences[0], &info), OK)                                                              \
  X(sequence_pages, structs_ready, unsloth_kv_cache_sequence_pages_get,                            \
    (cache, sequences[0], ids, TOKENS, &size), OK)                                                 \
  X(parameters_count, estimates_ready, unsloth_model_parameters_count, (&model, &parameters), OK)  \
  X(attention_estimate, estimates_ready, unsloth_attention_memory_estimate,                        \
    (ctx, &of_attention, &attention_memory), OK)                                                   \
  X(cache_estimate, estimates_ready, unsloth_kv_cache_memory_estimate,                             \
    (&cache_params, &cache_memory), OK)                                                            \
  X(inference_estimate, estimates_ready, unsloth_inference_memory_estimate,                        \
    (ctx, &of_inference, &inference_memory), OK)                                                   \
  X(checkpoint_plan, plan_ready, unsloth_checkpoint_plan,                                          \
    (&stack, &planned, actions, COUNT(actions)), OK)                                               \
  X(training_estimate, estimates_ready, unsloth_training_memory_estimate,                          \
    (&of_training, &training_memory), OK)                                                          \
  X(training_step_estimate, estimates_ready, unsloth_training_memory_estimate,                     \
    (&of_step, &training_memory), OK)                                                              \
  X(from_dlpack, capsule_ready, unsloth_tensor_from_dlpack, (&capsule, &keys, NULL, NULL), OK)     \
  X(log_set, nothing, unsloth_log_set, (0, NULL, NULL), OK)                                        \
  X(from_dlpack_versioned, versioned_ready, unsloth_tensor_from_dlpack_versioned,                  \
    (&versioned, &keys, NULL, NULL, NULL), OK)                                                     \
  X(version, nothing, ask_unsloth_version, (), OK)                                                 \
  X(build_info, nothing, ask_unsloth_build_info, (), OK)                                           \
  X(status_name, nothing, ask_unsloth_status_name, (), OK)                                         \
  X(format_bytes, nothing, ask_unsloth_format_bytes, (), OK)                                       \
  X(message, nothing, ask_unsloth_last_error_message, (), OK)                                      \
  X(refused_norm, refused_norm_ready, unsloth_rms_norm_forward, (ctx, &rms_norm, NULL), INVALID)   \
  X(refused_attention, refused_attention_ready, unsloth_attention_forward,                         \
    (ctx, &attention, NULL), INVALID)                                                              \
  X(refused_block, refused_block_ready, unsloth_attention_block_forward,                           \
    (ctx, &attention_block, NULL), INVALID)                                                        \
  X(refused_backend, nothing, unsloth_device_count, ((unsloth_backend)99, &device_count), INVALID) \
  X(refused_handle, nothing, unsloth_context_destroy, ((unsloth_context *)&size),                  \
    UNSLOTH_STATUS_INVALID_HANDLE)                                                                 \
  X(refused_pages, batch_ready, unsloth_kv_cache_extend,                                           \
    (cache, sequences, too_many, SEQUENCES, NULL), UNSLOTH_STATUS_OUT_OF_PAGES)                    \
  X(refused_capsule, bad_capsule_ready, unsloth_tensor_from_dlpack, (&capsule, &keys, NULL, NULL), \
    UNSLOTH_STATUS_UNSUPPORTED)

#define DEFINE(name, ready, function, arguments, expected) \
  static unsloth_status call_##name(void) { return function arguments; }
CALLS(DEFINE)

typedef struct {
  const char *name, *function;
  void (*ready)(void);
  unsloth_status (*call)(void);
  unsloth_status expected;
} call;

#define ROW(name, ready, function, arguments, expected) \
  {#name, #function, ready, call_##name, expected},
static const call calls[] = {CALLS(ROW)};

#endif
