// What the C tests share. Every test is one file with a `main`, compiled as C11 and as C++17; it
// prints nothing and returns 0, or tells on stderr what failed and returns 1 at once.
#ifndef UNSLOTH_CHECK_H
#define UNSLOTH_CHECK_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unsloth.h"

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

// The call gives this status.
#define CHECK_STATUS(call, status) check_status(call, status, #call, __FILE__, __LINE__)

// The call succeeds.
#define CHECK_OK(call) CHECK_STATUS(call, UNSLOTH_STATUS_SUCCESS)

// The call fails with this status and exactly this message.
#define CHECK_FAILS(call, status, message) \
  check_fails(call, status, message, #call, __FILE__, __LINE__)

// Two numbers differ by at most this much; a NaN never passes.
#define CHECK_NEAR(actual, expected, tolerance) \
  check_near(actual, expected, tolerance, #actual, __FILE__, __LINE__)

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static inline void check_status(unsloth_status actual, unsloth_status expected, const char *call,
                                const char *file, int line) {
  char message[1024];
  if (actual == expected) return;
  unsloth_last_error_message(message, sizeof message);
  fprintf(stderr, "%s:%d: %s is %s, not %s; last message: %s\n", file, line, call,
          unsloth_status_name(actual), unsloth_status_name(expected), message);
  exit(1);
}

static inline void check_fails(unsloth_status actual, unsloth_status expected, const char *message,
                               const char *call, const char *file, int line) {
  char said[1024];
  check_status(actual, expected, call, file, line);
  unsloth_last_error_message(said, sizeof said);
  if (strcmp(said, message) == 0) return;
  fprintf(stderr, "%s:%d: %s says \"%s\", not \"%s\"\n", file, line, call, said, message);
  exit(1);
}

static inline void check_near(double actual, double expected, double tolerance, const char *what,
                              const char *file, int line) {
  if (fabs(actual - expected) <= tolerance) return;
  fprintf(stderr, "%s:%d: %s is %.9g, not %.9g within %g\n", file, line, what, actual, expected,
          tolerance);
  exit(1);
}

// A context on the CPU, for tests of what no backend has a part in.
static inline unsloth_context *cpu_context(void) {
  unsloth_context *ctx = NULL;
  CHECK_OK(unsloth_context_create(NULL, &ctx));
  return ctx;
}

// A device that a test runs on, and its context.
typedef struct {
  unsloth_context *ctx;
  int is_cpu;
} test_device;

// Runs a test on every backend that the build and the machine have, each time with a fresh context.
// UNSLOTH_REQUIRE_GPU=1 says that a GPU must be among them.
static inline int on_every_device(void (*run)(const test_device *device)) {
  static const unsloth_backend backends[] = {UNSLOTH_BACKEND_CPU, UNSLOTH_BACKEND_CUDA};
  for (size_t i = 0; i < COUNT(backends); i++) {
    unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
    test_device device = {NULL, backends[i] == UNSLOTH_BACKEND_CPU};
    int32_t count = 0;
    const unsloth_status status = unsloth_device_count(backends[i], &count);
    if (!device.is_cpu && (status == UNSLOTH_STATUS_BACKEND_UNAVAILABLE || count == 0)) {
      const char *required = getenv("UNSLOTH_REQUIRE_GPU");
      if (required == NULL || strcmp(required, "1") != 0) continue;
      CHECK_OK(status);
      CHECK(count > 0);
    }
    params.backend = backends[i];
    CHECK_OK(unsloth_context_create(&params, &device.ctx));
    run(&device);
    CHECK_OK(unsloth_context_destroy(device.ctx));
  }
  return 0;
}

// Whether the device has a kernel, by what `unsloth_*_supported` gave; the CPU has all.
static inline int served(const test_device *device, unsloth_status status) {
  if (!device->is_cpu && status == UNSLOTH_STATUS_UNSUPPORTED) return 0;
  CHECK_OK(status);
  return 1;
}

// The device's memory with these bytes; it goes with the context.
static inline void *put(const test_device *device, const void *host, size_t size) {
  void *there = NULL;
  CHECK_OK(unsloth_memory_alloc(device->ctx, size, &there));
  CHECK_OK(
      unsloth_memory_copy(device->ctx, there, host, size, UNSLOTH_COPY_KIND_HOST_TO_DEVICE, NULL));
  CHECK_OK(unsloth_stream_synchronize(device->ctx, NULL));
  return there;
}

// What the device's memory holds once the default stream is done.
static inline void get(const test_device *device, void *host, const void *there, size_t size) {
  CHECK_OK(
      unsloth_memory_copy(device->ctx, host, there, size, UNSLOTH_COPY_KIND_DEVICE_TO_HOST, NULL));
  CHECK_OK(unsloth_stream_synchronize(device->ctx, NULL));
}

#define PUT(device, array) put(device, array, sizeof(array))
#define GET(device, array, there) get(device, array, there, sizeof(array))

// A contiguous tensor of up to four dimensions; a size of -1 and those after it are left out.
static inline unsloth_tensor tensor(void *data, unsloth_dtype dtype, int64_t d0, int64_t d1,
                                    int64_t d2, int64_t d3) {
  const int64_t sizes[4] = {d0, d1, d2, d3};
  unsloth_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = dtype;
  while (t.rank < 4 && sizes[t.rank] >= 0) {
    t.shape[t.rank] = sizes[t.rank];
    t.rank++;
  }
  return t;
}

static inline unsloth_tensor f32_tensor(void *data, int64_t d0, int64_t d1, int64_t d2,
                                        int64_t d3) {
  return tensor(data, UNSLOTH_DTYPE_F32, d0, d1, d2, d3);
}

// The next of a sequence of numbers in [-1, 1), the same on every machine (Numerical Recipes'
// generator).
static inline float random_float(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static inline void fill_random(float *data, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; i++) data[i] = random_float(&seed);
}

#endif
