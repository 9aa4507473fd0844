// Logging: a callback gets what its level lets through, and its own pointer.
#include "check.h"

typedef struct {
  int count;
  unsloth_log_level level;
  char message[256];
} told;

static void keep(unsloth_log_level level, const char *message, void *user) {
  told *last = (told *)user;
  last->count++;
  last->level = level;
  snprintf(last->message, sizeof last->message, "%s", message);
}

static void refuse(void) {
  int32_t count;
  CHECK_FAILS(unsloth_device_count(77, &count), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "device_count: backend is 77, allowed: 0 (cpu), 1 (cuda)");
}

int main(void) {
  told last;
  memset(&last, 0, sizeof last);
  refuse();
  CHECK_FAILS(unsloth_log_set(6, keep, &last), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "log_set: level is 6, allowed: 0 (off) to 5 (trace)");
  CHECK_OK(unsloth_log_set(UNSLOTH_LOG_LEVEL_INFO, keep, &last));
  refuse();
  CHECK(last.count == 0);
  CHECK_OK(unsloth_context_destroy(cpu_context()));
  CHECK(last.count == 1 && last.level == UNSLOTH_LOG_LEVEL_INFO);
  CHECK(strstr(last.message, "context: cpu 0 (") == last.message);
  CHECK_OK(unsloth_log_set(UNSLOTH_LOG_LEVEL_DEBUG, keep, &last));
  refuse();
  CHECK(last.count == 2 && last.level == UNSLOTH_LOG_LEVEL_DEBUG);
  CHECK(strcmp(last.message, "device_count: backend is 77, allowed: 0 (cpu), 1 (cuda)") == 0);
  CHECK_OK(unsloth_log_set(UNSLOTH_LOG_LEVEL_OFF, NULL, NULL));
  refuse();
  CHECK(last.count == 2);
  return 0;
}
