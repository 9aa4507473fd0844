#include "args.h"

#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace llm {
namespace {

Args parse(std::vector<const char *> flags) {
  flags.insert(flags.begin(), "engine");
  return parse_args(static_cast<int>(flags.size()), flags.data());
}

void good_flags() {
  const Args args = parse({"--model",
                           "m",
                           "--device=cuda",
                           "--prompt",
                           "--a=b",
                           "--tokens",
                           "5",
                           "--sequences=1",
                           "--temperature",
                           "0.5",
                           "--top-k",
                           "0",
                           "--top-p=1",
                           "--seed",
                           "18446744073709551615",
                           "--chat",
                           "--json",
                           "--threads",
                           "2",
                           "--tensor-parallel",
                           "4",
                           "--pipeline-parallel=3",
                           "--rank=11",
                           "--meet=/shared/ids",
                           "--weights",
                           "bf16"});
  CHECK_EQUAL(args.model, std::string("m"));
  CHECK(args.device == Args::Device::kCuda);
  CHECK_EQUAL(args.prompt.value_or(""), std::string("--a=b"));
  CHECK_EQUAL(args.tokens, 5U);
  CHECK_EQUAL(args.sequences, 1U);
  CHECK_EQUAL(parse({"--model", "m", "--prompt", "p", "--sequences", "256", "--tensor-parallel=2"})
                  .sequences,
              256U);
  CHECK_EQUAL(args.tensor_parallel, 4);
  CHECK_EQUAL(args.pipeline_parallel, 3);
  CHECK_EQUAL(args.rank.value_or(-1), 11);
  CHECK_EQUAL(args.meet, std::string("/shared/ids"));
  CHECK_EQUAL(args.context_parallel, 1);
  CHECK_EQUAL(
      parse({"--model", "m", "--perplexity", "f", "--context-parallel", "2"}).context_parallel, 2);
  CHECK_EQUAL(args.sampling.temperature, 0.5);
  CHECK_EQUAL(args.sampling.top_k, 0U);
  CHECK_EQUAL(args.sampling.top_p, 1.0);
  CHECK_EQUAL(args.sampling.seed, std::numeric_limits<uint64_t>::max());
  CHECK(args.chat);
  CHECK(args.json);
  CHECK_EQUAL(args.threads, 2U);
  CHECK(args.weights == Args::Weights::kBf16);
  CHECK(args.dtype == Args::DType::kBf16);
  CHECK(args.cache == Args::Cache::kDType);
  CHECK(parse({"--model", "m", "--chat", "--cache-type", "f8"}).cache == Args::Cache::kF8);
  CHECK(args.graph);
  CHECK(!parse({"--model", "m", "--chat", "--no-graph"}).graph);
  CHECK(!args.int8_activations);
  CHECK(parse({"--model", "m", "--chat", "--int8-activations"}).int8_activations);
  CHECK(!args.warm_up);
  CHECK(parse({"--model", "m", "--prompt", "p", "--warm-up"}).warm_up);
  CHECK(parse({"--model", "m", "--chat", "--warm-up"}).warm_up);
  CHECK(parse({"--help", "--chat"}).help);
  CHECK(parse({"--model", "m", "--chat"}).chat);
  CHECK_EQUAL(parse({"--model", "m", "--prompt", ""}).prompt.value_or("x"), std::string());
}

// What is not said about dtypes follows from the device and from what is said.
void dtypes() {
  using DType = Args::DType;
  using Weights = Args::Weights;
  struct Case {
    std::vector<const char *> flags;
    DType dtype;
    Weights weights;
  };
  const Case cases[] = {
      {{}, DType::kF32, Weights::kFile},
      {{"--device", "cuda"}, DType::kBf16, Weights::kSuited},
      {{"--dtype", "f16"}, DType::kF16, Weights::kFile},
      {{"--device", "cuda", "--dtype", "f16"}, DType::kF16, Weights::kSuited},
      {{"--device", "cuda", "--dtype", "f32"}, DType::kF32, Weights::kSuited},
      {{"--device", "cuda", "--weights", "bf16"}, DType::kBf16, Weights::kBf16},
      {{"--device", "cuda", "--weights", "file"}, DType::kBf16, Weights::kFile},
      {{"--dtype", "bf16", "--weights", "f32"}, DType::kBf16, Weights::kF32},
  };
  for (const Case &each : cases) {
    std::vector<const char *> flags = {"--model", "m", "--chat"};
    flags.insert(flags.end(), each.flags.begin(), each.flags.end());
    const Args args = parse(flags);
    CHECK(args.dtype == each.dtype);
    CHECK(args.weights == each.weights);
  }
}

void bad_flags() {
  struct Case {
    std::vector<const char *> flags;
    const char *message;
  };
  const Case cases[] = {
      {{}, "--model is needed"},
      {{"--model"}, "--model needs a value"},
      {{"--model", "m"}, "one of --prompt, --chat and --perplexity"},
      {{"--colour", "red"}, "unknown flag '--colour'"},
      {{"prompt"}, "unknown flag 'prompt'"},
      {{"--chat=yes"}, "--chat takes no value"},
      {{"--device", "tpu"}, "--device takes cpu or cuda, not 'tpu'"},
      {{"--dtype", "int8"}, "--dtype takes bf16 or f16 or f32, not 'int8'"},
      {{"--no-graph=1"}, "--no-graph takes no value"},
      {{"--weights", "q4"}, "--weights takes bf16 or f16 or f32 or file, not 'q4'"},
      {{"--tokens", "-1"}, "--tokens takes an integer from 0 to 4294967295, not '-1'"},
      {{"--tokens", "4294967296"}, "not '4294967296'"},
      {{"--tokens", "5x"}, "not '5x'"},
      {{"--tokens", ""}, "not ''"},
      {{"--sequences", "0"}, "--sequences takes an integer from 1"},
      {{"--model", "m", "--prompt", "p", "--sequences", "257"},
       "--sequences takes an integer from 1 to 256, not '257'"},
      {{"--model", "m", "--chat", "--sequences", "2"}, "--sequences continues one prompt"},
      {{"--model", "m", "--perplexity", "f", "--sequences", "2"},
       "--sequences continues one prompt"},
      {{"--model", "m", "--prompt", "p", "--sequences", "2", "--pipeline-parallel", "2"},
       "--sequences and --pipeline-parallel do not go together"},
      {{"--model", "m", "--prompt", "p", "--sequences", "2", "--context-parallel", "2"},
       "--sequences and --context-parallel do not go together"},
      {{"--threads", "0"}, "--threads takes an integer from 1"},
      {{"--temperature", "-0.1"}, "--temperature takes a number of 0 or more"},
      {{"--temperature", "nan"}, "not 'nan'"},
      {{"--temperature", "inf"}, "not 'inf'"},
      {{"--top-p", "0"}, "--top-p takes a number above 0 and up to 1"},
      {{"--top-p", "1.1"}, "not '1.1'"},
      {{"--seed", "1e3"}, "not '1e3'"},
      {{"--model", "m", "--perplexity", "f", "--prompt", "p"}, "--perplexity scores a file"},
      {{"--model", "m", "--perplexity", "f", "--chat"}, "--perplexity scores a file"},
      {{"--model", "m", "--chat", "--json"}, "--json reports on one prompt or file"},
      {{"--tensor-parallel", "0"}, "--tensor-parallel takes an integer from 1"},
      {{"--model", "m", "--chat", "--tensor-parallel", "2"},
       "--tensor-parallel runs one prompt or file"},
      {{"--model", "m", "--prompt", "p", "--rank", "0"}, "--rank and --meet go together"},
      {{"--model", "m", "--prompt", "p", "--meet", "f"}, "--rank and --meet go together"},
      {{"--model", "m", "--prompt", "p", "--rank=0", "--meet=f", "--tensor-parallel=2"},
       "--rank is for several ranks with --device cuda"},
      {{"--model", "m", "--prompt", "p", "--device=cuda", "--rank=0", "--meet=f"},
       "--rank is for several ranks with --device cuda"},
      {{"--model", "m", "--prompt", "p", "--device=cuda", "--rank=2", "--meet=f",
        "--tensor-parallel=2"},
       "--rank is one of 2 ranks, from 0"},
      {{"--rank", "-1"}, "--rank takes an integer from 0"},
      {{"--pipeline-parallel", "0"}, "--pipeline-parallel takes an integer from 1"},
      {{"--model", "m", "--chat", "--pipeline-parallel", "2"},
       "--pipeline-parallel runs one prompt or file"},
      {{"--context-parallel", "x"}, "--context-parallel takes an integer from 1"},
      {{"--model", "m", "--chat", "--context-parallel", "2"},
       "--context-parallel runs one prompt or file"},
      {{"--model", "m", "--prompt", "p", "--pipeline-parallel", "2", "--context-parallel", "2"},
       "--pipeline-parallel and --context-parallel do not go together"},
      {{"--cache-type", "q8_0"}, "--cache-type takes bf16 or f16 or f32 or f8, not 'q8_0'"},
      {{"--model", "m", "--prompt", "p", "--cache-type", "f8", "--context-parallel", "2"},
       "--cache-type and --context-parallel do not go together"},
      {{"--model", "m", "--prompt", "p", "--tensor-parallel", "512", "--pipeline-parallel", "3"},
       "--pipeline-parallel makes more than 1024 ranks"},
      {{"--model", "m", "--perplexity", "f", "--warm-up"},
       "--warm-up goes with --prompt or --chat"},
  };
  for (const Case &bad : cases) CHECK_THROWS(UsageError, parse(bad.flags), bad.message);
}

}  // namespace
}  // namespace llm

int main() {
  llm::good_flags();
  llm::dtypes();
  llm::bad_flags();
  return check::result();
}
