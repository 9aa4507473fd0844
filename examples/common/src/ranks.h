// Ranks that divide a model: each a thread or a process with a context of its own, on the CPU or on
// one GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "gguf.h"

namespace llm {

// A rank's part in the group.
struct Group {
  int32_t rank = 0;
  int32_t size = 1;
  unsloth_comm *comm = nullptr;  // none where there is one rank

  // What calls are told.
  unsloth_parallel parallel() const {
    unsloth_parallel parallel = {};
    parallel.comm = comm;
    return parallel;
  }
};

// Memory that a group gives its ranks, for the sums of few rows. Every rank makes as much, in the
// same order.
class GroupMemory {
 public:
  GroupMemory() = default;
  GroupMemory(const Group &group, size_t bytes) : comm_(group.comm) {
    check(unsloth_comm_memory_alloc(comm_, bytes, &data_));
  }
  GroupMemory(const GroupMemory &) = delete;
  GroupMemory &operator=(const GroupMemory &) = delete;
  GroupMemory(GroupMemory &&other) noexcept { swap(other); }
  GroupMemory &operator=(GroupMemory &&other) noexcept {
    swap(other);
    return *this;
  }
  ~GroupMemory() {
    if (data_ != nullptr) unsloth_comm_memory_free(comm_, data_);
  }

  void *data() const { return data_; }

 private:
  void swap(GroupMemory &other) noexcept {
    std::swap(comm_, other.comm_);
    std::swap(data_, other.data_);
  }

  unsloth_comm *comm_ = nullptr;
  void *data_ = nullptr;
};

// One rank, whose others are processes like this one; each has a GPU.
struct Process {
  int32_t rank = 0;
  std::string meeting;  // the file by which they find each other, gone when they have
};

// Runs ranks that divide the work in as many ways as there are `sizes`, and as many ranks as these
// multiply to; they divide the threads of the CPU. Each is in a group of every way: rank `r` of
// sizes {2, 3} is rank r % 2 of a group of two and r / 2 of a group of three. Waits for all of
// them. What the first one throws that fails is thrown, after the others have been told. With
// `process` the ranks are processes, and this runs one of them.
void run_ranks(unsloth_backend backend, uint32_t num_threads, const std::vector<int32_t> &sizes,
               const std::optional<Process> &process,
               const std::function<void(const Context &, const std::vector<Group> &)> &run);

// Queue what passes between two ranks of a group, each of which makes its call, or from one to all,
// in its place.
void send(const Context &context, const Group &group, unsloth_tensor x, int32_t to);
void receive(const Context &context, const Group &group, unsloth_tensor out, int32_t from);
void broadcast(const Context &context, const Group &group, unsloth_tensor x, int32_t root);

// Consecutive layers.
struct Span {
  uint64_t begin;
  uint64_t count;
};

// Those of a rank of a pipeline; ranks have as many, or one more. Throws where there are too few.
Span span_of_layers(uint64_t num_layers, const Group &group);

// A rank's part of a tensor of a file: pieces of it as tensors of their own. Rows lie in the file
// as they are; columns are copied together, and live as long as this.
class Part {
 public:
  // `of` says what the tensor is; its sizes and type, and the rank, are filled in.
  Part(const GgufTensor &whole, const Group &group, unsloth_shard_params of);

  const GgufTensor &tensor() const { return tensor_; }
  const unsloth_shard &shard() const { return shard_; }

 private:
  unsloth_shard shard_ = UNSLOTH_SHARD_INIT;
  std::vector<std::byte> copied_;
  GgufTensor tensor_;
};

}  // namespace llm
