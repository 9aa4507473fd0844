// The command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flags.h"
#include "sampler.h"

namespace llm {

struct Args {
  enum class Device { kCpu, kCuda };
  enum class DType { kF32, kF16, kBf16 };
  enum class Weights { kF32, kF16, kBf16, kFile, kSuited };
  enum class Cache { kDType, kF32, kF16, kBf16, kF8 };

  bool help = false;
  std::string model;
  Device device = Device::kCpu;
  std::optional<std::string> prompt;
  uint32_t tokens = 128;
  uint32_t sequences = 1;  // continuations of the prompt
  SamplerOptions sampling;
  bool chat = false;
  std::optional<std::string> perplexity;
  bool json = false;
  uint32_t threads = 0;  // 0: as many as there are cores
  // Ranks that divide every layer, the layers, and the tokens of a text.
  std::optional<int32_t> rank;  // this process's, where ranks are processes
  std::string meet;             // the file by which these find each other
  int32_t tensor_parallel = 1;
  int32_t pipeline_parallel = 1;
  int32_t context_parallel = 1;
  // Of hidden states, and of keys and values unless `cache` says otherwise: bf16 on a GPU, which
  // multiplies operands of one type, and f32 on the CPU, which widens weights as it reads them.
  DType dtype = DType::kF32;
  // Of the matrices: as in the file on the CPU. kSuited, on a GPU: as in the file if all are
  // quantised, else `dtype` if that is a half, or bf16.
  Weights weights = Weights::kFile;
  bool int8_activations = false;  // by products with quantised matrices on the CPU
  // Of keys and values; kF8 is e4m3 with scales of 1, as llama.cpp has caches of few bits.
  Cache cache = Cache::kDType;
  bool graph = true;     // decode through a CUDA graph, where there is one
  bool warm_up = false;  // make first uses before what is timed
};

// Throws UsageError.
Args parse_args(int argc, const char *const *argv);

std::string usage();

}  // namespace llm
