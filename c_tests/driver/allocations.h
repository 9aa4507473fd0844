// Counts what the host allocates, in a program of one file.
#ifndef UNSLOTH_TEST_ALLOCATIONS_H
#define UNSLOTH_TEST_ALLOCATIONS_H

#include <stddef.h>

// The C library's own, which the functions below stand before.
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

static int allocations;

void *malloc(size_t size) {
  allocations++;
  return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
  allocations++;
  return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
  allocations++;
  return __libc_realloc(old, size);
}
int posix_memalign(void **result, size_t alignment, size_t size);
int posix_memalign(void **result, size_t alignment, size_t size) {
  allocations++;
  *result = __libc_memalign(alignment, size);
  return *result == NULL ? 12 : 0;
}

#endif
