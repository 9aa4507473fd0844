// Every allocation of every exported function fails once, alone and with all that follow, each time
// in a process of its own. The call then says that memory is lacking (or does without), leaves
// everything as it was, and succeeds when it is made again. Where a dependency ends the process
// instead, `tolerated` says which and when.
//
// A new function of the library is a line of calls.h. UNSLOTH_TEST_ONLY names one call, and
// UNSLOTH_TEST_VERBOSE=1 shows what children say.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "allocator.h"
#include "calls.h"
#include "check.h"

// Crates that end the process where they find no memory, and when that happens.
static const struct {
  const char *symbol, *when;
} tolerated[] = {
    {"gemm", "a matrix is multiplied: a table of a byte for each few rows of it"},
    {"dyn_stack", "a matrix is packed, though as much memory was free when the product began"},
};

// ---- One call in a process of its own.

// What a child tells its parent.
typedef struct {
  allocations seen;
  int done;
  uint64_t result;
  char problem[256];
} report;

// What may not change when a call fails. Addresses of the process are alike in all of them.
typedef struct {
  uint64_t outputs, caches;
  uint64_t in_use, num_allocations;
  void *pointers[7];
  int64_t numbers[4];
} state;

static uint64_t hash(uint64_t h, const void *data, size_t length) {
  const unsigned char *bytes = (const unsigned char *)data;
  for (size_t i = 0; i < length; i++) h = (h ^ bytes[i]) * 1099511628211u;
  return h;
}

static uint64_t hash_of_cache(void) {
  uint64_t h = 14695981039346656037u;
  unsloth_kv_cache_stats s = UNSLOTH_KV_CACHE_STATS_INIT;
  unsloth_kv_cache_batch b = UNSLOTH_KV_CACHE_BATCH_INIT;
  unsloth_tensor k, v;
  if (cache == NULL || unsloth_kv_cache_stats_get(cache, &s) != OK) return h;
  // Reserved pages and the like; the fragmentation is a sum of the same.
  h = hash(h, &s, sizeof s);
  if (unsloth_kv_cache_batch_get(cache, &b) == OK) {
    h = hash(h, b.host_seq_lens, (size_t)b.num_sequences * 4);
    h = hash(h, b.host_cu_seqlens, (size_t)(b.num_sequences + 1) * 4);
    h = hash(h, b.host_positions, (size_t)b.num_tokens * 4);
  }
  for (int64_t layer = 0; layer < 2; layer++) {
    CHECK_OK(unsloth_kv_cache_layer_get(cache, layer, &k, &v));
    const size_t element = k.dtype == UNSLOTH_DTYPE_F8E4M3 ? 1 : 4;
    h = hash(h, k.data, PAGES * PAGE * KV_HEADS * DIM * element);
    h = hash(h, v.data, PAGES * PAGE * KV_HEADS * DIM * element);
  }
  return h;
}

static state look(void) {
  state s;
  unsloth_memory_stats memory = UNSLOTH_MEMORY_STATS_INIT;
  memset(&s, 0, sizeof s);
  s.outputs = hash(14695981039346656037u, outputs, sizeof outputs);
  s.outputs = hash(s.outputs, ids, sizeof ids);
  s.caches = hash_of_cache();
  if (ctx != NULL && unsloth_memory_stats_get(ctx, &memory) == OK) {
    s.in_use = memory.in_use;
    s.num_allocations = memory.num_allocations;
  }
  s.pointers[0] = created;
  s.pointers[1] = created_cache;
  s.pointers[2] = block;
  s.pointers[3] = stream;
  s.pointers[4] = keys.data;
  s.pointers[5] = created_optimizer;
  s.pointers[6] = created_comm;
  s.numbers[0] = sequence;
  s.numbers[1] = number;
  s.numbers[2] = device_count;
  s.numbers[3] = (int64_t)size;
  return s;
}

static void problem(report *to, const char *what, unsloth_status status) {
  char message[160];
  unsloth_last_error_message(message, sizeof message);
  snprintf(to->problem, sizeof to->problem, "%s; %s: %s", what, unsloth_status_name(status),
           message);
}

// Threads of a context that have just been started allocate; they are done after a moment.
static void settle(void) {
  const struct timespec moment = {0, 3000000};
  nanosleep(&moment, NULL);
}

static void child(const call *c, long n, int lasting, report *to) {
  char message[8] = "";
  unsloth_status status;
  state before, after;
  fill_random(inputs, COUNT(inputs), 1);
  memset(outputs, 0xff, sizeof outputs);
  c->ready();
  settle();
  before = look();
  allocator_arm(&to->seen, n, lasting);
  status = c->call();
  allocator_disarm();
  after = look();
  if (to->seen.failed && status != c->expected) {
    if (status != UNSLOTH_STATUS_OUT_OF_MEMORY) problem(to, "another status", status);
    // A block appends before it attends. What it wrote are the new tokens' own places, which nobody
    // reads before a call has filled them, and the next call writes again.
    if (strcmp(c->name, "block_cached") == 0) after.caches = before.caches;
    if (memcmp(&before, &after, sizeof before) != 0) problem(to, "something has changed", status);
    if (unsloth_last_error_message(message, sizeof message) == 0)
      problem(to, "there is no message", status);
    status = c->call();
  }
  if (status != c->expected) problem(to, "then another status", status);
  after = look();
  to->result = after.outputs ^ after.caches;
  to->done = 1;
}

static report *shared;

// Runs a child; returns the signal that ended it, if one did.
static int run(const call *c, long n, int lasting) {
  int status;
  pid_t pid;
  memset(shared, 0, sizeof *shared);
  fflush(NULL);
  pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(20);
    // What the runtime says before it ends the process is expected.
    if (n >= 0 && getenv("UNSLOTH_TEST_VERBOSE") == NULL) CHECK(freopen("/dev/null", "w", stderr));
    child(c, n, lasting, shared);
    _exit(0);
  }
  CHECK(waitpid(pid, &status, 0) == pid);
  if (WIFSIGNALED(status)) return WTERMSIG(status);
  if (!shared->done) snprintf(shared->problem, sizeof shared->problem, "it ended early");
  return 0;
}

// ---- What ended a process.

// Where the name of a crate starts in a line of addr2line, such as `<dyn_stack::MemBuffer>::new`.
static const char *crate_of(const char *line) {
  static const char *const crates[] = {"unsloth", "gemm", "dyn_stack", "pulp"};
  line += strspn(line, "<&");
  for (size_t i = 0; i < COUNT(crates); i++) {
    if (strncmp(line, crates[i], strlen(crates[i])) == 0) return line;
  }
  return NULL;
}

// An addr2line that reads addresses as they come: it takes a second to read what the library has of
// lines, and is asked about some hundred endings.
static struct {
  const char *library;
  FILE *to, *from;
} addresses;

static void start_addr2line(const char *library) {
  int to[2], from[2];
  pid_t pid;
  CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
  fflush(NULL);
  pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execlp("addr2line", "addr2line", "-a", "-f", "-i", "-C", "-e", library, (char *)NULL);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  addresses.library = library;
  addresses.to = fdopen(to[1], "w");
  addresses.from = fdopen(from[0], "r");
  CHECK(addresses.to != NULL && addresses.from != NULL);
}

// The innermost function that is the library's or a dependency's, not Rust's own, by addr2line. The
// same frames are looked up once.
static const char *culprit(const allocations *seen) {
  enum { KNOWN = 4096 };
  static struct {
    uint64_t frames;
    char name[200];
  } known[KNOWN];
  static size_t num_known;
  char line[4096];
  int asked = 0, found = 0;
  const uint64_t frames = hash(1, seen->frames, (size_t)seen->num_frames * sizeof(void *));
  for (size_t i = 0; i < num_known; i++) {
    if (known[i].frames == frames) return known[i].name;
  }
  CHECK(num_known < KNOWN);
  known[num_known].frames = frames;
  snprintf(known[num_known].name, sizeof known[0].name, "nobody known");
  for (int i = 0; i < seen->num_frames; i++) {
    Dl_info about;
    if (dladdr(seen->frames[i], &about) == 0 || strstr(about.dli_fname, "libunsloth") == NULL)
      continue;
    if (addresses.to == NULL) start_addr2line(about.dli_fname);
    CHECK(strcmp(about.dli_fname, addresses.library) == 0);
    // An address returned to belongs to the call before it.
    fprintf(addresses.to, "0x%lx\n",
            (unsigned long)((char *)seen->frames[i] - (char *)about.dli_fbase) - 1);
    asked = 1;
  }
  if (!asked) return known[num_known++].name;
  // Nothing is there, so that is the last answer: the address, a function and a line of none.
  CHECK(fputs("0x0\n", addresses.to) >= 0 && fflush(addresses.to) == 0);
  for (;;) {
    const char *name;
    CHECK(fgets(line, sizeof line, addresses.from) != NULL);
    if (strncmp(line, "0x", 2) == 0 && strtoul(line, NULL, 16) == 0) break;
    name = found ? NULL : crate_of(line);
    if (name == NULL) continue;
    line[strcspn(line, "\n")] = '\0';
    snprintf(known[num_known].name, sizeof known[0].name, "%s", name);
    found = 1;
  }
  CHECK(fgets(line, sizeof line, addresses.from) != NULL);
  CHECK(fgets(line, sizeof line, addresses.from) != NULL);
  return known[num_known++].name;
}

static int is_tolerated(const char *name) {
  for (size_t i = 0; i < COUNT(tolerated); i++) {
    if (strncmp(name, tolerated[i].symbol, strlen(tolerated[i].symbol)) == 0) return 1;
  }
  return 0;
}

// Every function of the list of symbols is called.
static void check_complete(const char *path) {
  char line[128];
  FILE *symbols = fopen(path, "r");
  CHECK(symbols != NULL);
  while (fgets(line, sizeof line, symbols) != NULL) {
    int found = 0;
    line[strcspn(line, "\n")] = '\0';
    for (size_t i = 0; i < COUNT(calls); i++) {
      const char *const at = strstr(calls[i].function, line);
      found |= at != NULL && strcmp(at, line) == 0;
    }
    if (!found) {
      fprintf(stderr, "no call of %s: add it to calls.h\n", line);
      exit(1);
    }
  }
  fclose(symbols);
}

// gemm reads the sizes of the processor's caches at the process's first product, from some hundred
// files. Children have that from their parent, who is alone again when they are forked.
static void warm_up(void) {
  const struct timespec moment = {0, 100000000};
  linear_ready();
  CHECK_OK(unsloth_linear_forward(ctx, &linear, NULL));
  CHECK_OK(unsloth_context_destroy(ctx));
  linear_of_halves_ready();
  CHECK_OK(unsloth_linear_forward(ctx, &linear, NULL));
  CHECK_OK(unsloth_context_destroy(ctx));
  ctx = NULL;
  inputs_used = outputs_used = 0;
  nanosleep(&moment, NULL);
}

int main(int argc, char **argv) {
  const char *only = getenv("UNSLOTH_TEST_ONLY");
  long injected = 0, ended = 0, wrong = 0;
  void *frame;
  CHECK(argc == 2);
  check_complete(argv[1]);
  // Its first call loads a library.
  backtrace(&frame, 1);
  shared = (report *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                          -1, 0);
  CHECK(shared != MAP_FAILED);
  warm_up();
  for (size_t i = 0; i < COUNT(calls); i++) {
    const call *c = &calls[i];
    if (only != NULL && strcmp(only, c->name) != 0) continue;
    const int signal = run(c, -1, 0);
    if (signal != 0 || shared->problem[0] != '\0') {
      fprintf(stderr, "%s: without a failure: signal %d, %s\n", c->name, signal, shared->problem);
      return 1;
    }
    const uint64_t expected = shared->result;
    for (int lasting = 0; lasting < 2; lasting++) {
      // The number of allocations may differ from run to run where threads start.
      for (long n = 0; n < 1000; n++) {
        const char *name;
        const int signal = run(c, n, lasting);
        if (!shared->seen.failed && signal == 0) break;
        injected++;
        if (signal != 0) {
          ended++;
          if (signal == SIGABRT && is_tolerated(culprit(&shared->seen))) continue;
        } else if (shared->problem[0] == '\0' && shared->result != expected) {
          snprintf(shared->problem, sizeof shared->problem, "another result");
        }
        if (signal == 0 && shared->problem[0] == '\0') continue;
        wrong++;
        name = culprit(&shared->seen);
        fprintf(stderr, "%s: allocation %ld%s, by %s: signal %d %s\n", c->name, n,
                lasting ? " and all that follow" : "", name, signal, shared->problem);
      }
    }
  }
  fprintf(stderr, "%ld failures injected, %ld ended the process, %ld went wrong\n", injected, ended,
          wrong);
  return wrong == 0 && (injected > 100 || only != NULL) ? 0 : 1;
}
