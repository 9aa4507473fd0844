// What was asked of the driver that is none (libcuda.c).
#ifndef UNSLOTH_TEST_DRIVER_H
#define UNSLOTH_TEST_DRIVER_H

typedef struct {
  int launches;
  int tensor_maps;     // descriptions of tensors, which the host writes by itself
  int copies;          // queued copies and fills of memory
  int others;          // what allocates, waits, or asks; so are all below
  int loads, unloads;  // of modules
  int waits;           // for everything queued on the device
  const char *last;    // the function that was counted last
} driver_calls;

extern driver_calls driver;

#endif
