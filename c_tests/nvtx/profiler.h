// What a stand-in for a profiler saw.
#ifndef UNSLOTH_TEST_PROFILER_H
#define UNSLOTH_TEST_PROFILER_H

struct seen {
  int loaded, pushed, popped;
  // Of the range that was pushed last.
  char name[64];
};

#endif
