// Under a profiler each call of an operation is a range with the operation's name, and ends with
// the call, also where it is refused.
#include <dlfcn.h>

#include "check.h"
#include "profiler.h"

int main(void) {
  unsloth_context *ctx = NULL;
  unsloth_rms_norm_params norm = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_cast_params cast = UNSLOTH_CAST_PARAMS_INIT;
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8];
  const char *path = getenv("NVTX_INJECTION64_PATH");
  void *profiler = path ? dlopen(path, RTLD_NOW) : NULL;
  const struct seen *seen = profiler ? (const struct seen *)dlsym(profiler, "profiler_seen") : NULL;
  CHECK(seen != NULL);

  CHECK_OK(unsloth_context_create(NULL, &ctx));
  norm.x = f32_tensor(x, 2, 4, -1, -1);
  norm.out = f32_tensor(out, 2, 4, -1, -1);
  norm.epsilon = 1e-5f;
  CHECK(seen->pushed == 0);
  CHECK_OK(unsloth_rms_norm_forward(ctx, &norm, NULL));
  CHECK(seen->loaded == 1 && seen->pushed == 1 && seen->popped == 1);
  CHECK(strcmp(seen->name, "unsloth: rms_norm") == 0);

  cast.x = norm.x;
  cast.out = norm.out;
  CHECK_OK(unsloth_cast_forward(ctx, &cast, NULL));
  CHECK(seen->pushed == 2 && seen->popped == 2);
  CHECK(strcmp(seen->name, "unsloth: cast") == 0);

  norm.out.shape[0] = 1;
  CHECK_STATUS(unsloth_rms_norm_forward(ctx, &norm, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK(seen->pushed == 3 && seen->popped == 3);
  // Questions are no work.
  norm.out.shape[0] = 2;
  CHECK_OK(unsloth_rms_norm_supported(ctx, &norm, NULL));
  CHECK(seen->pushed == 3);
  CHECK_OK(unsloth_context_destroy(ctx));
  dlclose(profiler);
  return 0;
}
