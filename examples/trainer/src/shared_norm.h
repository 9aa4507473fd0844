// The norm of gradients of which every rank has some, for optimizers that know their own.
//
// An optimizer scales its gradients down by their norm, and leaves out a step of which one is not
// finite. So that ranks decide alike, each one's optimizer has one more weight that nobody reads,
// which stands for all that the others have: its gradient is the norm of theirs.
#pragma once

#include <vector>

#include "device.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

class SharedNorm {
 public:
  // Of a rank's own parameters, which outlive it.
  SharedNorm(const Context &context, const Group &group, const std::vector<Parameter> &own);

  Parameter stand_in() const;
  // Finds the others' norm when the gradients are complete, before the optimizer's step. All ranks
  // call it; waits for them.
  void exchange();

 private:
  const Context *context_;
  Group group_;
  Buffer state_;
  Buffer stand_in_;  // the weight, and its gradient
  Buffer norms_;     // of all ranks
  // What the library gives a norm by: steps of a rate of 0, which change nothing.
  unsloth::Optimizer measure_;
};

}  // namespace llm
