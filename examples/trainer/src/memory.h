// What training is expected to take, as the library estimates it from the model's shape.
#pragma once

#include <cstdint>

#include "args.h"
#include "config.h"
#include "data.h"
#include "device.h"
#include "lora.h"
#include "pipeline.h"
#include "step.h"
#include "weights.h"

namespace llm {

struct Estimated {
  const Args &args;
  const Context &context;
  const ModelConfig &config;
  const Weights &weights;
  const Lora *lora;  // or null
  const Batches &batches;
  const Step &step;
  uint64_t num_batches;      // of a step, of this rank
  const Pipeline *pipeline;  // or null
  int32_t text_parts;        // ranks that have some of every batch's tokens each
  int32_t shares;            // ranks that share the optimizer
};

// Bytes, of this rank.
uint64_t estimate_memory(const Estimated &of);

}  // namespace llm
