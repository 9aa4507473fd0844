// Gradients of ranks that have a part of every step's batches each, added up while others are
// computed.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "ranks.h"
#include "weights.h"

namespace llm {

class Reducer {
 public:
  Reducer(const Context &context, const Group &group);

  // Adds up, on a stream of its own, gradients that are made by what is queued so far. They lie
  // behind each other in the order given, with nothing but zeros between them; neighbours of one
  // dtype are one sum, in that dtype. Absent ones are left out.
  void add(const std::vector<unsloth_tensor> &gradients);
  // The same of ranks that share an optimizer: the sums are there for this rank's share of each
  // piece, and what is left of the others' is nothing that is of use.
  void scatter(const Weights &weights, const std::vector<Piece> &pieces);
  // Gives all ranks each one's share of the weights, once what is queued so far has run.
  void share(const Weights &weights, const std::vector<Piece> &pieces);
  // What is queued from here on finds all sums.
  void join();

  // `mine` of every rank behind each other, f32, once what is queued so far has run.
  std::vector<float> gather(const Buffer &mine, uint64_t count);

 private:
  // The sums' stream waits for what is queued so far.
  void follow();
  // The sum of all from `first`'s elements to before `end`.
  void queue(const unsloth_tensor &first, const char *end);

  const Context *context_;
  Group group_;
  unsloth::Stream stream_;
  unsloth::Event ready_;
  Buffer gathered_;
};

}  // namespace llm
