// libunsloth for C++17: tensors in a line, handles with owners, statuses as exceptions.
// Header-only, over unsloth.h.
//
//   unsloth::Context ctx;                        // the CPU; Context(UNSLOTH_BACKEND_CUDA) is a GPU
//   auto p = unsloth::make<unsloth_rms_norm_params>();
//   p.x = unsloth::tensor(x, UNSLOTH_DTYPE_F32, {rows, 64});
//   p.weight = unsloth::tensor(w, UNSLOTH_DTYPE_F32, {64});
//   p.out = unsloth::tensor(out, UNSLOTH_DTYPE_F32, {rows, 64});
//   p.epsilon = 1e-5f;
//   unsloth::check(unsloth_rms_norm_forward(ctx, &p, nullptr));
//
// Operations are those of unsloth.h: a Context, KvCache or Stream stands for its handle in their
// arguments. Whoever wants no exceptions makes handles with `create`, which gives the status, and
// does without `check`; the header compiles with -fno-exceptions, too, and has only these then.
//
// An owner of something that was made from a context ends before that context's owner: declare it
// later.
#ifndef UNSLOTH_HPP
#define UNSLOTH_HPP

#include <unsloth.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#if defined(__cpp_exceptions)
#include <stdexcept>
#endif

namespace unsloth {

/// A struct of unsloth.h that begins with `struct_size`, with that set and all else zero, its
/// default.
template <typename T>
T make() {
  T value = {};
  value.struct_size = static_cast<uint32_t>(sizeof(T));
  return value;
}

/// The calling thread's last message.
inline std::string last_error_message() {
  std::string message(unsloth_last_error_message(nullptr, 0) + 1, '\0');
  message.resize(unsloth_last_error_message(&message[0], message.size()));
  return message;
}

#if defined(__cpp_exceptions)
/// A call failed: its status, and the library's message.
class Error : public std::runtime_error {
 public:
  explicit Error(unsloth_status status)
      : std::runtime_error(last_error_message() + " (" + unsloth_status_name(status) + ")"),
        status_(status) {}
  unsloth_status status() const noexcept { return status_; }

 private:
  unsloth_status status_;
};

/// Throws unless the status is success. To be called by the thread that made the call, which has
/// the message.
inline void check(unsloth_status status) {
  if (status != UNSLOTH_STATUS_SUCCESS) throw Error(status);
}
#endif

/// Up to UNSLOTH_MAX_RANK integers of any type, as `{1, seq, 32, 128}`.
struct Sizes {
  int64_t values[UNSLOTH_MAX_RANK] = {};
  uint32_t rank = 0;

  template <typename... Integer>
  Sizes(Integer... sizes)  // NOLINT: a braced list converts
      : values{static_cast<int64_t>(sizes)...}, rank(sizeof...(sizes)) {
    static_assert(sizeof...(sizes) >= 1 && sizeof...(sizes) <= UNSLOTH_MAX_RANK,
                  "a tensor has 1 to UNSLOTH_MAX_RANK dimensions");
  }
};

/// A row-major view of memory that the caller owns. Inputs may be const: the library writes to
/// outputs only.
inline unsloth_tensor tensor(const void *data, unsloth_dtype dtype, const Sizes &shape) {
  unsloth_tensor view = {};
  view.data = const_cast<void *>(data);
  view.dtype = dtype;
  view.rank = shape.rank;
  for (uint32_t i = 0; i < shape.rank; i++) view.shape[i] = shape.values[i];
  return view;
}

/// The same with strides, in elements, one for each size.
inline unsloth_tensor tensor(const void *data, unsloth_dtype dtype, const Sizes &shape,
                             const Sizes &strides) {
  unsloth_tensor view = tensor(data, dtype, shape);
  for (uint32_t i = 0; i < shape.rank; i++) view.strides[i] = strides.values[i];
  view.flags = UNSLOTH_TENSOR_STRIDED;
  return view;
}

/// What the owners below share: one handle, moved and never copied. `End` ends it.
template <typename Handle, typename End>
class Owner {
 public:
  Owner() = default;
  Owner(Handle handle, End end) : handle_(handle), end_(end) {}
  Owner(const Owner &) = delete;
  Owner &operator=(const Owner &) = delete;
  Owner(Owner &&other) noexcept : handle_(other.release()), end_(other.end_) {}
  Owner &operator=(Owner &&other) noexcept {
    if (this != &other) {
      reset();
      end_ = other.end_;
      handle_ = other.release();
    }
    return *this;
  }
  ~Owner() { reset(); }

  Handle get() const noexcept { return handle_; }
  operator Handle() const noexcept { return handle_; }  // NOLINT: stands for it in calls
  explicit operator bool() const noexcept { return handle_ != Handle(); }

  /// Gives the handle away: the caller ends it.
  Handle release() noexcept { return std::exchange(handle_, Handle()); }
  /// Ends the handle now.
  void reset() noexcept {
    if (handle_ != Handle()) end_(release());
  }

 protected:
  Handle handle_ = Handle();
  End end_ = {};
};

namespace detail {
struct EndComm {
  void operator()(unsloth_comm *handle) const noexcept { unsloth_comm_destroy(handle); }
};
struct EndContext {
  void operator()(unsloth_context *handle) const noexcept { unsloth_context_destroy(handle); }
};
struct EndEvent {
  void operator()(unsloth_event *handle) const noexcept { unsloth_event_destroy(handle); }
};
struct EndKvCache {
  void operator()(unsloth_kv_cache *handle) const noexcept { unsloth_kv_cache_destroy(handle); }
};
struct EndOptimizer {
  void operator()(unsloth_optimizer *handle) const noexcept { unsloth_optimizer_destroy(handle); }
};
// These are ended through the context that they were made from.
struct EndStream {
  unsloth_context *context = nullptr;
  void operator()(unsloth_stream handle) const noexcept { unsloth_stream_destroy(context, handle); }
};
struct EndMemory {
  unsloth_context *context = nullptr;
  void operator()(void *address) const noexcept { unsloth_memory_free(context, address); }
};
}  // namespace detail

/// A backend on one device.
class Context : public Owner<unsloth_context *, detail::EndContext> {
 public:
  /// Replaces what this owns by a new context.
  unsloth_status create(const unsloth_context_params &params) noexcept {
    reset();
    return unsloth_context_create(&params, &handle_);
  }

#if defined(__cpp_exceptions)
  /// The CPU with every thread, unless a backend and a device are named.
  explicit Context(unsloth_backend backend = UNSLOTH_BACKEND_CPU, int32_t device = 0) {
    auto params = make<unsloth_context_params>();
    params.backend = backend;
    params.device = device;
    check(create(params));
  }
  explicit Context(const unsloth_context_params &params) { check(create(params)); }
  explicit Context(std::nullptr_t) {}
#else
  Context() = default;
#endif
};

/// A stream of a context's device. That of the CPU is NULL, which needs no end.
class Stream : public Owner<unsloth_stream, detail::EndStream> {
 public:
  Stream() = default;
  /// Replaces what this owns by a new stream.
  unsloth_status create(unsloth_context *context) noexcept {
    reset();
    end_.context = context;
    return unsloth_stream_create(context, &handle_);
  }
  /// Waits for what is queued.
  unsloth_status synchronize() const noexcept {
    return unsloth_stream_synchronize(end_.context, handle_);
  }

#if defined(__cpp_exceptions)
  explicit Stream(unsloth_context *context) { check(create(context)); }
#endif
};

/// Zeroed memory of a context's device, aligned to 256 bytes.
class Memory : public Owner<void *, detail::EndMemory> {
 public:
  Memory() = default;
  /// Frees what this owns, then allocates.
  unsloth_status create(unsloth_context *context, size_t size) noexcept {
    reset();
    end_.context = context;
    const unsloth_status status = unsloth_memory_alloc(context, size, &handle_);
    size_ = status == UNSLOTH_STATUS_SUCCESS ? size : 0;
    return status;
  }
  /// The bytes that were asked for.
  size_t size() const noexcept { return handle_ != nullptr ? size_ : 0; }

#if defined(__cpp_exceptions)
  Memory(unsloth_context *context, size_t size) { check(create(context, size)); }
#endif

 private:
  size_t size_ = 0;
};

/// A point of a stream, for `unsloth_event_record` and `unsloth_stream_wait_event`.
class Event : public Owner<unsloth_event *, detail::EndEvent> {
 public:
  Event() = default;
  /// Replaces what this owns by a new event; `flags` as `unsloth_event_create` has them.
  unsloth_status create(unsloth_context *context, uint32_t flags = 0) noexcept {
    reset();
    return unsloth_event_create(context, flags, &handle_);
  }

#if defined(__cpp_exceptions)
  explicit Event(unsloth_context *context, uint32_t flags = 0) { check(create(context, flags)); }
#endif
};

/// A paged cache of keys and values.
class KvCache : public Owner<unsloth_kv_cache *, detail::EndKvCache> {
 public:
  KvCache() = default;
  /// Replaces what this owns by a new cache.
  unsloth_status create(unsloth_context *context, const unsloth_kv_cache_params &params) noexcept {
    reset();
    return unsloth_kv_cache_create(context, &params, &handle_);
  }

#if defined(__cpp_exceptions)
  KvCache(unsloth_context *context, const unsloth_kv_cache_params &params) {
    check(create(context, params));
  }
#endif
};

/// Parameters that are trained, with the state between steps, which lies in memory of the caller's.
class Optimizer : public Owner<unsloth_optimizer *, detail::EndOptimizer> {
 public:
  Optimizer() = default;
  /// Replaces what this owns by a new optimizer, whose state is initialised on `stream`.
  unsloth_status create(unsloth_context *context, const unsloth_optimizer_params &params,
                        unsloth_stream stream = nullptr) noexcept {
    reset();
    return unsloth_optimizer_create(context, &params, stream, &handle_);
  }

#if defined(__cpp_exceptions)
  Optimizer(unsloth_context *context, const unsloth_optimizer_params &params,
            unsloth_stream stream = nullptr) {
    check(create(context, params, stream));
  }
#endif
};

/// A rank's part in a group of ranks. `params.id` is of `unsloth_comm_id_create`, the same on all.
class Comm : public Owner<unsloth_comm *, detail::EndComm> {
 public:
  Comm() = default;
  /// Replaces what this owns by a part in another group, and waits for its other ranks.
  unsloth_status create(unsloth_context *context, const unsloth_comm_params &params) noexcept {
    reset();
    return unsloth_comm_create(context, &params, &handle_);
  }

#if defined(__cpp_exceptions)
  Comm(unsloth_context *context, const unsloth_comm_params &params) {
    check(create(context, params));
  }
#endif
};

}  // namespace unsloth

#endif  // UNSLOTH_HPP
