#include "args.h"

#include <cmath>
#include <map>
#include <utility>

namespace llm {
namespace {

constexpr uint32_t kMaxSequences = 256;

// Ranks that have some of the layers, or of the tokens, run one text.
void check_sequences(const Args &args) {
  if (args.sequences > kMaxSequences) {
    throw UsageError("--sequences takes an integer from 1 to " + std::to_string(kMaxSequences) +
                     ", not '" + std::to_string(args.sequences) + "'");
  }
  if (args.sequences == 1) return;
  if (!args.prompt) throw UsageError("--sequences continues one prompt: give --prompt");
  for (const auto &[flag, size] : {std::pair("--pipeline-parallel", args.pipeline_parallel),
                                   std::pair("--context-parallel", args.context_parallel)}) {
    if (size > 1) throw UsageError(std::string("--sequences and ") + flag + " do not go together");
  }
}

}  // namespace

Args parse_args(int argc, const char *const *argv) {
  Args args;
  std::optional<Args::DType> dtype;
  std::optional<Args::Weights> weights;
  bool no_graph = false;
  const auto parse_dtype = [](const std::string &flag, const std::string &value) {
    return parse_choice<Args::DType>(
        flag, value,
        {{"f32", Args::DType::kF32}, {"f16", Args::DType::kF16}, {"bf16", Args::DType::kBf16}});
  };
  const auto ranks = [](int32_t *number) {
    return [number](const std::string &flag, const std::string &value) {
      *number = parse_integer<int32_t>(flag, value, 1);
    };
  };
  const std::map<std::string, SetValue> valued = {
      {"--model", [&](auto &, auto &value) { args.model = value; }},
      {"--device",
       [&](auto &flag, auto &value) {
         args.device = parse_choice<Args::Device>(
             flag, value, {{"cpu", Args::Device::kCpu}, {"cuda", Args::Device::kCuda}});
       }},
      {"--prompt", [&](auto &, auto &value) { args.prompt = value; }},
      {"--tokens",
       [&](auto &flag, auto &value) { args.tokens = parse_integer<uint32_t>(flag, value, 0); }},
      {"--sequences",
       [&](auto &flag, auto &value) { args.sequences = parse_integer<uint32_t>(flag, value, 1); }},
      {"--temperature",
       [&](auto &flag, auto &value) {
         args.sampling.temperature = parse_number(
             flag, value, [](double t) { return t >= 0.0 && std::isfinite(t); }, "of 0 or more");
       }},
      {"--top-k",
       [&](auto &flag, auto &value) {
         args.sampling.top_k = parse_integer<uint32_t>(flag, value, 0);
       }},
      {"--top-p",
       [&](auto &flag, auto &value) {
         args.sampling.top_p = parse_number(
             flag, value, [](double p) { return p > 0.0 && p <= 1.0; }, "above 0 and up to 1");
       }},
      {"--seed",
       [&](auto &flag, auto &value) {
         args.sampling.seed = parse_integer<uint64_t>(flag, value, 0);
       }},
      {"--perplexity", [&](auto &, auto &value) { args.perplexity = value; }},
      {"--threads",
       [&](auto &flag, auto &value) { args.threads = parse_integer<uint32_t>(flag, value, 1); }},
      {"--rank",
       [&](auto &flag, auto &value) { args.rank = parse_integer<int32_t>(flag, value, 0); }},
      {"--meet", [&](auto &, auto &value) { args.meet = value; }},
      {"--tensor-parallel", ranks(&args.tensor_parallel)},
      {"--pipeline-parallel", ranks(&args.pipeline_parallel)},
      {"--context-parallel", ranks(&args.context_parallel)},
      {"--dtype", [&](auto &flag, auto &value) { dtype = parse_dtype(flag, value); }},
      {"--cache-type",
       [&](auto &flag, auto &value) {
         args.cache = parse_choice<Args::Cache>(flag, value,
                                                {{"f32", Args::Cache::kF32},
                                                 {"f16", Args::Cache::kF16},
                                                 {"bf16", Args::Cache::kBf16},
                                                 {"f8", Args::Cache::kF8}});
       }},
      {"--weights",
       [&](auto &flag, auto &value) {
         weights = parse_choice<Args::Weights>(flag, value,
                                               {{"file", Args::Weights::kFile},
                                                {"f32", Args::Weights::kF32},
                                                {"f16", Args::Weights::kF16},
                                                {"bf16", Args::Weights::kBf16}});
       }},
  };
  const std::map<std::string, bool *> switches = {{"--help", &args.help},
                                                  {"-h", &args.help},
                                                  {"--chat", &args.chat},
                                                  {"--json", &args.json},
                                                  {"--no-graph", &no_graph},
                                                  {"--warm-up", &args.warm_up},
                                                  {"--int8-activations", &args.int8_activations}};

  parse_flags(argc, argv, valued, switches);
  if (args.help) return args;
  const bool cpu = args.device == Args::Device::kCpu;
  args.dtype = dtype.value_or(cpu ? Args::DType::kF32 : Args::DType::kBf16);
  args.weights = weights.value_or(cpu ? Args::Weights::kFile : Args::Weights::kSuited);
  args.graph = !no_graph;
  if (args.model.empty()) throw UsageError("--model is needed");
  if (args.perplexity && (args.prompt || args.chat)) {
    throw UsageError("--perplexity scores a file: it goes with neither --prompt nor --chat");
  }
  if (!args.perplexity && !args.prompt && !args.chat) {
    throw UsageError("one of --prompt, --chat and --perplexity is needed");
  }
  if (args.warm_up && args.perplexity) {
    throw UsageError("--warm-up goes with --prompt or --chat");
  }
  constexpr int64_t kMaxRanks = 1024;
  int64_t num_ranks = 1;
  const std::pair<const char *, int32_t> ways[] = {{"--tensor-parallel", args.tensor_parallel},
                                                   {"--pipeline-parallel", args.pipeline_parallel},
                                                   {"--context-parallel", args.context_parallel}};
  for (const auto &[flag, size] : ways) {
    if (size > 1 && !args.perplexity && !args.prompt) {
      throw UsageError(std::string(flag) +
                       " runs one prompt or file: give --prompt or --perplexity");
    }
    num_ranks *= size;
    if (num_ranks > kMaxRanks) throw UsageError(std::string(flag) + " makes more than 1024 ranks");
  }
  if (args.pipeline_parallel > 1 && args.context_parallel > 1) {
    throw UsageError("--pipeline-parallel and --context-parallel do not go together");
  }
  if (args.cache != Args::Cache::kDType && args.context_parallel > 1) {
    throw UsageError("--cache-type and --context-parallel do not go together");
  }
  check_sequences(args);
  if (args.rank.has_value() == args.meet.empty()) {
    throw UsageError("--rank and --meet go together");
  }
  if (args.rank && *args.rank >= num_ranks) {
    throw UsageError("--rank is one of " + std::to_string(num_ranks) + " ranks, from 0");
  }
  if (args.rank && (cpu || num_ranks == 1)) {
    throw UsageError("--rank is for several ranks with --device cuda: on the CPU they are threads");
  }
  if (args.json && !args.perplexity && !args.prompt) {
    throw UsageError("--json reports on one prompt or file: give --prompt or --perplexity");
  }
  return args;
}

std::string usage() {
  return "usage: engine --model PATH (--prompt TEXT | --chat | --perplexity FILE) [flags]\n"
         "\n"
         "  --model PATH        a GGUF file of the Llama family\n"
         "  --device cpu|cuda   where the model runs (cpu)\n"
         "  --prompt TEXT       the text to continue\n"
         "  --tokens N          generate at most N tokens (128)\n"
         "  --sequences N       continue the prompt N times at once: a step runs a token of each "
         "(1)\n"
         "  --temperature T     0 takes the likeliest token, more is more random (0)\n"
         "  --top-k K           draw from the K likeliest tokens, 0 for all (40)\n"
         "  --top-p P           and of those from the likeliest that together reach P (0.95)\n"
         "  --seed S            of the random numbers (0)\n"
         "  --chat              send the prompt as a chat message; without a prompt, converse\n"
         "  --perplexity FILE   score the text of a file in place of generating\n"
         "  --json              print one JSON object in place of the text\n"
         "  --threads N         CPU threads (one per core)\n"
         "  --tensor-parallel N divide every layer among N ranks: groups of threads on the CPU, or "
         "N GPUs (1)\n"
         "  --pipeline-parallel N\n"
         "                      divide the layers among N ranks, and each with --tensor-parallel "
         "(1)\n"
         "  --context-parallel N\n"
         "                      divide the text among N ranks by its tokens, and each with "
         "--tensor-parallel:\n"
         "                      a cache holds a part of the keys and values (1)\n"
         "  --rank R            run rank R alone, in this process; the others are processes too, "
         "with a GPU each\n"
         "  --meet FILE         the file by which these find each other, which rank 0 writes\n"
         "  --dtype TYPE        keep hidden states, keys and values as f32, f16 or bf16\n"
         "                      (f32 on the CPU, bf16 on a GPU)\n"
         "  --cache-type TYPE   keep keys and values as f32, f16, bf16, or f8, which is e4m3 (the "
         "dtype)\n"
         "  --weights TYPE      keep the matrices as in the file, or as f32, f16 or bf16\n"
         "                      (file on the CPU; on a GPU the dtype, bf16 for f32)\n"
         "  --int8-activations  on the CPU, round what quantised matrices multiply to 8 bits, not\n"
         "                      16, where that is faster\n"
         "  --no-graph          on a GPU, queue every step anew in place of replaying a graph\n"
         "  --warm-up           run the prompt once before what is timed, or load before a chat "
         "what\n"
         "                      its turns would: on a GPU first uses load kernels\n"
         "  --help              this text\n";
}

}  // namespace llm
