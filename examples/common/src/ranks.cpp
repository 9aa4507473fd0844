#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "error.h"
#include "meeting_file.h"

namespace llm {
namespace {

// Processes are started one after the other, by hand or on other machines.
constexpr std::chrono::minutes kPatience{10};

// What ranks find each other by, and what went wrong first.
class Meeting {
 public:
  Meeting(unsloth_backend backend, const std::vector<int32_t> &sizes,
          const std::optional<Process> &process)
      : sizes_(sizes) {
    params_.kind =
        backend == UNSLOTH_BACKEND_CPU ? UNSLOTH_COMM_KIND_LOCAL : UNSLOTH_COMM_KIND_NCCL;
    size_t num_groups = 0;
    for (const int32_t size : sizes) num_ranks_ *= size;
    for (const int32_t size : sizes) {
      first_id_.push_back(num_groups);
      if (size > 1) num_groups += static_cast<size_t>(num_ranks_ / size);
    }
    ids_ = process && process->rank > 0 ? read_meeting(process->meeting, num_groups, kPatience)
                                        : made_ids(num_groups);
    if (process && process->rank == 0) write_meeting(process->meeting, ids_);
    comms_.resize(static_cast<size_t>(num_ranks_));
  }

  int32_t num_ranks() const { return num_ranks_; }

  // Joins the groups of a rank, in an order that is the same on all, and appends what owns them to
  // `comms`.
  std::vector<Group> join(const Context &context, int32_t rank, std::vector<unsloth::Comm> *comms) {
    std::vector<Group> groups;
    int32_t stride = 1;  // between the ranks of a group
    for (size_t way = 0; way < sizes_.size(); ++way) {
      Group group;
      group.size = sizes_[way];
      group.rank = rank / stride % group.size;
      if (group.size > 1) {
        const int32_t which = rank % stride + rank / (stride * group.size) * stride;
        unsloth_comm_params params = params_;
        params.size = group.size;
        params.rank = group.rank;
        params.id = ids_[first_id_[way] + static_cast<size_t>(which)];
        comms->emplace_back(context.get(), params);
        group.comm = comms->back().get();
        enter(rank, group.comm);
        check(unsloth_comm_warm_up(group.comm, context.stream()));
      }
      groups.push_back(group);
      stride *= group.size;
    }
    return groups;
  }

  void leave(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    comms_[static_cast<size_t>(rank)].clear();
  }

  // The others would wait for what does not come.
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failed_ = error;
    for (const auto &of_rank : comms_) {
      for (unsloth_comm *comm : of_rank) unsloth_comm_abort(comm);
    }
  }

  std::exception_ptr failed() const { return failed_; }

 private:
  std::vector<unsloth_comm_id> made_ids(size_t count) const {
    unsloth_comm_id_params params = UNSLOTH_COMM_ID_PARAMS_INIT;
    params.kind = params_.kind;
    std::vector<unsloth_comm_id> ids(count);
    for (unsloth_comm_id &id : ids) check(unsloth_comm_id_create(&params, &id));
    return ids;
  }

  void enter(int32_t rank, unsloth_comm *comm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    comms_[static_cast<size_t>(rank)].push_back(comm);
    if (failed_) unsloth_comm_abort(comm);
  }

  std::vector<int32_t> sizes_;
  int32_t num_ranks_ = 1;
  unsloth_comm_params params_ = UNSLOTH_COMM_PARAMS_INIT;
  std::vector<unsloth_comm_id> ids_;  // of the groups of all ways
  std::vector<size_t> first_id_;      // of the groups of each
  std::mutex mutex_;
  std::vector<std::vector<unsloth_comm *>> comms_;  // of each rank
  std::exception_ptr failed_;
};

void transfer(const Context &context, const unsloth_send_receive_params &params) {
  check(unsloth_send_receive_forward(context.get(), &params, context.stream()));
}

// Runs one rank in this process. Rank 0 removes the file once it has joined all its groups. Every
// rank has read the file by then: joining a group waits for its other ranks, which have themselves
// joined the groups of all earlier ways.
void run_process(unsloth_backend backend, uint32_t num_threads, const std::vector<int32_t> &sizes,
                 const Process &process,
                 const std::function<void(const Context &, const std::vector<Group> &)> &run) {
  int32_t num_devices = 0;
  check(unsloth_device_count(backend, &num_devices));
  const Context context(backend, num_threads, process.rank % std::max(num_devices, 1));
  Meeting meeting(backend, sizes, process);
  std::vector<unsloth::Comm> comms;
  std::vector<Group> groups;
  try {
    groups = meeting.join(context, process.rank, &comms);
  } catch (...) {
    if (process.rank == 0) std::remove(process.meeting.c_str());
    throw;
  }
  if (process.rank == 0) std::remove(process.meeting.c_str());
  run(context, groups);
}

}  // namespace

void run_ranks(unsloth_backend backend, uint32_t num_threads, const std::vector<int32_t> &sizes,
               const std::optional<Process> &process,
               const std::function<void(const Context &, const std::vector<Group> &)> &run) {
  if (process) return run_process(backend, num_threads, sizes, *process, run);
  if (std::all_of(sizes.begin(), sizes.end(), [](int32_t size) { return size == 1; })) {
    const Context context(backend, num_threads);
    run(context, std::vector<Group>(sizes.size()));
    return;
  }
  Meeting meeting(backend, sizes, process);
  const uint32_t all = num_threads == 0 ? std::thread::hardware_concurrency() : num_threads;
  const uint32_t of_rank = std::max<uint32_t>(all / static_cast<uint32_t>(meeting.num_ranks()), 1);
  const auto run_one = [&](int32_t rank) {
    try {
      const bool cpu = backend == UNSLOTH_BACKEND_CPU;
      const Context context(backend, of_rank, cpu ? 0 : rank);
      std::vector<unsloth::Comm> comms;
      try {
        run(context, meeting.join(context, rank, &comms));
      } catch (...) {
        meeting.fail(std::current_exception());
      }
      meeting.leave(rank);
    } catch (...) {
      meeting.fail(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int32_t rank = 1; rank < meeting.num_ranks(); ++rank) threads.emplace_back(run_one, rank);
  run_one(0);
  for (std::thread &thread : threads) thread.join();
  if (meeting.failed()) std::rethrow_exception(meeting.failed());
}

void send(const Context &context, const Group &group, unsloth_tensor x, int32_t to) {
  unsloth_send_receive_params params = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  params.comm = group.comm;
  params.to = to;
  params.x = x;
  transfer(context, params);
}

void receive(const Context &context, const Group &group, unsloth_tensor out, int32_t from) {
  unsloth_send_receive_params params = UNSLOTH_SEND_RECEIVE_PARAMS_INIT;
  params.comm = group.comm;
  params.from = from;
  params.out = out;
  transfer(context, params);
}

void broadcast(const Context &context, const Group &group, unsloth_tensor x, int32_t root) {
  unsloth_broadcast_params params = UNSLOTH_BROADCAST_PARAMS_INIT;
  params.comm = group.comm;
  params.root = root;
  params.out = x;
  check(unsloth_broadcast_forward(context.get(), &params, context.stream()));
}

Span span_of_layers(uint64_t num_layers, const Group &group) {
  const auto size = static_cast<uint64_t>(group.size);
  const auto rank = static_cast<uint64_t>(group.rank);
  if (num_layers < size) {
    throw Error("the model has " + std::to_string(num_layers) + " layers, too few for " +
                std::to_string(size) + " ranks of a pipeline");
  }
  const uint64_t begin = num_layers * rank / size;
  return {begin, num_layers * (rank + 1) / size - begin};
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
