// What contexts share, and what their end waits for, beside a driver that counts.
#include "check.h"
#include "driver.h"

enum { SKIPPED = 77 };

static void events(unsloth_context *ctx) {
  unsloth_event *start = NULL, *end = NULL;
  float milliseconds = -1;
  uint32_t done = 7;
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &start));
  CHECK_OK(unsloth_event_create(ctx, UNSLOTH_EVENT_TIMING, &end));
  // Each is one call of the driver, and none queues a kernel or a copy.
  memset(&driver, 0, sizeof driver);
  CHECK_OK(unsloth_event_record(start, NULL));
  CHECK_OK(unsloth_stream_wait_event(ctx, NULL, start));
  CHECK_OK(unsloth_event_record(end, NULL));
  CHECK_OK(unsloth_event_synchronize(end));
  CHECK_OK(unsloth_event_query(end, &done));
  CHECK(driver.others == 5 && driver.launches == 0 && driver.copies == 0 && done == 1);
  CHECK_OK(unsloth_event_elapsed(start, end, &milliseconds));
  CHECK(milliseconds == 0.5f);
  CHECK_OK(unsloth_event_destroy(start));
  CHECK_OK(unsloth_event_destroy(end));
}

int main(void) {
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  unsloth_context *first = NULL, *second = NULL;
  unsloth_event *event = NULL;
  int loads;
  params.backend = UNSLOTH_BACKEND_CUDA;
  const unsloth_status status = unsloth_context_create(&params, &first);
  // A build for other architectures.
  if (status == UNSLOTH_STATUS_UNSUPPORTED_DEVICE) return SKIPPED;
  CHECK_OK(status);
  loads = driver.loads;
  CHECK(loads > 0);
  events(first);

  // A second context finds everything loaded, and keeps it when the first one goes.
  memset(&driver, 0, sizeof driver);
  CHECK_OK(unsloth_context_create(&params, &second));
  CHECK(driver.loads == 0);
  CHECK_OK(unsloth_event_create(first, 0, &event));
  CHECK_OK(unsloth_context_destroy(first));
  CHECK(driver.waits > 0 && driver.unloads == 0);
  // An event outlives its context.
  CHECK_OK(unsloth_event_record(event, NULL));
  CHECK_OK(unsloth_stream_wait_event(second, NULL, event));
  memset(&driver, 0, sizeof driver);
  CHECK_OK(unsloth_context_destroy(second));
  CHECK(driver.waits > 0 && driver.unloads == loads);
  CHECK_OK(unsloth_event_destroy(event));

  // The next one loads again.
  CHECK_OK(unsloth_context_create(&params, &first));
  CHECK(driver.loads == loads);
  CHECK_OK(unsloth_context_destroy(first));
  return 0;
}
