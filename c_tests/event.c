// Events: recorded, waited for, timed; the same checks on every backend.
#include "check.h"

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  unsloth_event *plain = NULL, *start = NULL, *end = NULL, *none = NULL;
  unsloth_stream stream = NULL;
  float data[1024], back[1024], milliseconds = -1;
  uint32_t done = 7;
  void *there = NULL;

  CHECK_FAILS(unsloth_event_create(ctx, 2, &none), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "event_create: flags is 0x2, allowed: 0, 1 (timing)");
  CHECK(none == NULL);
  CHECK_OK(unsloth_event_create(ctx, 0, &plain));
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &start));
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &end));

  // Never recorded, there is nothing to wait for and no time to tell.
  CHECK_OK(unsloth_event_query(plain, &done));
  CHECK(done == 1);
  CHECK_OK(unsloth_event_synchronize(plain));
  CHECK_OK(unsloth_stream_wait_event(ctx, NULL, plain));
  CHECK_FAILS(unsloth_event_elapsed(plain, end, &milliseconds), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "event_elapsed: start was made without timing");
  CHECK_FAILS(unsloth_event_elapsed(start, end, &milliseconds), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "event_elapsed: start was never recorded");
  CHECK_OK(unsloth_event_record(start, NULL));
  CHECK_FAILS(unsloth_event_elapsed(start, end, &milliseconds), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "event_elapsed: end was never recorded");
  CHECK(milliseconds == -1);

  // One stream fills, another one reads behind the event.
  CHECK_OK(unsloth_stream_create(ctx, &stream));
  fill_random(data, COUNT(data), 1);
  there = PUT(device, data);
  CHECK_OK(unsloth_memory_set(ctx, there, 0x3f, sizeof data, stream));
  CHECK_OK(unsloth_event_record(end, stream));
  CHECK_OK(unsloth_stream_wait_event(ctx, NULL, end));
  GET(device, back, there);
  memset(data, 0x3f, sizeof data);
  CHECK(memcmp(data, back, sizeof data) == 0);

  CHECK_OK(unsloth_event_synchronize(start));
  CHECK_OK(unsloth_event_synchronize(end));
  done = 7;
  CHECK_OK(unsloth_event_query(end, &done));
  CHECK(done == 1);
  CHECK_OK(unsloth_event_elapsed(start, end, &milliseconds));
  CHECK(milliseconds >= 0 && milliseconds < 60000);
  // It may be recorded again.
  CHECK_OK(unsloth_event_record(start, stream));
  CHECK_OK(unsloth_event_synchronize(start));
  CHECK_OK(unsloth_event_elapsed(end, start, &milliseconds));
  CHECK(milliseconds >= 0);

  CHECK_OK(unsloth_stream_destroy(ctx, stream));
  CHECK_OK(unsloth_event_destroy(plain));
  CHECK_STATUS(unsloth_event_destroy(plain), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_STATUS(unsloth_event_record(plain, NULL), UNSLOTH_STATUS_INVALID_HANDLE);
  CHECK_OK(unsloth_event_destroy(start));
  CHECK_OK(unsloth_event_destroy(end));
  CHECK_OK(unsloth_event_destroy(NULL));
}

// An event outlives its context; no stream but NULL is the CPU's.
static void alone(void) {
  unsloth_context *ctx = cpu_context();
  unsloth_event *event = NULL;
  int somewhere;
  CHECK_OK(unsloth_event_create(ctx, 0, &event));
  CHECK_STATUS(unsloth_event_record(event, &somewhere), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_STATUS(unsloth_stream_wait_event(ctx, &somewhere, event), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_OK(unsloth_context_destroy(ctx));
  CHECK_OK(unsloth_event_record(event, NULL));
  CHECK_OK(unsloth_event_destroy(event));
}

int main(void) {
  alone();
  return on_every_device(run);
}
