// The command line.
#pragma once

#include <unsloth.h>

#include <cstdint>
#include <string>
#include <vector>

#include "flags.h"
#include "quants.h"

namespace llm {

// The matrices of a layer, in the order of `kTargetNames`.
enum class Target { kQ, kK, kV, kO, kGate, kUp, kDown };
constexpr const char *kTargetNames[] = {"q", "k", "v", "o", "gate", "up", "down"};

struct LoraOptions {
  uint32_t rank = 0;  // 0: all weights are trained
  double alpha = 0;   // of alpha / rank, the factor of the product; 0 for twice the rank
  std::vector<Target> targets = {Target::kQ,    Target::kK,  Target::kV,   Target::kO,
                                 Target::kGate, Target::kUp, Target::kDown};

  double scale() const { return alpha / rank; }
};

enum class Schedule { kConstant, kLinear, kCosine };

struct Args {
  enum class LossScale { kNone, kDynamic, kFixed };

  bool help = false;
  std::string model;
  std::string data;
  std::string output;       // a model
  std::string output_lora;  // an adapter
  TensorType output_type = TensorType::kF16;
  std::string checkpoint_dir;
  uint64_t save_every = 0;  // steps; 0: at the end, and when interrupted
  bool resume = false;

  unsloth_backend backend = UNSLOTH_BACKEND_CPU;
  uint32_t threads = 0;
  unsloth_dtype dtype = UNSLOTH_DTYPE_F32;      // of activations, and of weights that are trained
  unsloth_dtype weights = UNSLOTH_DTYPE_F32;    // of matrices: `dtype`, unless they are frozen
  unsloth_dtype gradients = UNSLOTH_DTYPE_F32;  // of layers' weights; a step adds up those of f32
  LoraOptions lora;

  uint64_t steps = 0;  // 0: as `epochs` says
  uint64_t epochs = 1;
  uint64_t batch_tokens = 512;
  uint64_t accumulate = 1;        // batches of all ranks
  int32_t data_parallel = 1;      // ranks that divide them
  bool shard_optimizer = false;   // whether these have a part of its state each
  int32_t pipeline_parallel = 1;  // or ranks that divide the layers
  int32_t context_parallel = 1;   // or every batch's tokens
  double learning_rate = 0;       // 0: 1e-5, or 2e-4 for a LoRA
  uint64_t warmup = 0;
  Schedule schedule = Schedule::kCosine;
  double weight_decay = 0;
  double clip = 1;  // 0: not at all
  LossScale loss_scaling = LossScale::kNone;
  double loss_scale = 0;  // of kFixed
  unsloth_checkpointing checkpointing = UNSLOTH_CHECKPOINTING_NONE;
  bool deterministic = false;  // on a GPU, the same bits in every run
  bool graph = true;           // on a GPU, a batch's launches as one
  uint64_t seed = 0;
  bool json = false;
  std::string log;
};

// Throws UsageError.
Args parse_args(int argc, const char *const *argv);

std::string usage();

}  // namespace llm
