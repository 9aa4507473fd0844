// What training is taken up from: the trained weights, the optimizer's state, and where in the data
// it was. A run that goes on from a checkpoint gives the same bits as one that was not stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llm {

struct Checkpoint {
  // What the bits depend on, a line each: another run's must be the same.
  std::string arguments;
  uint64_t steps = 0;    // done
  uint64_t batches = 0;  // seen
  struct Part {
    std::vector<std::byte> weights;
    std::vector<std::byte> optimizer;
  };
  // Of each rank of a pipeline, or that shares the optimizer, of which the first has the weights of
  // all; else one.
  std::vector<Part> parts;
};

// Puts the file in the place of the one before it, or leaves that and throws.
void write_checkpoint(const std::string &path, const Checkpoint &checkpoint);
// Throws for a file that is damaged, or was made with other `arguments`, which the message names
// and which say how many parts there are.
Checkpoint read_checkpoint(const std::string &path, const std::string &arguments, size_t num_parts);

// Of any bytes: files are told apart by it, and damage is seen.
uint64_t checksum(const void *data, size_t bytes, uint64_t seed = 0);

}  // namespace llm
