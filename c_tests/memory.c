// Memory: allocation, accounting, limits and copies.
#include "check.h"

static unsloth_memory_stats stats(unsloth_context *ctx) {
  unsloth_memory_stats s = UNSLOTH_MEMORY_STATS_INIT;
  CHECK_OK(unsloth_memory_stats_get(ctx, &s));
  return s;
}

static void run(const test_device *device) {
  enum { SIZE = 1000 };
  unsloth_context *ctx = device->ctx;
  unsigned char host[SIZE], back[SIZE];
  void *a = NULL, *b = NULL, *c = NULL;

  for (size_t i = 0; i < SIZE; i++) host[i] = (unsigned char)(i * 7);
  CHECK_OK(unsloth_memory_alloc(ctx, SIZE, &a));
  CHECK_OK(unsloth_memory_alloc(ctx, SIZE, &b));
  CHECK((uintptr_t)a % 256 == 0 && (uintptr_t)b % 256 == 0 && a != b);
  CHECK(stats(ctx).in_use == 2 * SIZE && stats(ctx).num_allocations == 2);

  CHECK_OK(unsloth_memory_copy(ctx, a, host, SIZE, UNSLOTH_COPY_KIND_HOST_TO_DEVICE, NULL));
  CHECK_OK(unsloth_memory_copy(ctx, b, a, SIZE, UNSLOTH_COPY_KIND_DEVICE_TO_DEVICE, NULL));
  CHECK_OK(unsloth_memory_set(ctx, a, 9, SIZE / 2, NULL));
  CHECK_OK(unsloth_memory_copy(ctx, back, b, SIZE, UNSLOTH_COPY_KIND_DEVICE_TO_HOST, NULL));
  CHECK_OK(unsloth_stream_synchronize(ctx, NULL));
  CHECK(memcmp(back, host, SIZE) == 0);
  CHECK_OK(unsloth_memory_copy(ctx, back, a, SIZE, UNSLOTH_COPY_KIND_DEVICE_TO_HOST, NULL));
  CHECK(back[0] == 9 && back[SIZE / 2 - 1] == 9);
  CHECK(memcmp(back + SIZE / 2, host + SIZE / 2, SIZE / 2) == 0);

  CHECK_FAILS(
      unsloth_memory_copy(ctx, a, host, SIZE, 9, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
      "memory_copy: kind is 9, allowed: 1 (host to device), 2 (device to host), 3 (device to "
      "device)");
  CHECK_STATUS(unsloth_memory_free(ctx, host), UNSLOTH_STATUS_INVALID_ARGUMENT);

  CHECK_OK(unsloth_memory_limit_set(ctx, 2 * SIZE + 10));
  CHECK_STATUS(unsloth_memory_alloc(ctx, 11, &c), UNSLOTH_STATUS_OUT_OF_MEMORY);
  CHECK(c == NULL && stats(ctx).in_use == 2 * SIZE);
  CHECK_OK(unsloth_memory_alloc(ctx, 10, &c));
  CHECK_OK(unsloth_memory_free(ctx, c));
  CHECK(stats(ctx).peak == 2 * SIZE + 10);
  CHECK_OK(unsloth_memory_peak_reset(ctx));
  CHECK(stats(ctx).peak == 2 * SIZE);

  // In the order of a stream; the CPU backend does so at once.
  CHECK_OK(unsloth_memory_alloc_async(ctx, 10, &c, NULL));
  CHECK(stats(ctx).in_use == 2 * SIZE + 10);
  CHECK(device->is_cpu ? stats(ctx).pool_size == 0 : stats(ctx).pool_size >= 10);
  CHECK_OK(unsloth_memory_copy_peer(ctx, c, ctx, b, 10, NULL));
  CHECK_OK(unsloth_memory_copy(ctx, back, c, 10, UNSLOTH_COPY_KIND_DEVICE_TO_HOST, NULL));
  CHECK(memcmp(back, host, 10) == 0);
  CHECK_FAILS(unsloth_memory_copy_peer(ctx, c, ctx, c, 10, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "memory_copy_peer: dst overlaps src within 10 bytes");
  CHECK_OK(unsloth_memory_free_async(ctx, c, NULL));
  CHECK_STATUS(unsloth_memory_free_async(ctx, c, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  CHECK_OK(unsloth_memory_pool_trim(ctx, 0));

  CHECK_OK(unsloth_memory_free(ctx, b));
  CHECK_STATUS(unsloth_memory_free(ctx, b), UNSLOTH_STATUS_INVALID_ARGUMENT);
  // `a` goes with its context.
}

int main(void) { return on_every_device(run); }
