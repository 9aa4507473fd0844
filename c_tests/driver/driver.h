// What was asked of the driver that is none (libcuda.c).
#ifndef UNSLOTH_TEST_DRIVER_H
#define UNSLOTH_TEST_DRIVER_H

enum { DRIVER_STEPS = 256 };

// Of a stream: L launches a kernel, R records an event, W waits for one, N gives NCCL a call.
typedef struct {
  char what;
  const void *stream, *event;
} driver_stage;

typedef struct {
  int launches;
  int tensor_maps;     // descriptions of tensors, which the host writes by itself
  int copies;          // queued copies and fills of memory
  int others;          // what allocates, waits, or asks; so are all below
  int loads, unloads;  // of modules
  int waits;           // for everything queued on the device
  const char *last;    // the function that was counted last
  int failing_launch;  // which launch from here on fails; 0 for none
  const float *said;   // what a copy of a number to the host gives; NULL for nothing
  driver_stage steps[DRIVER_STEPS];
  int num_steps;
} driver_calls;

extern driver_calls driver;

// Writes down a step of somebody else's.
void driver_step(char what, const void *stream, const void *event);

#endif
