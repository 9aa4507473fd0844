// Where a program computes: a context, the one stream that it uses, and memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unsloth.hpp>

#include "quants.h"

namespace llm {

using unsloth::check;

// One backend on one device. Everything below is made from a context and must be gone before it.
class Context {
 public:
  Context(unsloth_backend backend, uint32_t num_threads, int32_t device = 0)
      : backend_(backend),
        device_(device),
        context_(params(backend, num_threads, device)),
        free_before_(free_memory()),
        stream_(context_) {}
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;

  unsloth_context *get() const { return context_.get(); }
  unsloth_backend backend() const { return backend_; }

  // The one stream that is used. It is the context's own, since the default stream cannot be
  // captured into a graph.
  unsloth_stream stream() const { return stream_.get(); }
  void synchronize() const { check(stream_.synchronize()); }

  unsloth_memory_stats memory_stats() const {
    auto stats = unsloth::make<unsloth_memory_stats>();
    check(unsloth_memory_stats_get(context_, &stats));
    return stats;
  }

  // How much less memory the device has free than when the context was made, by its driver: what
  // is allocated, as the driver rounds it, and what the driver keeps to itself. 0 for the CPU.
  uint64_t device_memory_in_use() const {
    const uint64_t free = free_memory();
    return backend_ != UNSLOTH_BACKEND_CPU && free < free_before_ ? free_before_ - free : 0;
  }

 private:
  static unsloth_context_params params(unsloth_backend backend, uint32_t num_threads,
                                       int32_t device) {
    auto params = unsloth::make<unsloth_context_params>();
    params.backend = backend;
    params.num_threads = num_threads;
    params.device = device;
    return params;
  }

  uint64_t free_memory() const {
    auto info = unsloth::make<unsloth_device_info>();
    check(unsloth_device_info_get(backend_, device_, &info));
    return info.free_memory;
  }

  unsloth_backend backend_;
  int32_t device_;
  unsloth::Context context_;
  uint64_t free_before_;
  unsloth::Stream stream_;
};

// Memory of a context's device that the host writes to and reads from.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Context &context, size_t bytes)
      : context_(&context), memory_(context.get(), bytes) {}

  const Context &context() const { return *context_; }
  void *data() const { return memory_.get(); }
  size_t bytes() const { return memory_.size(); }

  // The host may reuse `source` when this returns.
  void upload(const void *source, size_t bytes, size_t offset = 0) {
    copy(static_cast<char *>(data()) + offset, source, bytes, UNSLOTH_COPY_KIND_HOST_TO_DEVICE);
  }

  // Waits for everything queued before.
  void download(void *target, size_t bytes, size_t offset = 0) const {
    copy(target, static_cast<const char *>(data()) + offset, bytes,
         UNSLOTH_COPY_KIND_DEVICE_TO_HOST);
  }

 private:
  void copy(void *target, const void *source, size_t bytes, unsloth_copy_kind kind) const {
    check(unsloth_memory_copy(context_->get(), target, source, bytes, kind, context_->stream()));
    context_->synchronize();
  }

  const Context *context_ = nullptr;
  unsloth::Memory memory_;
};

// Of the float types, which are all that hidden states may be.
inline size_t element_size(unsloth_dtype dtype) { return dtype == UNSLOTH_DTYPE_F32 ? 4 : 2; }

// What the library calls a type of a file.
inline unsloth_dtype dtype_of_tensor(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return UNSLOTH_DTYPE_F32;
    case TensorType::kF16:
      return UNSLOTH_DTYPE_F16;
    case TensorType::kBF16:
      return UNSLOTH_DTYPE_BF16;
    case TensorType::kQ4_0:
      return UNSLOTH_DTYPE_Q4_0;
    case TensorType::kQ4_1:
      return UNSLOTH_DTYPE_Q4_1;
    case TensorType::kQ5_0:
      return UNSLOTH_DTYPE_Q5_0;
    case TensorType::kQ5_1:
      return UNSLOTH_DTYPE_Q5_1;
    case TensorType::kQ8_0:
      return UNSLOTH_DTYPE_Q8_0;
    case TensorType::kQ4_K:
      return UNSLOTH_DTYPE_Q4_K;
    case TensorType::kQ5_K:
      return UNSLOTH_DTYPE_Q5_K;
    case TensorType::kQ6_K:
      return UNSLOTH_DTYPE_Q6_K;
    case TensorType::kTQ1_0:
      return UNSLOTH_DTYPE_TQ1_0;
    case TensorType::kTQ2_0:
      return UNSLOTH_DTYPE_TQ2_0;
    case TensorType::kQ2_0:
      return UNSLOTH_DTYPE_Q2_0;
    case TensorType::kI2_S:
      return UNSLOTH_DTYPE_TERNARY;  // in another order
  }
  return 0;
}

// How many elements a block of a type of a file's has, which the library calls `dtype`.
inline uint64_t block_elements(unsloth_dtype dtype) {
  for (uint32_t type = 0; type < 64; ++type) {
    const BlockLayout layout = block_layout(type);
    const bool same = layout.elements != 0 && dtype_of_tensor(TensorType{type}) == dtype;
    if (same) return layout.elements;
  }
  return 1;
}

inline TensorType tensor_type(unsloth_dtype dtype) {
  if (dtype == UNSLOTH_DTYPE_F16) return TensorType::kF16;
  return dtype == UNSLOTH_DTYPE_BF16 ? TensorType::kBF16 : TensorType::kF32;
}

}  // namespace llm
