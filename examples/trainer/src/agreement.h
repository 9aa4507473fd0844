// What the ranks of a run, which are threads, agree on beside what they compute.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <vector>

#include "device.h"
#include "lora.h"
#include "optimizer.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

// What a rank trains; `lora` is null where the weights themselves are trained.
struct Trained {
  const Context *context;
  Weights *weights;
  Lora *lora;
  Optimizer *optimizer;

  Buffer *memory() const { return lora != nullptr ? lora->memory() : weights->memory(); }
};

class Agreement {
 public:
  // Whether to make step `step`, counted from 0; the first rank says so.
  bool goes_on(const Group &group, uint64_t step, bool wanted) {
    if (group.size == 1) return wanted;
    std::unique_lock<std::mutex> lock(mutex_);
    if (group.rank == 0) {
      (wanted ? allowed_ : end_) = wanted ? step + 1 : step;
      changed_.notify_all();
      return wanted;
    }
    changed_.wait(lock, [&] { return allowed_ > step || end_ <= step; });
    return end_ > step;
  }

  // Waits for all ranks to come here. Throws what keeps one from it.
  void meet(const Group &group) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t meeting = meetings_;
    if (++arrived_ == group.size) {
      arrived_ = 0;
      ++meetings_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return meetings_ > meeting || why_ != nullptr; });
    if (meetings_ == meeting) std::rethrow_exception(why_);
  }

  // A rank is not coming any more, because of what it threw.
  void stop(const std::exception_ptr &why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_ = 0;
    if (why_ == nullptr) why_ = why;
    changed_.notify_all();
  }

  // What every rank of a pipeline trains, for the first one to read while the others are between
  // two meetings.
  void show(const Group &group, const Trained &trained) {
    const std::lock_guard<std::mutex> lock(mutex_);
    trained_.resize(static_cast<size_t>(group.size));
    trained_[static_cast<size_t>(group.rank)] = trained;
  }
  const std::vector<Trained> &trained() const { return trained_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t allowed_ = 0;
  uint64_t end_ = std::numeric_limits<uint64_t>::max();
  int32_t arrived_ = 0;
  uint64_t meetings_ = 0;
  std::exception_ptr why_;  // no rank is waited for any more
  std::vector<Trained> trained_;
};

}  // namespace llm
