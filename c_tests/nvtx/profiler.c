// A library that NVTX loads in the place of a profiler's, by NVTX_INJECTION64_PATH. It puts
// functions of its own into NVTX's table, and counts the ranges that it is told of. The
// declarations are those of nvtx3/nvtxDetail/nvtxTypes.h, as far as they are needed.
#include "profiler.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef void (*function)(void);
typedef struct {
  size_t struct_size;
  int (*get_functions)(int module, function ***functions, unsigned *count);
} callbacks;
typedef const void *(*get_export_table)(uint32_t id);

enum { CALLBACKS = 1, CORE = 1, RANGE_PUSH = 9, RANGE_POP = 11 };

// Apart from the functions, that the program finds it by its name.
extern struct seen profiler_seen;
struct seen profiler_seen;

static int push(const char *name) {
  snprintf(profiler_seen.name, sizeof profiler_seen.name, "%s", name);
  return profiler_seen.pushed++ - profiler_seen.popped;
}

static int pop(void) { return profiler_seen.pushed - ++profiler_seen.popped; }

int InitializeInjectionNvtx2(get_export_table get);
int InitializeInjectionNvtx2(get_export_table get) {
  const callbacks *table = (const callbacks *)get(CALLBACKS);
  function **functions = NULL;
  unsigned count = 0;
  if (!table || !table->get_functions(CORE, &functions, &count) || count <= RANGE_POP) return 0;
  *functions[RANGE_PUSH] = (function)push;
  *functions[RANGE_POP] = (function)pop;
  profiler_seen.loaded++;
  return 1;
}
