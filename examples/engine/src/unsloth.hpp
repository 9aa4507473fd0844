// The C API of libunsloth with C++ ownership: a status becomes an exception that carries the
// library's message, a handle is ended by its destructor. Nothing else is hidden.
#pragma once

#include <unsloth.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "error.h"
#include "quants.h"

namespace engine {

inline void check(unsloth_status status) {
  if (status == UNSLOTH_STATUS_SUCCESS) return;
  std::string message(unsloth_last_error_message(nullptr, 0) + 1, '\0');
  message.resize(unsloth_last_error_message(message.data(), message.size()));
  throw Error("libunsloth: " + message + " (" + unsloth_status_name(status) + ")");
}

// One backend on one device. Everything below is made from a context and must be gone before it.
class Context {
 public:
  Context(unsloth_backend backend, uint32_t num_threads) : backend_(backend) {
    unsloth_context_params params = UNSLOTH_CONTEXT_PARAMS_INIT;
    params.backend = backend;
    params.num_threads = num_threads;
    check(unsloth_context_create(&params, &handle_));
    free_before_ = free_memory();
    const unsloth_status status = unsloth_stream_create(handle_, &stream_);
    if (status != UNSLOTH_STATUS_SUCCESS) unsloth_context_destroy(handle_);
    check(status);
  }
  ~Context() {
    unsloth_stream_destroy(handle_, stream_);
    unsloth_context_destroy(handle_);
  }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;

  unsloth_context *get() const { return handle_; }
  unsloth_backend backend() const { return backend_; }

  // The one stream the engine uses. It is the context's own, since the default stream cannot be
  // captured into a graph.
  unsloth_stream stream() const { return stream_; }
  void synchronize() const { check(unsloth_stream_synchronize(handle_, stream_)); }

  unsloth_memory_stats memory_stats() const {
    unsloth_memory_stats stats = UNSLOTH_MEMORY_STATS_INIT;
    check(unsloth_memory_stats_get(handle_, &stats));
    return stats;
  }

  // How much less memory the device has free than when the context was made, by its driver: what
  // is allocated, as the driver rounds it, and what the driver keeps to itself. 0 for the CPU.
  uint64_t device_memory_in_use() const {
    const uint64_t free = free_memory();
    return backend_ != UNSLOTH_BACKEND_CPU && free < free_before_ ? free_before_ - free : 0;
  }

 private:
  uint64_t free_memory() const {
    unsloth_device_info info = UNSLOTH_DEVICE_INFO_INIT;
    check(unsloth_device_info_get(backend_, 0, &info));
    return info.free_memory;
  }

  unsloth_backend backend_;
  unsloth_context *handle_ = nullptr;
  unsloth_stream stream_ = nullptr;
  uint64_t free_before_ = 0;
};

// Memory of a context's device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Context &context, size_t bytes) : context_(&context), bytes_(bytes) {
    check(unsloth_memory_alloc(context_->get(), bytes, &data_));
  }
  ~Buffer() {
    if (data_ != nullptr) unsloth_memory_free(context_->get(), data_);
  }
  Buffer(Buffer &&other) noexcept { *this = std::move(other); }
  Buffer &operator=(Buffer &&other) noexcept {
    std::swap(context_, other.context_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // The host may reuse `source` when this returns.
  void upload(const void *source, size_t bytes, size_t offset = 0) {
    copy(static_cast<char *>(data_) + offset, source, bytes, UNSLOTH_COPY_KIND_HOST_TO_DEVICE);
  }

  // Waits for everything queued before.
  void download(void *target, size_t bytes, size_t offset = 0) const {
    copy(target, static_cast<const char *>(data_) + offset, bytes,
         UNSLOTH_COPY_KIND_DEVICE_TO_HOST);
  }

 private:
  void copy(void *target, const void *source, size_t bytes, unsloth_copy_kind kind) const {
    check(unsloth_memory_copy(context_->get(), target, source, bytes, kind, context_->stream()));
    context_->synchronize();
  }

  const Context *context_ = nullptr;
  void *data_ = nullptr;
  size_t bytes_ = 0;
};

// A paged cache of keys and values.
class KvCache {
 public:
  KvCache(const Context &context, const unsloth_kv_cache_params &params) {
    check(unsloth_kv_cache_create(context.get(), &params, &handle_));
  }
  ~KvCache() { unsloth_kv_cache_destroy(handle_); }
  KvCache(const KvCache &) = delete;
  KvCache &operator=(const KvCache &) = delete;

  unsloth_kv_cache *get() const { return handle_; }

 private:
  unsloth_kv_cache *handle_ = nullptr;
};

// Of the float types, which are all that the engine computes with.
inline size_t element_size(unsloth_dtype dtype) { return dtype == UNSLOTH_DTYPE_F32 ? 4 : 2; }

inline TensorType tensor_type(unsloth_dtype dtype) {
  if (dtype == UNSLOTH_DTYPE_F16) return TensorType::kF16;
  return dtype == UNSLOTH_DTYPE_BF16 ? TensorType::kBF16 : TensorType::kF32;
}

// A row-major tensor at `data`.
inline unsloth_tensor tensor(void *data, unsloth_dtype dtype,
                             std::initializer_list<uint64_t> shape) {
  unsloth_tensor view = {};
  view.data = data;
  view.dtype = dtype;
  for (const uint64_t size : shape) view.shape[view.rank++] = static_cast<int64_t>(size);
  return view;
}

}  // namespace engine
