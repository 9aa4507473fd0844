// What was asked of the NCCL that is none (libnccl.c), and what it is to answer.
#ifndef UNSLOTH_TEST_NCCL_H
#define UNSLOTH_TEST_NCCL_H

#include <stddef.h>

enum { NCCL_CALLS = 64 };

typedef struct {
  const char *name;  // of the function
  const void *x;     // what is read
  void *out;         // what is written
  size_t count;
  int dtype, op, peer;  // or root; -1 where there is none
  void *stream;
  int depth;  // of groups that were open
} nccl_call;

typedef struct {
  // What it answers.
  int version;             // as ncclGetVersion gives it
  const char *fails;       // the function that fails next, with `status`
  int status;              // ncclResult_t
  int spared;              // calls of that function that do not fail before it does
  int async_status;        // what ncclCommGetAsyncError tells
  int size, rank, device;  // of a communicator that was made elsewhere
  int unreached;           // a rank whose memory this one does not reach; below 0 for none
  // Told of each call that moves data, if it is not NULL.
  void (*told)(char what, const void *stream, const void *event);
  // What was asked.
  nccl_call calls[NCCL_CALLS];  // that move data
  int num_calls;
  int groups, depth;  // that were opened, and are open
  int made, destroyed, aborted;
  int memories, windows;  // that there are
  size_t registered;      // bytes of the last window
  int policy;             // of the last communicator's blocks, where it was made with one
  int made_size, made_rank;
  char made_id[128];
} nccl_state;

extern nccl_state nccl;

// The communicator that a program made elsewhere, and how it finds the functions.
extern void *const nccl_foreign;
void *nccl_symbol(void *user, const char *name);

#endif
