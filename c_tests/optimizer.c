// Steps of AdamW with a loss scale, a step that is skipped, a state that is saved and taken up
// again; ranks that share what is trained; arguments that are refused.
#include "ranks.h"

enum { SIZE = 3, SAVED = 4096 };

static unsloth_optimizer_status status_of(unsloth_optimizer *optimizer) {
  unsloth_optimizer_status s = UNSLOTH_OPTIMIZER_STATUS_INIT;
  CHECK_OK(unsloth_optimizer_read(optimizer, NULL, &s));
  return s;
}

static void run(const test_device *device) {
  unsloth_context *ctx = device->ctx;
  const float start[SIZE] = {1, -2, 0.5f}, scaled[SIZE] = {4, -8, 0};
  const float infinite[SIZE] = {0, INFINITY, 0};
  float weight[SIZE], gradient[SIZE], first[SIZE];
  static char saved[SAVED], again[SAVED];
  void *there = PUT(device, start), *there_gradient = PUT(device, scaled);

  unsloth_parameter parameter;
  unsloth_parameter_group group = {0.5f, 0.25f};
  unsloth_optimizer_params p = UNSLOTH_OPTIMIZER_PARAMS_INIT;
  unsloth_optimizer *optimizer = NULL;
  memset(&parameter, 0, sizeof parameter);
  parameter.weight = f32_tensor(there, SIZE, -1, -1, -1);
  parameter.gradient = f32_tensor(there_gradient, SIZE, -1, -1, -1);
  p.decoupled = p.zero_gradients = 1;
  p.precision.loss_scale.dynamic = 1;
  p.precision.loss_scale.init = 4;
  p.parameters = &parameter;
  p.groups = &group;
  p.num_parameters = p.num_groups = 1;
  CHECK_OK(unsloth_optimizer_supported(ctx, &p, NULL));
  CHECK_OK(unsloth_optimizer_state_size(ctx, &p, &p.state_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.state_size, &p.state));
  CHECK_OK(unsloth_optimizer_create(ctx, &p, NULL, &optimizer));

  unsloth_tensor scale;
  float of_loss[1];
  CHECK_OK(unsloth_optimizer_loss_scale(optimizer, &scale));
  CHECK(scale.dtype == UNSLOTH_DTYPE_F32 && scale.rank == 1 && scale.shape[0] == 1);
  GET(device, of_loss, scale.data);
  CHECK(of_loss[0] == 4);

  // The first step is as long as the learning rate, wherever there is a gradient.
  CHECK_OK(unsloth_optimizer_step(optimizer, NULL));
  GET(device, first, there);
  GET(device, gradient, there_gradient);
  for (int i = 0; i < SIZE; i++) {
    const float sign = (float)((scaled[i] > 0) - (scaled[i] < 0));
    CHECK_NEAR(first[i], start[i] * (1 - 0.125f) - 0.5f * sign, 1e-6);
    CHECK(gradient[i] == 0);
  }
  unsloth_optimizer_status s = status_of(optimizer);
  CHECK(s.step == 1 && s.skipped == 0 && s.found_inf == 0 && s.loss_scale == 4);
  CHECK_NEAR(s.gradient_norm, sqrt(5), 1e-6);

  size_t size = 0;
  CHECK_OK(unsloth_optimizer_saved_size(optimizer, &size));
  CHECK(size <= SAVED);
  CHECK_OK(unsloth_optimizer_save(optimizer, saved, size, NULL));

  // An overflow leaves the weights, and halves the scale.
  CHECK_OK(unsloth_memory_copy(ctx, there_gradient, infinite, sizeof infinite,
                               UNSLOTH_COPY_KIND_HOST_TO_DEVICE, NULL));
  CHECK_OK(unsloth_optimizer_step(optimizer, NULL));
  GET(device, weight, there);
  CHECK(memcmp(weight, first, sizeof weight) == 0);
  s = status_of(optimizer);
  CHECK(s.step == 1 && s.skipped == 1 && s.found_inf == 1 && s.loss_scale == 2);
  CHECK_OK(unsloth_optimizer_load(optimizer, saved, size, NULL));
  CHECK_OK(unsloth_optimizer_save(optimizer, again, size, NULL));
  CHECK(memcmp(saved, again, size) == 0);

  // Half of a gradient, at a rate of zero with which nothing moves.
  group.learning_rate = 0;
  CHECK_OK(unsloth_optimizer_set_group(optimizer, 0, &group, NULL));
  CHECK_OK(unsloth_memory_copy(ctx, there_gradient, scaled, sizeof scaled,
                               UNSLOTH_COPY_KIND_HOST_TO_DEVICE, NULL));
  CHECK_OK(unsloth_gradients_scale(optimizer, 0.5f, NULL));
  GET(device, gradient, there_gradient);
  CHECK(gradient[0] == 2 && gradient[1] == -4 && gradient[2] == 0);
  CHECK_OK(unsloth_optimizer_step(optimizer, NULL));
  GET(device, weight, there);
  CHECK(memcmp(weight, first, sizeof weight) == 0);

  CHECK_FAILS(unsloth_optimizer_set_group(optimizer, 1, &group, NULL),
              UNSLOTH_STATUS_INVALID_ARGUMENT,
              "optimizer_set_group: group is 1, the number of groups is 1");
  CHECK_OK(unsloth_optimizer_destroy(optimizer));
  CHECK_STATUS(unsloth_optimizer_step(optimizer, NULL), UNSLOTH_STATUS_INVALID_HANDLE);
  p.kind = UNSLOTH_OPTIMIZER_ADAM_8BIT;
  optimizer = NULL;
  CHECK_FAILS(unsloth_optimizer_create(ctx, &p, NULL, &optimizer), UNSLOTH_STATUS_UNSUPPORTED,
              "optimizer: kind is 1 (adam 8-bit), which is estimated, but not made by this "
              "version");
  CHECK(optimizer == NULL);
}

// The norm is that of all ranks' gradients, 1, 2 and 2.
static void share(unsloth_context *ctx, unsloth_comm *comm, int rank) {
  float weight[1] = {4}, gradient[1] = {rank == 0 ? 1.0f : 2.0f};
  unsloth_parameter parameter;
  unsloth_parameter_group group = {1, 0};
  unsloth_optimizer_params p = UNSLOTH_OPTIMIZER_PARAMS_INIT;
  unsloth_optimizer *optimizer = NULL;
  memset(&parameter, 0, sizeof parameter);
  parameter.weight = f32_tensor(weight, 1, -1, -1, -1);
  parameter.gradient = f32_tensor(gradient, 1, -1, -1, -1);
  p.kind = UNSLOTH_OPTIMIZER_SGD;
  p.max_norm = 1.5f;
  p.parameters = &parameter;
  p.groups = &group;
  p.num_parameters = p.num_groups = 1;
  p.comm = comm;
  CHECK_OK(unsloth_optimizer_state_size(ctx, &p, &p.state_size));
  CHECK_OK(unsloth_memory_alloc(ctx, p.state_size, &p.state));
  CHECK_OK(unsloth_optimizer_create(ctx, &p, NULL, &optimizer));
  CHECK_OK(unsloth_optimizer_step(optimizer, NULL));
  CHECK_NEAR(status_of(optimizer).gradient_norm, 3, 1e-6);
  CHECK_NEAR(weight[0], 4 - gradient[0] / 2, 1e-5);

  // An overflow on one rank is one of all.
  if (rank == 1) gradient[0] = INFINITY;
  CHECK_OK(unsloth_optimizer_step(optimizer, NULL));
  CHECK(status_of(optimizer).found_inf == 1 && status_of(optimizer).skipped == 1);
  CHECK_OK(unsloth_optimizer_destroy(optimizer));
  CHECK_OK(unsloth_memory_free(ctx, p.state));
}

int main(void) {
  const int failed = on_every_device(run);
  return failed != 0 ? failed : on_every_rank(share);
}
