// A run of the trainer, from files to files.
#pragma once

#include "args.h"

namespace llm {

enum class Outcome { kDone, kInterrupted };

// Trains as the arguments say. A signal to interrupt or to end lets the step finish, writes a
// checkpoint if there is a place for it, and returns. Throws Error, after which the last checkpoint
// is as it was.
Outcome train(const Args &args);

}  // namespace llm
