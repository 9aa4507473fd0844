#include "ranks.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace llm {
namespace {

// What ranks find each other by, and what went wrong first.
class Meeting {
 public:
  Meeting(unsloth_backend backend, int32_t size) {
    unsloth_comm_id_params params = UNSLOTH_COMM_ID_PARAMS_INIT;
    params.kind = backend == UNSLOTH_BACKEND_CPU ? UNSLOTH_COMM_KIND_LOCAL : UNSLOTH_COMM_KIND_NCCL;
    params_.kind = params.kind;
    params_.size = size;
    check(unsloth_comm_id_create(&params, &params_.id));
    comms_.resize(static_cast<size_t>(size), nullptr);
  }

  unsloth::Comm join(const Context &context, int32_t rank) {
    unsloth_comm_params params = params_;
    params.rank = rank;
    unsloth::Comm comm(context.get(), params);
    const std::lock_guard<std::mutex> lock(mutex_);
    comms_[static_cast<size_t>(rank)] = comm.get();
    if (failed_) unsloth_comm_abort(comm.get());
    return comm;
  }

  void leave(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    comms_[static_cast<size_t>(rank)] = nullptr;
  }

  // The others would wait for what does not come.
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failed_ = error;
    for (unsloth_comm *comm : comms_) {
      if (comm != nullptr) unsloth_comm_abort(comm);
    }
  }

  std::exception_ptr failed() const { return failed_; }

 private:
  unsloth_comm_params params_ = UNSLOTH_COMM_PARAMS_INIT;
  std::mutex mutex_;
  std::vector<unsloth_comm *> comms_;
  std::exception_ptr failed_;
};

}  // namespace

void run_ranks(unsloth_backend backend, uint32_t num_threads, int32_t size,
               const std::function<void(const Context &, const Group &)> &run) {
  if (size == 1) {
    const Context context(backend, num_threads);
    run(context, Group());
    return;
  }
  const uint32_t all = num_threads == 0 ? std::thread::hardware_concurrency() : num_threads;
  const uint32_t of_rank = std::max<uint32_t>(all / static_cast<uint32_t>(size), 1);
  Meeting meeting(backend, size);
  const auto run_one = [&](int32_t rank) {
    try {
      const bool cpu = backend == UNSLOTH_BACKEND_CPU;
      const Context context(backend, of_rank, cpu ? 0 : rank);
      const unsloth::Comm comm = meeting.join(context, rank);
      try {
        check(unsloth_comm_warm_up(comm.get(), context.stream()));
        Group group;
        group.rank = rank;
        group.size = size;
        group.comm = comm.get();
        run(context, group);
      } catch (...) {
        meeting.fail(std::current_exception());
      }
      meeting.leave(rank);
    } catch (...) {
      meeting.fail(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int32_t rank = 1; rank < size; ++rank) threads.emplace_back(run_one, rank);
  run_one(0);
  for (std::thread &thread : threads) thread.join();
  if (meeting.failed()) std::rethrow_exception(meeting.failed());
}

Part::Part(const GgufTensor &whole, const Group &group, unsloth_shard_params of) : tensor_(whole) {
  const uint64_t rows = whole.shape[0];
  const uint64_t columns = whole.elements / rows;
  of.dtype = dtype_of_tensor(whole.type);
  of.rank = group.rank;
  of.size = group.size;
  of.rows = static_cast<int64_t>(rows);
  of.columns = static_cast<int64_t>(columns);
  check(unsloth_shard_get(&of, &shard_));
  // None of them where a vocabulary has ended.
  const unsloth_shard_piece piece = shard_.pieces[0];
  const auto taken_rows = static_cast<uint64_t>(piece.rows);
  const uint64_t row_bytes = whole.bytes / rows;
  tensor_.shape[0] = taken_rows;
  tensor_.elements = taken_rows * columns;
  tensor_.bytes = taken_rows * row_bytes;
  tensor_.data = whole.data + static_cast<uint64_t>(piece.row) * row_bytes;
  const auto taken = static_cast<uint64_t>(piece.columns);
  if (taken_rows == 0 || taken == columns) return;
  // Columns begin and end with blocks.
  const uint64_t part_bytes = row_bytes * taken / columns;
  const uint64_t before = row_bytes * static_cast<uint64_t>(piece.column) / columns;
  copied_.resize(taken_rows * part_bytes);
  for (uint64_t row = 0; row < taken_rows; ++row) {
    std::memcpy(copied_.data() + row * part_bytes, tensor_.data + row * row_bytes + before,
                part_bytes);
  }
  tensor_.shape[1] = taken;
  tensor_.elements = taken_rows * taken;
  tensor_.bytes = copied_.size();
  tensor_.data = copied_.data();
}

}  // namespace llm
