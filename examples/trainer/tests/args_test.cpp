#include "args.h"

#include <string>
#include <vector>

#include "check.h"
#include "schedule.h"

namespace llm {
namespace {

Args parse(std::vector<const char *> flags) {
  flags.insert(flags.begin(), {"trainer", "--model", "m", "--data", "d"});
  return parse_args(static_cast<int>(flags.size()), flags.data());
}

void defaults() {
  const Args full = parse({"--output", "o"});
  CHECK_EQUAL(full.learning_rate, 1e-5);
  CHECK_EQUAL(full.epochs, 1U);
  CHECK(full.loss_scaling == Args::LossScale::kNone);
  CHECK(full.output_type == TensorType::kF16);
  CHECK(full.gradients == UNSLOTH_DTYPE_F32);
  const Args lora = parse({"--output", "o", "--lora", "4", "--dtype", "bf16"});
  CHECK_EQUAL(lora.learning_rate, 2e-4);
  CHECK_EQUAL(lora.lora.scale(), 2.0);
  CHECK_EQUAL(lora.lora.targets.size(), 7U);
  CHECK(lora.output_type == TensorType::kBF16);
  const Args f16 = parse({"--output", "o", "--dtype", "f16"});
  CHECK(f16.loss_scaling == Args::LossScale::kDynamic);
  const Args chosen = parse({"--output=o", "--lora=2", "--lora-targets", "v,q", "--loss-scale=8"});
  CHECK(chosen.lora.targets == (std::vector<Target>{Target::kQ, Target::kV}));
  CHECK(chosen.loss_scaling == Args::LossScale::kFixed);
  CHECK_EQUAL(chosen.loss_scale, 8.0);
}

void ranks() {
  const Args two = parse({"--output", "o", "--data-parallel", "2"});
  CHECK_EQUAL(two.data_parallel, 2);
  CHECK_EQUAL(two.accumulate, 2U);
  CHECK_EQUAL(parse({"--output", "o", "--data-parallel", "2", "--accumulate=6"}).accumulate, 6U);
  CHECK(!two.shard_optimizer);
  CHECK(parse({"--output", "o", "--data-parallel", "2", "--shard-optimizer"}).shard_optimizer);
  const Args stages = parse({"--output", "o", "--pipeline-parallel", "3"});
  CHECK_EQUAL(stages.pipeline_parallel, 3);
  CHECK_EQUAL(stages.accumulate, 3U);
  // They share no batches, of which any number passes through them.
  CHECK_EQUAL(parse({"--output=o", "--pipeline-parallel=3", "--accumulate=4"}).accumulate, 4U);
  const Args parts = parse({"--output=o", "--context-parallel=2", "--checkpoint", "full"});
  CHECK_EQUAL(parts.context_parallel, 2);
  CHECK_EQUAL(parts.accumulate, 1U);
}

// Where a step of a rank is one batch.
void narrow_gradients() {
  const std::vector<std::vector<const char *>> allowed = {
      {"--data-parallel", "2"}, {"--context-parallel", "2"}, {"--checkpoint", "full"}};
  for (std::vector<const char *> flags : allowed) {
    flags.insert(flags.end(), {"--output", "o", "--dtype", "bf16", "--gradients", "bf16"});
    CHECK(parse(flags).gradients == UNSLOTH_DTYPE_BF16);
  }
  const Args lora = parse({"--output", "o", "--lora", "2", "--gradients=f32"});
  CHECK(lora.gradients == UNSLOTH_DTYPE_F32);
}

void mistakes() {
  struct Case {
    std::vector<const char *> flags;
    const char *message;
  };
  const Case cases[] = {
      {{}, "nothing would be kept"},
      {{"--model", ""}, "--model is needed"},
      {{"--output", "o", "--resume"}, "go with --checkpoint-dir"},
      {{"--output", "o", "--save-every", "5"}, "go with --checkpoint-dir"},
      {{"--output", "o", "--steps", "1", "--epochs", "1"}, "give one"},
      {{"--output", "o", "--lora-alpha", "4"}, "go with --lora"},
      {{"--output-lora", "o"}, "go with --lora"},
      {{"--output", "o", "--weights", "bf16"}, "go with --lora"},
      {{"--lora", "0"}, "--lora takes an integer from 1"},
      {{"--lora-targets", "q,x"}, "not 'x'"},
      {{"--lora-targets", ""}, "--lora-targets names no matrix"},
      {{"--batch-tokens", "7"}, "--batch-tokens takes an integer from 8"},
      {{"--data-parallel", "0"}, "--data-parallel takes an integer from 1"},
      {{"--output", "o", "--data-parallel", "2", "--accumulate", "3"},
       "--accumulate is 3, which the ranks of --data-parallel 2 do not share evenly"},
      {{"--output", "o", "--shard-optimizer", "--data-parallel", "2", "--lora", "4"},
       "--shard-optimizer does not go with --lora, --pipeline-parallel or --context-parallel"},
      {{"--output", "o", "--shard-optimizer", "--pipeline-parallel", "2"},
       "--shard-optimizer does not go with --lora, --pipeline-parallel or --context-parallel"},
      {{"--output", "o", "--shard-optimizer", "--context-parallel", "2"},
       "--shard-optimizer does not go with --lora, --pipeline-parallel or --context-parallel"},
      {{"--pipeline-parallel", "-1"}, "--pipeline-parallel takes an integer from 1"},
      {{"--output", "o", "--data-parallel", "2", "--pipeline-parallel", "2"},
       "--data-parallel, --pipeline-parallel and --context-parallel do not go together"},
      {{"--output", "o", "--context-parallel", "2", "--pipeline-parallel", "2"},
       "--data-parallel, --pipeline-parallel and --context-parallel do not go together"},
      {{"--context-parallel", "0"}, "--context-parallel takes an integer from 1"},
      {{"--output", "o", "--context-parallel", "3", "--batch-tokens", "64"},
       "--batch-tokens is 64, which the ranks of --context-parallel 3 do not share evenly"},
      {{"--output", "o", "--context-parallel", "2", "--checkpoint", "mlp"},
       "--context-parallel goes with --checkpoint none or full"},
      {{"--gradients", "f16"}, "--gradients takes bf16 or f32"},
      {{"--output", "o", "--gradients", "bf16"}, "--gradients bf16 goes with --dtype bf16"},
      {{"--output", "o", "--gradients", "bf16", "--dtype", "f16"},
       "--gradients bf16 goes with --dtype bf16"},
      {{"--output", "o", "--gradients", "bf16", "--dtype", "bf16", "--lora", "2"},
       "--gradients bf16 does not go with --lora or --pipeline-parallel"},
      {{"--output", "o", "--gradients", "bf16", "--dtype", "bf16", "--pipeline-parallel", "2"},
       "--gradients bf16 does not go with --lora or --pipeline-parallel"},
      {{"--output", "o", "--gradients", "bf16", "--dtype", "bf16", "--accumulate", "2"},
       "one batch of each rank: --accumulate is 2, --data-parallel 1"},
      {{"--output=o", "--gradients=bf16", "--dtype=bf16", "--accumulate=4", "--data-parallel=2"},
       "one batch of each rank: --accumulate is 4, --data-parallel 2"},
      {{"--output=o", "--gradients=bf16", "--dtype=bf16", "--accumulate=2", "--context-parallel=2"},
       "one batch of each rank: --accumulate is 2, --data-parallel 1"},
      {{"--learning-rate", "0"}, "--learning-rate takes a number above 0"},
      {{"--clip", "-1"}, "--clip takes a number of 0 or more"},
      {{"--checkpoint", "some"}, "--checkpoint takes elementwise or full or mlp or none"},
      {{"--output", "o", "--loss-scale", "big"},
       "--loss-scale takes a number above 0, auto or none"},
      {{"--output-type", "q4_0"}, "--output-type takes bf16 or f16 or f32 or q8_0"},
  };
  for (const Case &each : cases) CHECK_THROWS(UsageError, parse(each.flags), each.message);
}

void rates() {
  const auto rate = [](Schedule schedule, uint64_t step) {
    return learning_rate(schedule, 2.0, 4, step, 12);
  };
  for (const Schedule schedule : {Schedule::kConstant, Schedule::kLinear, Schedule::kCosine}) {
    CHECK_EQUAL(rate(schedule, 0), 0.5);
    CHECK_EQUAL(rate(schedule, 3), 2.0);
    CHECK_EQUAL(rate(schedule, 4), 2.0);
  }
  CHECK_EQUAL(rate(Schedule::kConstant, 11), 2.0);
  CHECK_EQUAL(rate(Schedule::kLinear, 8), 1.0);
  CHECK(std::fabs(rate(Schedule::kCosine, 8) - 1.0) < 1e-12);
  CHECK(rate(Schedule::kCosine, 11) > 0.0);
  CHECK_EQUAL(learning_rate(Schedule::kCosine, 2.0, 5, 5, 5), 2.0);
}

}  // namespace
}  // namespace llm

int main() {
  llm::defaults();
  llm::ranks();
  llm::narrow_gradients();
  llm::mistakes();
  llm::rates();
  return check::result();
}
