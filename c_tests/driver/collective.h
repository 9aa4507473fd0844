// What tests of groups beside a driver and an NCCL that are none have in common.
#ifndef UNSLOTH_TEST_COLLECTIVE_H
#define UNSLOTH_TEST_COLLECTIVE_H

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
static inline unsloth_tensor make(unsloth_dtype dtype, int64_t d0, int64_t d1) {
  void *data = NULL;
  CHECK_OK(unsloth_memory_alloc(ctx, 1 << 20, &data));
  return tensor(data, dtype, d0, d1, -1, -1);
}

static inline void begin(void) {
  allocations = nccl.num_calls = nccl.groups = 0;
  memset(&driver, 0, sizeof driver);
}

// As many calls of NCCL, in a group or not, and none of the driver.
static inline void end(int calls, int groups) {
  CHECK(allocations == 0);
  CHECK(nccl.num_calls == calls && nccl.groups == groups && nccl.depth == 0);
  CHECK(driver.launches == 0 && driver.copies == 0 && driver.others == 0);
  for (int i = 0; i < calls; i++) {
    CHECK(nccl.calls[i].stream == stream && nccl.calls[i].depth == groups);
  }
}

static inline void check_call(int at, const char *name, const void *x, const void *out,
                              size_t count, int dtype, int op, int peer) {
  const nccl_call *c = &nccl.calls[at];
  if (strcmp(c->name, name) == 0 && c->x == x && c->out == out && c->count == count &&
      c->dtype == dtype && c->op == op && c->peer == peer)
    return;
  fprintf(stderr, "%s of %zu, dtype %d, op %d, peer %d, not %s of %zu, dtype %d, op %d, peer %d\n",
          c->name, c->count, c->dtype, c->op, c->peer, name, count, dtype, op, peer);
  exit(1);
}

static inline char *byte(unsloth_tensor t, size_t offset) { return (char *)t.data + offset; }

static inline unsloth_comm_params of_group(void) {
  unsloth_comm_params p = UNSLOTH_COMM_PARAMS_INIT;
  p.kind = UNSLOTH_COMM_KIND_NCCL;
  p.rank = RANK;
  p.size = SIZE;
  p.get_symbol = nccl_symbol;
  p.user = &nccl;
  return p;
}

// Runs tests with a context and a stream; SKIPPED in a build for other architectures.
static inline int with_context(void (*tests)(void)) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  params.backend = UNSLOTH_BACKEND_CUDA;
  const unsloth_status status = unsloth_context_create(&params, &ctx);
  if (status == UNSLOTH_STATUS_UNSUPPORTED_DEVICE) return SKIPPED;
  CHECK_OK(status);
  CHECK_OK(unsloth_stream_create(ctx, &stream));
  tests();
  CHECK_OK(unsloth_stream_destroy(ctx, stream));
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}

// Runs tests with a group, too.
static inline void with_group(void (*tests)(void)) {
  unsloth_comm_params p = of_group();
  CHECK_OK(unsloth_comm_create(ctx, &p, &comm));
  tests();
  CHECK_OK(unsloth_comm_destroy(comm));
}

#endif
