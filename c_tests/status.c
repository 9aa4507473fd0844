// Statuses, messages and versions.
#include "check.h"

int main(void) {
  static const struct {
    unsloth_status status;
    const char *name;
  } names[] = {
      {UNSLOTH_STATUS_SUCCESS, "UNSLOTH_STATUS_SUCCESS"},
      {UNSLOTH_STATUS_INVALID_ARGUMENT, "UNSLOTH_STATUS_INVALID_ARGUMENT"},
      {UNSLOTH_STATUS_NULL_POINTER, "UNSLOTH_STATUS_NULL_POINTER"},
      {UNSLOTH_STATUS_INVALID_HANDLE, "UNSLOTH_STATUS_INVALID_HANDLE"},
      {UNSLOTH_STATUS_UNSUPPORTED, "UNSLOTH_STATUS_UNSUPPORTED"},
      {UNSLOTH_STATUS_WORKSPACE_TOO_SMALL, "UNSLOTH_STATUS_WORKSPACE_TOO_SMALL"},
      {UNSLOTH_STATUS_OUT_OF_MEMORY, "UNSLOTH_STATUS_OUT_OF_MEMORY"},
      {UNSLOTH_STATUS_OUT_OF_PAGES, "UNSLOTH_STATUS_OUT_OF_PAGES"},
      {UNSLOTH_STATUS_BACKEND_UNAVAILABLE, "UNSLOTH_STATUS_BACKEND_UNAVAILABLE"},
      {UNSLOTH_STATUS_UNSUPPORTED_DEVICE, "UNSLOTH_STATUS_UNSUPPORTED_DEVICE"},
      {UNSLOTH_STATUS_CUDA_ERROR, "UNSLOTH_STATUS_CUDA_ERROR"},
      {UNSLOTH_STATUS_INTERNAL_ERROR, "UNSLOTH_STATUS_INTERNAL_ERROR"},
      {UNSLOTH_STATUS_COMM_ERROR, "UNSLOTH_STATUS_COMM_ERROR"},
      {-1, "UNSLOTH_STATUS_UNKNOWN"},
      {INT32_MAX, "UNSLOTH_STATUS_UNKNOWN"},
  };
  char version[32], message[64] = "kept", all[64];
  const char *expected = "device_count: count is NULL";

  for (size_t i = 0; i < COUNT(names); i++) {
    CHECK(strcmp(unsloth_status_name(names[i].status), names[i].name) == 0);
  }

  snprintf(version, sizeof version, "%d.%d.%d", UNSLOTH_VERSION_MAJOR, UNSLOTH_VERSION_MINOR,
           UNSLOTH_VERSION_PATCH);
  CHECK(strcmp(unsloth_version(), version) == 0);
  CHECK(strstr(unsloth_build_info(), version) != NULL);
  CHECK(strstr(unsloth_build_info(), "cpu") != NULL);

  // No call has failed yet.
  CHECK(unsloth_last_error_message(NULL, 0) == 0);
  CHECK(unsloth_last_error_message(message, sizeof message) == 0 && message[0] == '\0');

  CHECK_FAILS(unsloth_device_count(UNSLOTH_BACKEND_CPU, NULL), UNSLOTH_STATUS_NULL_POINTER,
              expected);
  // Told whole, cut, and only counted.
  CHECK(unsloth_last_error_message(NULL, 100) == strlen(expected));
  memset(all, 'x', sizeof all);
  CHECK(unsloth_last_error_message(all, 7) == strlen(expected));
  CHECK(memcmp(all, "device\0x", 8) == 0);
  CHECK(unsloth_last_error_message(all, 0) == strlen(expected) && all[0] == 'd');

  // A call that succeeds leaves the message.
  {
    int32_t count = 0;
    CHECK_OK(unsloth_device_count(UNSLOTH_BACKEND_CPU, &count));
    CHECK(count == 1);
    CHECK(unsloth_last_error_message(NULL, 0) == strlen(expected));
  }
  return 0;
}
