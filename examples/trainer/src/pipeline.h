// Ranks that have some of a model's layers each: in which order a rank's passes and transfers of a
// step come, and what ranks exchange beside hidden states and their gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "ranks.h"

namespace llm {

class Pipeline {
 public:
  // Of steps of so many micro-batches.
  Pipeline(const Context &context, const Group &group, uint64_t micro_batches);

  bool is_first() const { return group_.rank == 0; }
  bool is_last() const { return group_.rank == group_.size - 1; }
  // 1F1B (arXiv:2104.04473): a rank goes forward with as many micro-batches as there are ranks
  // behind it, then back and forward by turns.
  const std::vector<unsloth_pipeline_action> &actions() const { return actions_; }
  // Of how many micro-batches hidden states are held at a time.
  uint64_t num_slots() const { return num_slots_; }

  // Queues one of the actions that is a transfer: of a micro-batch's hidden states, as this rank
  // takes them in or gives them out, or of the gradient of either.
  void transfer(const unsloth_pipeline_action &action, unsloth_tensor in, unsloth_tensor out,
                unsloth_tensor gradient) const;

  // A table that is embedding and output projection has a gradient on the last rank too, which the
  // first one adds to its own, and an update on the first, which the last one gets.
  void reserve(unsloth_tensor gradient);  // what the first one receives it in
  void add_to_first(unsloth_tensor gradient) const;
  void share_first(unsloth_tensor weight) const;
  // A copy of what the last rank has; queued.
  void share_last(unsloth_tensor values) const;

 private:
  const Context *context_;
  Group group_;
  std::vector<unsloth_pipeline_action> actions_;
  uint64_t num_slots_ = 0;
  Buffer received_;
};

}  // namespace llm
