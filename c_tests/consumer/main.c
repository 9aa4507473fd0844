// The least that shows that the library is found, linked and runs.
#include <string.h>
#include <unsloth.h>

int main(void) {
  float x[2] = {3, 4};
  unsloth_rms_norm_params p = UNSLOTH_RMS_NORM_PARAMS_INIT;
  unsloth_context *ctx = NULL;
  if (unsloth_context_create(NULL, &ctx) != UNSLOTH_STATUS_SUCCESS) return 1;
  p.epsilon = 1e-6f;
  p.x.data = x;
  p.x.dtype = UNSLOTH_DTYPE_F32;
  p.x.rank = 1;
  p.x.shape[0] = 2;
  if (unsloth_rms_norm_forward(ctx, &p, NULL) != UNSLOTH_STATUS_SUCCESS) return 2;
  // In place: 3 and 4 over the root of 12.5.
  if (x[0] < 0.848f || x[0] > 0.849f || x[1] < 1.131f || x[1] > 1.132f) return 3;
  if (strncmp(unsloth_version(), "0.", 2) != 0) return 4;
  return unsloth_context_destroy(ctx) != UNSLOTH_STATUS_SUCCESS;
}
