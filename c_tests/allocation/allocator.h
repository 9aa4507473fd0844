// An allocator that fails when it is told to. It stands before the C library's, so that every
// allocation of the process goes through it, the library's and its dependencies' among them.
#ifndef UNSLOTH_TEST_ALLOCATOR_H
#define UNSLOTH_TEST_ALLOCATOR_H

#include <stddef.h>

enum { MOST_FRAMES = 48 };

// What is known of the allocation that was the first to fail, for the parent of a process that
// ended there.
typedef struct {
  // Allocations since the allocator was armed.
  long count;
  int failed;
  int num_frames;
  void *frames[MOST_FRAMES];
} allocations;

// From now on the `n`th allocation fails (0 is the next one; none if negative), and if `lasting`
// every later one. What is seen goes to `record`, which other processes may read.
void allocator_arm(allocations *record, long n, int lasting);
void allocator_disarm(void);

#endif
