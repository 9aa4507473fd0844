// Ranks that divide a model: each a thread with a context of its own, on the CPU or on one GPU.
#pragma once

#include <cstddef>
#include <functional>
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

// Runs every rank of a group, which divide the threads of the CPU, and waits for them. What the
// first one throws that fails is thrown, after the others have been told.
void run_ranks(unsloth_backend backend, uint32_t num_threads, int32_t size,
               const std::function<void(const Context &, const Group &)> &run);

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
