#include "allocator.h"

#include <execinfo.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

// The C library's own, which the functions below stand before.
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

static allocations *record;
static long failing;
static int lasts;
static atomic_int armed;
static atomic_int seen;
static atomic_long count;
// The thread that looks at its own stack allocates, and does not count.
static _Thread_local int looking __attribute__((tls_model("initial-exec")));

void allocator_arm(allocations *into, long n, int lasting) {
  memset(into, 0, sizeof *into);
  record = into;
  failing = n;
  lasts = lasting;
  atomic_store(&count, 0);
  atomic_store(&seen, 0);
  atomic_store(&armed, 1);
}

void allocator_disarm(void) {
  atomic_store(&armed, 0);
  record->count = atomic_load(&count);
}

static int fails(void) {
  if (!atomic_load(&armed) || looking) return 0;
  const long at = atomic_fetch_add(&count, 1);
  if (failing < 0 || at < failing || (at > failing && !lasts)) return 0;
  if (at == failing) {
    looking = 1;
    record->num_frames = backtrace(record->frames, MOST_FRAMES);
    record->failed = 1;
    looking = 0;
    atomic_store(&seen, 1);
  }
  // What another thread does without memory may end the process, and comes after that was written.
  while (!atomic_load(&seen)) continue;
  return 1;
}

void *malloc(size_t size) { return fails() ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return fails() ? NULL : __libc_realloc(old, size); }

int posix_memalign(void **result, size_t alignment, size_t size);
int posix_memalign(void **result, size_t alignment, size_t size) {
  void *const block = fails() ? NULL : __libc_memalign(alignment, size);
  if (block == NULL) return 12;  // ENOMEM
  *result = block;
  return 0;
}

void *aligned_alloc(size_t alignment, size_t size);
void *aligned_alloc(size_t alignment, size_t size) {
  return fails() ? NULL : __libc_memalign(alignment, size);
}
