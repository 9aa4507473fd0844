#include "args.h"

#include <cmath>
#include <map>
#include <optional>
#include <sstream>

namespace llm {
namespace {

bool is_positive(double value) { return value > 0.0 && std::isfinite(value); }
bool is_not_negative(double value) { return value >= 0.0 && std::isfinite(value); }

std::vector<Target> parse_targets(const std::string &flag, const std::string &text) {
  std::map<std::string, Target> known;
  for (int i = 0; i < 7; ++i) known[kTargetNames[i]] = static_cast<Target>(i);
  bool chosen[7] = {};
  std::stringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    chosen[static_cast<int>(parse_choice(flag, name, known))] = true;
  }
  std::vector<Target> targets;
  for (int i = 0; i < 7; ++i) {
    if (chosen[i]) targets.push_back(static_cast<Target>(i));
  }
  if (targets.empty()) throw UsageError(flag + " names no matrix");
  return targets;
}

// Those that are not f32 are overwritten, since only f32 is added to.
void check_gradients(const Args &args) {
  if (args.dtype != UNSLOTH_DTYPE_BF16) throw UsageError("--gradients bf16 goes with --dtype bf16");
  if (args.lora.rank > 0 || args.pipeline_parallel > 1) {
    throw UsageError("--gradients bf16 does not go with --lora or --pipeline-parallel");
  }
  if (args.accumulate != static_cast<uint64_t>(args.data_parallel)) {
    throw UsageError("--gradients bf16 takes one batch of each rank: --accumulate is " +
                     std::to_string(args.accumulate) + ", --data-parallel " +
                     std::to_string(args.data_parallel));
  }
}

}  // namespace

Args parse_args(int argc, const char *const *argv) {
  Args args;
  std::optional<std::string> loss_scale;
  std::optional<TensorType> output_type;
  std::optional<uint64_t> epochs;
  std::optional<uint64_t> accumulate;
  std::optional<unsloth_dtype> weights;
  bool lora_is_detailed = false;
  bool no_graph = false;
  const auto text = [](std::string *target) {
    return [target](auto &, auto &value) { *target = value; };
  };
  const auto count = [](uint64_t *target, uint64_t minimum) {
    return [=](auto &flag, auto &value) { *target = parse_integer(flag, value, minimum); };
  };
  const auto ranks = [](int32_t *target) {
    return [target](auto &flag, auto &value) { *target = parse_integer<int32_t>(flag, value, 1); };
  };
  const auto parse_dtype = [](const std::string &flag, const std::string &value) {
    return parse_choice<unsloth_dtype>(
        flag, value,
        {{"f32", UNSLOTH_DTYPE_F32}, {"f16", UNSLOTH_DTYPE_F16}, {"bf16", UNSLOTH_DTYPE_BF16}});
  };
  const auto number = [](double *target) {
    return [=](auto &flag, auto &value) {
      *target = parse_number(flag, value, is_not_negative, "of 0 or more");
    };
  };
  const std::map<std::string, SetValue> valued = {
      {"--model", text(&args.model)},
      {"--data", text(&args.data)},
      {"--output", text(&args.output)},
      {"--output-lora", text(&args.output_lora)},
      {"--output-type",
       [&](auto &flag, auto &value) {
         output_type = parse_choice<TensorType>(flag, value,
                                                {{"f32", TensorType::kF32},
                                                 {"f16", TensorType::kF16},
                                                 {"bf16", TensorType::kBF16},
                                                 {"q8_0", TensorType::kQ8_0}});
       }},
      {"--checkpoint-dir", text(&args.checkpoint_dir)},
      {"--save-every", count(&args.save_every, 1)},
      {"--device",
       [&](auto &flag, auto &value) {
         args.backend = parse_choice<unsloth_backend>(
             flag, value, {{"cpu", UNSLOTH_BACKEND_CPU}, {"cuda", UNSLOTH_BACKEND_CUDA}});
       }},
      {"--threads",
       [&](auto &flag, auto &value) { args.threads = parse_integer<uint32_t>(flag, value, 1); }},
      {"--dtype", [&](auto &flag, auto &value) { args.dtype = parse_dtype(flag, value); }},
      {"--weights", [&](auto &flag, auto &value) { weights = parse_dtype(flag, value); }},
      {"--gradients",
       [&](auto &flag, auto &value) {
         args.gradients = parse_choice<unsloth_dtype>(
             flag, value, {{"f32", UNSLOTH_DTYPE_F32}, {"bf16", UNSLOTH_DTYPE_BF16}});
       }},
      {"--lora",
       [&](auto &flag, auto &value) { args.lora.rank = parse_integer<uint32_t>(flag, value, 1); }},
      {"--lora-alpha",
       [&](auto &flag, auto &value) {
         args.lora.alpha = parse_number(flag, value, is_positive, "above 0");
         lora_is_detailed = true;
       }},
      {"--lora-targets",
       [&](auto &flag, auto &value) {
         args.lora.targets = parse_targets(flag, value);
         lora_is_detailed = true;
       }},
      {"--steps", count(&args.steps, 1)},
      {"--epochs",
       [&](auto &flag, auto &value) { epochs = parse_integer<uint64_t>(flag, value, 1); }},
      {"--batch-tokens", count(&args.batch_tokens, 8)},
      {"--accumulate",
       [&](auto &flag, auto &value) { accumulate = parse_integer<uint64_t>(flag, value, 1); }},
      {"--data-parallel", ranks(&args.data_parallel)},
      {"--pipeline-parallel", ranks(&args.pipeline_parallel)},
      {"--context-parallel", ranks(&args.context_parallel)},
      {"--learning-rate",
       [&](auto &flag, auto &value) {
         args.learning_rate = parse_number(flag, value, is_positive, "above 0");
       }},
      {"--warmup", count(&args.warmup, 0)},
      {"--schedule",
       [&](auto &flag, auto &value) {
         args.schedule = parse_choice<Schedule>(flag, value,
                                                {{"constant", Schedule::kConstant},
                                                 {"linear", Schedule::kLinear},
                                                 {"cosine", Schedule::kCosine}});
       }},
      {"--weight-decay", number(&args.weight_decay)},
      {"--clip", number(&args.clip)},
      {"--loss-scale", [&](auto &, auto &value) { loss_scale = value; }},
      {"--checkpoint",
       [&](auto &flag, auto &value) {
         args.checkpointing = parse_choice<unsloth_checkpointing>(
             flag, value,
             {{"none", UNSLOTH_CHECKPOINTING_NONE},
              {"elementwise", UNSLOTH_CHECKPOINTING_ELEMENTWISE},
              {"mlp", UNSLOTH_CHECKPOINTING_MLP},
              {"projections", UNSLOTH_CHECKPOINTING_PROJECTIONS},
              {"full", UNSLOTH_CHECKPOINTING_FULL}});
       }},
      {"--seed", count(&args.seed, 0)},
      {"--log", text(&args.log)},
  };
  const std::map<std::string, bool *> switches = {{"--help", &args.help},
                                                  {"-h", &args.help},
                                                  {"--resume", &args.resume},
                                                  {"--json", &args.json},
                                                  {"--no-graph", &no_graph},
                                                  {"--deterministic", &args.deterministic},
                                                  {"--shard-optimizer", &args.shard_optimizer}};
  parse_flags(argc, argv, valued, switches);
  args.graph = !no_graph;

  if (args.help) return args;
  if (args.model.empty()) throw UsageError("--model is needed");
  if (args.data.empty()) throw UsageError("--data is needed");
  if (args.output.empty() && args.output_lora.empty() && args.checkpoint_dir.empty()) {
    throw UsageError(
        "nothing would be kept: one of --output, --output-lora and --checkpoint-dir "
        "is needed");
  }
  if (args.checkpoint_dir.empty() && (args.resume || args.save_every > 0)) {
    throw UsageError("--resume and --save-every go with --checkpoint-dir");
  }
  if (args.steps > 0 && epochs) throw UsageError("--steps and --epochs say the same: give one");
  args.epochs = epochs.value_or(1);
  const bool data = args.data_parallel > 1;
  const bool pipeline = args.pipeline_parallel > 1;
  const bool context = args.context_parallel > 1;
  if (data + pipeline + context > 1) {
    throw UsageError(
        "--data-parallel, --pipeline-parallel and --context-parallel do not go together");
  }
  const auto parts = static_cast<uint64_t>(args.context_parallel);
  if (args.batch_tokens % parts != 0) {
    throw UsageError("--batch-tokens is " + std::to_string(args.batch_tokens) +
                     ", which the ranks of --context-parallel " + std::to_string(parts) +
                     " do not share evenly");
  }
  const bool keeps_some = args.checkpointing != UNSLOTH_CHECKPOINTING_NONE &&
                          args.checkpointing != UNSLOTH_CHECKPOINTING_FULL;
  if (context && keeps_some) {
    throw UsageError("--context-parallel goes with --checkpoint none or full");
  }
  const auto copies = static_cast<uint64_t>(args.data_parallel);
  args.accumulate = accumulate.value_or(copies * static_cast<uint64_t>(args.pipeline_parallel));
  if (args.accumulate % copies != 0) {
    throw UsageError("--accumulate is " + std::to_string(args.accumulate) +
                     ", which the ranks of --data-parallel " + std::to_string(copies) +
                     " do not share evenly");
  }

  const bool lora = args.lora.rank > 0;
  if (!lora && (lora_is_detailed || weights || !args.output_lora.empty())) {
    throw UsageError("--lora-alpha, --lora-targets, --weights and --output-lora go with --lora");
  }
  if (args.shard_optimizer && (lora || pipeline || context)) {
    throw UsageError(
        "--shard-optimizer does not go with --lora, --pipeline-parallel or --context-parallel");
  }
  args.weights = weights.value_or(args.dtype);
  if (args.gradients != UNSLOTH_DTYPE_F32) check_gradients(args);
  if (args.lora.alpha == 0) args.lora.alpha = 2.0 * args.lora.rank;
  if (args.learning_rate == 0) args.learning_rate = lora ? 2e-4 : 1e-5;

  const bool f16 = args.dtype == UNSLOTH_DTYPE_F16;
  const bool bf16 = args.dtype == UNSLOTH_DTYPE_BF16;
  args.output_type = output_type.value_or(bf16 ? TensorType::kBF16 : TensorType::kF16);
  const std::string scale = loss_scale.value_or(f16 ? "auto" : "none");
  if (scale == "auto") {
    args.loss_scaling = Args::LossScale::kDynamic;
  } else if (scale != "none") {
    args.loss_scaling = Args::LossScale::kFixed;
    args.loss_scale = parse_number("--loss-scale", scale, is_positive, "above 0, auto or none");
  }
  return args;
}

std::string usage() {
  return "usage: trainer --model FILE.gguf --data FILE --output FILE.gguf [flags]\n"
         "\n"
         "  --model FILE          a GGUF file of the Llama family\n"
         "  --data FILE           a .txt text, or .jsonl: a line is {\"text\"}, {\"prompt\",\n"
         "                        \"completion\"} or {\"messages\": [{\"role\", \"content\"}, "
         "..]};\n"
         "                        answers alone are learned\n"
         "  --output FILE         the trained model, as GGUF\n"
         "  --output-type TYPE    its matrices: f32, f16, bf16 or q8_0 (f16, bf16 for --dtype "
         "bf16)\n"
         "  --output-lora FILE    the LoRA by itself, as GGUF\n"
         "  --checkpoint-dir DIR  where training can be taken up again\n"
         "  --save-every N        write the checkpoint every N steps too, not only at the end\n"
         "  --resume              go on from the checkpoint\n"
         "  --device cpu|cuda     where the model is trained (cpu)\n"
         "  --threads N           CPU threads (one per core)\n"
         "  --dtype TYPE          weights and activations as f32, bf16 or f16 (f32)\n"
         "  --weights TYPE        of a LoRA's frozen matrices: f32, bf16 or f16 (the dtype)\n"
         "  --gradients TYPE      of layers' weights: f32, or bf16, which takes --dtype bf16 and\n"
         "                        one batch of each rank a step (f32)\n"
         "  --lora RANK           train a LoRA of this rank in place of all weights\n"
         "  --lora-alpha A        its product counts A / RANK times (twice the rank)\n"
         "  --lora-targets LIST   of q,k,v,o,gate,up,down (all)\n"
         "  --steps N             stop after N steps\n"
         "  --epochs N            or after N times the data (1)\n"
         "  --batch-tokens N      tokens of a batch, into which sequences are packed (512)\n"
         "  --accumulate N        batches whose gradients make a step (one of each rank)\n"
         "  --data-parallel N     divide these among N ranks: groups of threads on the CPU, or N "
         "GPUs "
         "(1)\n"
         "  --shard-optimizer     and the optimizer's state among them, which updates a part of "
         "the "
         "weights "
         "on each;\n"
         "                        not with --lora\n"
         "  --pipeline-parallel N divide the layers among N ranks, through which these pass one "
         "behind the other (1)\n"
         "  --context-parallel N  divide every batch's tokens among N ranks (1)\n"
         "  --learning-rate R     (1e-5, 2e-4 for a LoRA)\n"
         "  --warmup N            steps in which the rate rises to that (0)\n"
         "  --schedule NAME       how it falls after: constant, linear or cosine (cosine)\n"
         "  --weight-decay D      of matrices, decoupled (0)\n"
         "  --clip NORM           scale gradients down to this norm, 0 for not at all (1)\n"
         "  --loss-scale S        auto, none or a number (auto for f16, else none)\n"
         "  --checkpoint POLICY   what is computed again in place of being kept: none, "
         "elementwise,\n"
         "                        mlp, projections or full (none); results are the same\n"
         "  --deterministic       on a GPU, the same bits in every run, by slower kernels (a CPU "
         "gives them "
         "always)\n"
         "  --no-graph            on a GPU, queue every launch anew in place of replaying a graph\n"
         "  --seed S              of the order of the data and of what begins at random (0)\n"
         "  --json                print one JSON object a step\n"
         "  --log FILE            and write them to a file\n"
         "  --help                this text\n";
}

}  // namespace llm
