// A local group whose ranks are threads of a test.
#ifndef UNSLOTH_TEST_RANKS_H
#define UNSLOTH_TEST_RANKS_H

#include <pthread.h>

#include "check.h"

enum { RANKS = 3 };

typedef struct {
  unsloth_context *ctx;
  unsloth_comm *comm;
  int rank;
  unsloth_comm_id id;
  void (*run)(unsloth_context *ctx, unsloth_comm *comm, int rank);
} test_rank;

static void *run_rank(void *argument) {
  test_rank *self = (test_rank *)argument;
  unsloth_comm_params p = UNSLOTH_COMM_PARAMS_INIT;
  p.rank = self->rank;
  p.size = RANKS;
  p.id = self->id;
  CHECK_OK(unsloth_comm_create(self->ctx, &p, &self->comm));
  self->run(self->ctx, self->comm, self->rank);
  CHECK_OK(unsloth_comm_destroy(self->comm));
  return NULL;
}

// Runs every rank of a group on a thread and a context of its own.
static inline int on_every_rank(void (*run)(unsloth_context *ctx, unsloth_comm *comm, int rank)) {
  unsloth_comm_id_params of_id = UNSLOTH_COMM_ID_PARAMS_INIT;
  unsloth_comm_id id;
  test_rank ranks[RANKS];
  pthread_t threads[RANKS];
  CHECK_OK(unsloth_comm_id_create(&of_id, &id));
  for (int i = 0; i < RANKS; i++) {
    memset(&ranks[i], 0, sizeof ranks[i]);
    ranks[i].ctx = cpu_context();
    ranks[i].rank = i;
    ranks[i].id = id;
    ranks[i].run = run;
    CHECK(pthread_create(&threads[i], NULL, run_rank, &ranks[i]) == 0);
  }
  for (int i = 0; i < RANKS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_OK(unsloth_context_destroy(ranks[i].ctx));
  }
  return 0;
}

#endif
