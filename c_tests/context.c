// Devices, contexts and streams.
#include "check.h"

// A caller compiled against an earlier header, whose struct ended sooner.
typedef struct earlier_stats {
  uint32_t struct_size;
  uint32_t reserved;
} earlier_stats;

int main(void) {
  unsloth_device_info info = UNSLOTH_DEVICE_INFO_INIT;
  unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
  unsloth_context *contexts[8] = {NULL}, *ctx = NULL;
  unsloth_stream stream = NULL;
  int32_t count = -1;

  CHECK_OK(unsloth_device_info_get(UNSLOTH_BACKEND_CPU, 0, &info));
  CHECK(info.backend == UNSLOTH_BACKEND_CPU && info.device == 0);
  CHECK(info.num_units >= 1 && info.name[0] != '\0');
  CHECK(memchr(info.name, '\0', sizeof info.name) != NULL);
  CHECK(info.free_memory <= info.total_memory);

  // The backend may be missing, never the answer.
  {
    const unsloth_status status = unsloth_device_count(UNSLOTH_BACKEND_CUDA, &count);
    CHECK(status == UNSLOTH_STATUS_SUCCESS || status == UNSLOTH_STATUS_BACKEND_UNAVAILABLE);
    CHECK((count >= 0) == (status == UNSLOTH_STATUS_SUCCESS));
    if (status == UNSLOTH_STATUS_BACKEND_UNAVAILABLE) {
      // Not built with it, or no driver here: which of them is said.
      const int built = strstr(unsloth_build_info(), "cpu, cuda") != NULL;
      char message[256];
      unsloth_last_error_message(message, sizeof message);
      CHECK(strstr(message, "device_count: the cuda backend is unavailable: ") == message);
      CHECK((strstr(message, "this build does not contain it") == NULL) == built);
    }
  }

  params.num_threads = 2;
  for (size_t i = 0; i < COUNT(contexts); i++) {
    CHECK_OK(unsloth_context_create(&params, &contexts[i]));
    for (size_t j = 0; j < i; j++) CHECK(contexts[i] != contexts[j]);
  }
  for (size_t i = 0; i < COUNT(contexts); i++) {
    CHECK_OK(unsloth_context_destroy(contexts[i]));
    CHECK_STATUS(unsloth_context_destroy(contexts[i]), UNSLOTH_STATUS_INVALID_HANDLE);
  }
  CHECK_OK(unsloth_context_destroy(NULL));

  params.backend = 77;
  CHECK_FAILS(unsloth_context_create(&params, &ctx), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "context_create: backend is 77, allowed: 0 (cpu), 1 (cuda)");
  CHECK(ctx == NULL);

  ctx = cpu_context();
  CHECK_OK(unsloth_stream_create(ctx, &stream));
  CHECK_OK(unsloth_stream_synchronize(ctx, stream));
  CHECK_OK(unsloth_stream_destroy(ctx, stream));
  CHECK_OK(unsloth_stream_synchronize(ctx, NULL));
  {
    earlier_stats stats = {sizeof stats, 0};
    CHECK_STATUS(unsloth_memory_stats_get(ctx, (unsloth_memory_stats *)(void *)&stats),
                 UNSLOTH_STATUS_INVALID_ARGUMENT);
  }
  CHECK_OK(unsloth_context_destroy(ctx));
  return 0;
}
