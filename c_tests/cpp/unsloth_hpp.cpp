// unsloth.hpp, which is installed beside unsloth.h. Compiled as C++17 and C++20, and without
// exceptions.
#include <unsloth.hpp>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "check.h"

namespace {

static_assert(!std::is_copy_constructible<unsloth::Context>::value, "two would end one handle");
static_assert(std::is_nothrow_move_constructible<unsloth::Memory>::value, "");
static_assert(std::is_nothrow_move_assignable<unsloth::KvCache>::value, "");

void tensors() {
  const float data[6] = {};
  const size_t rows = 2;
  const unsloth_tensor t = unsloth::tensor(data, UNSLOTH_DTYPE_F32, {rows, 3});
  CHECK(t.data == data && t.dtype == UNSLOTH_DTYPE_F32 && t.rank == 2);
  CHECK(t.shape[0] == 2 && t.shape[1] == 3 && t.strides[0] == 0 && t.strides[1] == 0);
  const unsloth_tensor s = unsloth::tensor(nullptr, UNSLOTH_DTYPE_BF16, {1, 2u, 3l}, {6, 3, 1});
  CHECK(s.rank == 3 && s.shape[2] == 3 && s.strides[0] == 6 && s.strides[2] == 1);
  const unsloth_tensor one = unsloth::tensor(data, UNSLOTH_DTYPE_F32, {int64_t(1) << 40});
  CHECK(one.rank == 1 && one.shape[0] == int64_t(1) << 40);
}

// Three and four over the root of 12.5, from a const input.
void operation(unsloth_context *ctx) {
  const float x[2] = {3, 4};
  float out[2] = {};
  auto p = unsloth::make<unsloth_rms_norm_params>();
  CHECK(p.struct_size == sizeof p && p.epsilon == 0);
  p.x = unsloth::tensor(x, UNSLOTH_DTYPE_F32, {2});
  p.out = unsloth::tensor(out, UNSLOTH_DTYPE_F32, {2});
  p.epsilon = 1e-6f;
  CHECK(unsloth_rms_norm_forward(ctx, &p, nullptr) == UNSLOTH_STATUS_SUCCESS);
  CHECK(std::fabs(out[0] - 0.8485f) < 1e-3f && std::fabs(out[1] - 1.1314f) < 1e-3f);
}

unsloth_memory_stats stats(unsloth_context *ctx) {
  auto stats = unsloth::make<unsloth_memory_stats>();
  CHECK(unsloth_memory_stats_get(ctx, &stats) == UNSLOTH_STATUS_SUCCESS);
  return stats;
}

unsloth_kv_cache_params small_cache() {
  auto p = unsloth::make<unsloth_kv_cache_params>();
  p.dtype = UNSLOTH_DTYPE_F32;
  p.num_layers = p.num_kv_heads = p.num_pages = p.max_batch_size = 1;
  p.head_dim = p.page_size = p.max_batch_tokens = 8;
  return p;
}

// Owners by `create`, which all compilations have.
void owners() {
  unsloth::Context ctx = [] {
#if defined(__cpp_exceptions)
    return unsloth::Context(nullptr);
#else
    return unsloth::Context();
#endif
  }();
  CHECK(!ctx && ctx.get() == nullptr);
  auto params = unsloth::make<unsloth_context_params>();
  params.num_threads = 1;
  CHECK(ctx.create(params) == UNSLOTH_STATUS_SUCCESS && ctx);
  operation(ctx);

  unsloth::Stream stream;
  CHECK(stream.create(ctx) == UNSLOTH_STATUS_SUCCESS);
  CHECK(stream.synchronize() == UNSLOTH_STATUS_SUCCESS);

  unsloth::Event event;
  CHECK(event.create(ctx) == UNSLOTH_STATUS_SUCCESS && event);

  unsloth::Memory memory;
  CHECK(memory.create(ctx, 1000) == UNSLOTH_STATUS_SUCCESS && memory.size() == 1000);
  CHECK(reinterpret_cast<uintptr_t>(memory.get()) % 256 == 0 && stats(ctx).num_allocations == 1);
  unsloth::Memory moved = std::move(memory);
  CHECK(moved && moved.size() == 1000 && stats(ctx).num_allocations == 1);
  CHECK(moved.create(ctx, 10) == UNSLOTH_STATUS_SUCCESS && stats(ctx).num_allocations == 1);
  moved = unsloth::Memory();
  CHECK(stats(ctx).num_allocations == 0);

  unsloth::KvCache cache;
  CHECK(cache.create(ctx, small_cache()) == UNSLOTH_STATUS_SUCCESS && cache);
  auto wrong = small_cache();
  wrong.num_pages = -1;
  CHECK(cache.create(ctx, wrong) == UNSLOTH_STATUS_INVALID_ARGUMENT && !cache);
  CHECK(unsloth::last_error_message().find("num_pages") != std::string::npos);

  auto of_id = unsloth::make<unsloth_comm_id_params>();
  auto of_group = unsloth::make<unsloth_comm_params>();
  CHECK(unsloth_comm_id_create(&of_id, &of_group.id) == UNSLOTH_STATUS_SUCCESS);
  unsloth::Comm comm;
  CHECK(comm.create(ctx, of_group) == UNSLOTH_STATUS_INVALID_ARGUMENT && !comm);
  of_group.size = 1;
  CHECK(comm.create(ctx, of_group) == UNSLOTH_STATUS_SUCCESS && comm);
  CHECK(unsloth_comm_warm_up(comm, nullptr) == UNSLOTH_STATUS_SUCCESS);

  float weight = 1, gradient = 1;
  unsloth_parameter parameter = {};
  parameter.weight = unsloth::tensor(&weight, UNSLOTH_DTYPE_F32, {1});
  parameter.gradient = unsloth::tensor(&gradient, UNSLOTH_DTYPE_F32, {1});
  const unsloth_parameter_group group = {0.5f, 0};
  auto training = unsloth::make<unsloth_optimizer_params>();
  training.kind = UNSLOTH_OPTIMIZER_SGD;
  training.parameters = &parameter;
  training.groups = &group;
  training.num_parameters = training.num_groups = 1;
  CHECK(unsloth_optimizer_state_size(ctx, &training, &training.state_size) ==
        UNSLOTH_STATUS_SUCCESS);
  unsloth::Memory state;
  CHECK(state.create(ctx, training.state_size) == UNSLOTH_STATUS_SUCCESS);
  training.state = state.get();
  unsloth::Optimizer optimizer;
  CHECK(optimizer.create(ctx, training) == UNSLOTH_STATUS_SUCCESS && optimizer);
  CHECK(unsloth_optimizer_step(optimizer, nullptr) == UNSLOTH_STATUS_SUCCESS && weight == 0.5f);
  training.num_groups = 0;
  CHECK(optimizer.create(ctx, training) == UNSLOTH_STATUS_INVALID_ARGUMENT && !optimizer);
  state.reset();
  comm.reset();

  unsloth_context *raw = ctx.release();
  CHECK(!ctx && unsloth_context_destroy(raw) == UNSLOTH_STATUS_SUCCESS);
}

#if defined(__cpp_exceptions)
void exceptions() {
  unsloth::Context ctx;
  const unsloth::Stream stream(ctx);
  const unsloth::Memory memory(ctx, 16);
  const unsloth::KvCache cache(ctx, small_cache());
  unsloth::check(UNSLOTH_STATUS_SUCCESS);
  bool thrown = false;
  try {
    unsloth::check(unsloth_rms_norm_forward(ctx, nullptr, nullptr));
  } catch (const unsloth::Error &error) {
    thrown = true;
    CHECK(error.status() == UNSLOTH_STATUS_NULL_POINTER);
    CHECK(std::strstr(error.what(), "params") != nullptr);
    CHECK(std::strstr(error.what(), "UNSLOTH_STATUS_NULL_POINTER") != nullptr);
  }
  CHECK(thrown);
  thrown = false;
  try {
    const unsloth::Context none(99u);
  } catch (const std::exception &) {
    thrown = true;
  }
  CHECK(thrown);
}
#endif

}  // namespace

int main() {
  tensors();
  owners();
#if defined(__cpp_exceptions)
  exceptions();
#endif
  return 0;
}
