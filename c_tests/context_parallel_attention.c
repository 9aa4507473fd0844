// Attention over sequences that ranks divide, and its gradients, against those of one rank.
#include "ranks.h"

enum { OWN = 4, TOKENS = OWN * RANKS, HEADS = 2 * RANKS, KV_HEADS = RANKS, DIM = 8 };

static float q[TOKENS * HEADS * DIM], k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM];
static float dout[TOKENS * HEADS * DIM];

typedef struct {
  float out[TOKENS * HEADS * DIM], lse[HEADS * TOKENS], dq[TOKENS * HEADS * DIM];
  float dk[TOKENS * KV_HEADS * DIM], dv[TOKENS * KV_HEADS * DIM];
} results;

static void expect(unsloth_context *ctx, results *r) {
  unsloth_attention_params p = UNSLOTH_ATTENTION_PARAMS_INIT;
  unsloth_attention_backward_params b = UNSLOTH_ATTENTION_BACKWARD_PARAMS_INIT;
  p.causal = b.causal = 1;
  p.q = b.q = f32_tensor(q, 1, TOKENS, HEADS, DIM);
  p.k = b.k = f32_tensor(k, 1, TOKENS, KV_HEADS, DIM);
  p.v = b.v = f32_tensor(v, 1, TOKENS, KV_HEADS, DIM);
  p.out = b.out = f32_tensor(r->out, 1, TOKENS, HEADS, DIM);
  p.lse = b.lse = f32_tensor(r->lse, 1, HEADS, TOKENS, -1);
  b.dout = f32_tensor(dout, 1, TOKENS, HEADS, DIM);
  b.dq = f32_tensor(r->dq, 1, TOKENS, HEADS, DIM);
  b.dk = f32_tensor(r->dk, 1, TOKENS, KV_HEADS, DIM);
  b.dv = f32_tensor(r->dv, 1, TOKENS, KV_HEADS, DIM);
  CHECK_OK(unsloth_attention_forward(ctx, &p, NULL));
  CHECK_OK(unsloth_attention_backward_workspace_size(ctx, &b, &b.workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b.workspace_size, &b.workspace));
  CHECK_OK(unsloth_attention_backward(ctx, &b, NULL));
  CHECK_OK(unsloth_memory_free(ctx, b.workspace));
}

// A rank's rows of a tensor that has all.
static unsloth_tensor part(float *all, int rank, int64_t heads) {
  return f32_tensor(all + (int64_t)rank * OWN * heads * DIM, 1, OWN, heads, DIM);
}

static void near(const float *found, const float *expected, size_t n, double most) {
  for (size_t i = 0; i < n; i++) CHECK(fabs((double)found[i] - expected[i]) <= most);
}

// A rank's rows are those of one rank alone.
static void check(const results *e, const results *found, const float *lse, int rank, double most) {
  const size_t rows = OWN * HEADS * DIM, kv_rows = OWN * KV_HEADS * DIM, at = (size_t)rank;
  near(found->out + at * rows, e->out + at * rows, rows, most);
  near(found->dq + at * rows, e->dq + at * rows, rows, most);
  near(found->dk + at * kv_rows, e->dk + at * kv_rows, kv_rows, most);
  near(found->dv + at * kv_rows, e->dv + at * kv_rows, kv_rows, most);
  for (int head = 0; head < HEADS; head++) {
    near(lse + head * OWN, e->lse + head * TOKENS + rank * OWN, OWN, most);
  }
}

// Rows of a tensor that has all, and the other way round.
static void rows_of(float *all, float *own, const int64_t *ids, int64_t row, int back) {
  for (int token = 0; token < OWN; token++) {
    float *theirs = all + ids[token] * row, *ours = own + token * row;
    memcpy(back ? theirs : ours, back ? ours : theirs, sizeof(float) * (size_t)row);
  }
}

static void attend(unsloth_context *ctx, unsloth_context_parallel_attention_params *p,
                   unsloth_context_parallel_attention_backward_params *b) {
  unsloth_implementation implementation = 0;
  CHECK_OK(unsloth_context_parallel_attention_supported(ctx, p, &implementation));
  CHECK(implementation == UNSLOTH_IMPLEMENTATION_CPU);
  CHECK_OK(unsloth_context_parallel_attention_workspace_size(ctx, p, &p->workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p->workspace_size, &p->workspace));
  CHECK_OK(unsloth_context_parallel_attention_forward(ctx, p, NULL));
  CHECK_OK(unsloth_context_parallel_attention_backward_supported(ctx, b, NULL));
  CHECK_OK(unsloth_context_parallel_attention_backward_workspace_size(ctx, b, &b->workspace_size));
  CHECK_OK(unsloth_memory_alloc(ctx, b->workspace_size, &b->workspace));
  CHECK_OK(unsloth_context_parallel_attention_backward(ctx, b, NULL));
  CHECK_OK(unsloth_memory_free(ctx, p->workspace));
  CHECK_OK(unsloth_memory_free(ctx, b->workspace));
}

// Two chunks of each rank, far apart in the sequence: what the rank has is gathered before, and put
// back.
static void zigzag(unsloth_context *ctx, unsloth_context_parallel_attention_params p,
                   unsloth_context_parallel_attention_backward_params b, const results *e,
                   int rank) {
  static float own[RANKS][8][OWN * HEADS * DIM];
  static results all[RANKS];
  float lse[HEADS * OWN];
  float (*t)[OWN * HEADS * DIM] = own[rank];
  int64_t tokens = 0, ids[OWN];
  int32_t positions[OWN];
  unsloth_context_parallel_tokens_params of = UNSLOTH_CONTEXT_PARALLEL_TOKENS_PARAMS_INIT;
  of.order = p.order = b.order = UNSLOTH_CONTEXT_ORDER_ZIGZAG;
  of.rank = rank, of.size = RANKS, of.batch = 1, of.length = TOKENS;
  CHECK_OK(unsloth_context_parallel_tokens_get(&of, &tokens, positions, ids, OWN));
  CHECK(tokens == OWN && positions[0] == 2 * rank && ids[2] == TOKENS - 2 - 2 * rank);
  CHECK_FAILS(unsloth_context_parallel_tokens_get(&of, &tokens, positions, NULL, OWN - 1),
              UNSLOTH_STATUS_INVALID_ARGUMENT,
              "context_parallel_tokens_get: capacity is 3, the rank has 4 tokens");
  rows_of(q, t[0], ids, HEADS * DIM, 0);
  rows_of(k, t[1], ids, KV_HEADS * DIM, 0);
  rows_of(v, t[2], ids, KV_HEADS * DIM, 0);
  rows_of(dout, t[3], ids, HEADS * DIM, 0);
  p.q.data = b.q.data = t[0];
  p.k.data = b.k.data = t[1];
  p.v.data = b.v.data = t[2];
  b.dout.data = t[3];
  p.out.data = b.out.data = t[4];
  p.lse.data = b.lse.data = lse;
  b.dq.data = t[5];
  b.dk.data = t[6];
  b.dv.data = t[7];
  attend(ctx, &p, &b);
  rows_of(all[rank].out, t[4], ids, HEADS * DIM, 1);
  rows_of(all[rank].dq, t[5], ids, HEADS * DIM, 1);
  rows_of(all[rank].dk, t[6], ids, KV_HEADS * DIM, 1);
  rows_of(all[rank].dv, t[7], ids, KV_HEADS * DIM, 1);
  for (int token = 0; token < OWN; token++) {
    const size_t row = (size_t)ids[token] * HEADS * DIM, kv = (size_t)ids[token] * KV_HEADS * DIM;
    near(all[rank].out + row, e->out + row, HEADS * DIM, 1e-5);
    near(all[rank].dq + row, e->dq + row, HEADS * DIM, 1e-5);
    near(all[rank].dk + kv, e->dk + kv, KV_HEADS * DIM, 1e-5);
    near(all[rank].dv + kv, e->dv + kv, KV_HEADS * DIM, 1e-5);
    for (int head = 0; head < HEADS; head++) {
      near(lse + head * OWN + token, e->lse + head * TOKENS + ids[token], 1, 1e-5);
    }
  }
}

// The whole sequence as a packed one, of which each rank attends with its run of tokens.
static void packed(unsloth_context *ctx, unsloth_context_parallel_attention_params p,
                   unsloth_context_parallel_attention_backward_params b, const results *e,
                   const results *found, int rank) {
  const int32_t all[2] = {0, TOKENS};
  int32_t of_queries[2], of_keys[2], positions[OWN];
  float lse[HEADS * OWN];
  unsloth_tensor *const batched[] = {&p.q, &p.k,   &p.v,   &p.out,  &p.lse, &b.q,  &b.k,
                                     &b.v, &b.out, &b.lse, &b.dout, &b.dq,  &b.dk, &b.dv};
  unsloth_context_parallel_packed_params of = UNSLOTH_CONTEXT_PARALLEL_PACKED_PARAMS_INIT;
  of.rank = rank, of.size = RANKS, of.tokens = OWN, of.batch = 1, of.causal = 1;
  of.cu_seqlens = all;
  CHECK_OK(unsloth_context_parallel_packed_get(&of, of_queries, of_keys, positions));
  CHECK(of_queries[0] == 0 && of_queries[1] == OWN && of_keys[1] == (rank + 1) * OWN);
  CHECK(positions[0] == rank * OWN && positions[OWN - 1] == (rank + 1) * OWN - 1);
  p.lse.data = b.lse.data = lse;
  for (size_t i = 0; i < COUNT(batched); i++) {
    unsloth_tensor *t = batched[i];
    t->rank--;
    memmove(t->shape, t->shape + 1, sizeof t->shape - sizeof t->shape[0]);
  }
  p.cu_seqlens_q = b.cu_seqlens_q = tensor(of_queries, UNSLOTH_DTYPE_I32, 2, -1, -1, -1);
  p.cu_seqlens_k = b.cu_seqlens_k = tensor(of_keys, UNSLOTH_DTYPE_I32, 2, -1, -1, -1);
  attend(ctx, &p, &b);
  check(e, found, lse, rank, 1e-5);
  of.tokens = OWN - 1;
  CHECK_FAILS(unsloth_context_parallel_packed_get(&of, NULL, NULL, positions),
              UNSLOTH_STATUS_INVALID_ARGUMENT,
              "context_parallel_packed_get: cu_seqlens has 12 at index 1, allowed: 0 to 9");
}

static void run(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  static results found, expected[RANKS];  // of whose rows each rank writes its own
  float lse[HEADS * OWN];
  unsloth_context_parallel_attention_params p = UNSLOTH_CONTEXT_PARALLEL_ATTENTION_PARAMS_INIT;
  unsloth_context_parallel_attention_backward_params b =
      UNSLOTH_CONTEXT_PARALLEL_ATTENTION_BACKWARD_PARAMS_INIT;
  expect(ctx, &expected[rank]);
  p.comm = b.comm = comm;
  p.causal = b.causal = 1;
  p.q = b.q = part(q, rank, HEADS);
  p.k = b.k = part(k, rank, KV_HEADS);
  p.v = b.v = part(v, rank, KV_HEADS);
  p.out = b.out = part(found.out, rank, HEADS);
  p.lse = b.lse = f32_tensor(lse, 1, HEADS, OWN, -1);
  b.dout = part(dout, rank, HEADS);
  b.dq = part(found.dq, rank, HEADS);
  b.dk = part(found.dk, rank, KV_HEADS);
  b.dv = part(found.dv, rank, KV_HEADS);

  attend(ctx, &p, &b);
  check(&expected[rank], &found, lse, rank, 0);

  // Every rank with all keys: attention rounds otherwise.
  p.method = b.method = UNSLOTH_CONTEXT_METHOD_ALL_GATHER;
  attend(ctx, &p, &b);
  check(&expected[rank], &found, lse, rank, 1e-5);
  zigzag(ctx, p, b, &expected[rank], rank);
  packed(ctx, p, b, &expected[rank], &found, rank);

  // Keys travel.
  p.method = b.method = UNSLOTH_CONTEXT_METHOD_RING;
  attend(ctx, &p, &b);
  check(&expected[rank], &found, lse, rank, 1e-5);
  zigzag(ctx, p, b, &expected[rank], rank);

  p.method = UNSLOTH_CONTEXT_METHOD_ULYSSES;
  p.k.shape[2] = p.v.shape[2] = 2;
  CHECK_FAILS(unsloth_context_parallel_attention_forward(ctx, &p, NULL),
              UNSLOTH_STATUS_INVALID_ARGUMENT,
              "context_parallel_attention: k has 2 heads, which 3 ranks do not share evenly");
  b.method = 3;
  CHECK_FAILS(unsloth_context_parallel_attention_backward(ctx, &b, NULL),
              UNSLOTH_STATUS_INVALID_ARGUMENT,
              "context_parallel_attention_backward: method is 3, allowed: 0 (ulysses), 1 "
              "(all_gather), 2 (ring)");
}

static void fill(float *to, size_t n, unsigned seed) {
  for (size_t i = 0; i < n; i++) {
    seed = seed * 1664525u + 1013904223u;
    to[i] = (float)(seed >> 8) / (1 << 23) - 1;
  }
}

int main(void) {
  fill(q, COUNT(q), 1);
  fill(k, COUNT(k), 2);
  fill(v, COUNT(v), 3);
  fill(dout, COUNT(dout), 4);
  return on_every_rank(run);
}
