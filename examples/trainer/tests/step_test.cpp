// The loss of whole models and its gradients. The arguments are a folder with the models of
// examples/common/tests/tiny_models.py, and where to compute: cpu (the default) or cuda.
#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "optimizer.h"
#include "quants.h"
#include "random.h"

namespace llm {
namespace {

constexpr uint64_t kTokens = 48;

std::string folder;
unsloth_backend backend = UNSLOTH_BACKEND_CPU;

// Three examples, of which the second half of each is learned.
std::vector<Example> examples(uint64_t num_tokens) {
  Random random(5);
  std::vector<Example> examples;
  for (const size_t length : {14, 9, 19}) {
    Example example;
    for (size_t i = 0; i < length; ++i) {
      example.tokens.push_back(static_cast<TokenId>(random.next() % num_tokens));
      example.learned.push_back(i >= length / 2 ? 1 : 0);
    }
    examples.push_back(example);
  }
  return examples;
}

// A model that is trained, as a whole or through a LoRA.
struct Setup {
  // A LoRA of rank 4 is on weights of bf16, whatever is computed in. `of_layers` are gradients.
  Setup(const std::string &name, uint32_t rank, unsloth_checkpointing policy, unsloth_dtype dtype,
        unsloth_dtype of_layers = UNSLOTH_DTYPE_F32)
      : gguf(Gguf::open(folder + "/" + name + ".gguf")),
        config(read_config(gguf)),
        context(backend, 0),
        weights(Weights::load(context, gguf, config, rank == 4 ? UNSLOTH_DTYPE_BF16 : dtype)),
        batches(examples(config.num_tokens), kTokens, 1) {
    if (rank > 0) {
      LoraOptions options;
      options.rank = rank;
      options.alpha = 3;
      options.targets = {Target::kQ, Target::kV, Target::kO, Target::kUp, Target::kDown};
      lora = std::make_unique<Lora>(context, config, weights, options, dtype, 3);
    } else {
      weights.add_gradients(context, of_layers);
    }
    parameters = lora ? lora->parameters() : weights.parameters();
    const Step::Options options = {1, kTokens, batches.max_sequences(), policy, dtype, true, true};
    step = std::make_unique<Step>(context, config, weights, lora.get(), options, nullptr);
    step->set_denominator(batches.get(0).learned);
  }

  Buffer *memory() { return lora ? lora->memory() : weights.memory(); }

  // Of f32 or bf16.
  std::vector<float> read(const unsloth_tensor &tensor) const {
    std::vector<std::byte> bytes(byte_count(tensor));
    check(unsloth_memory_copy(context.get(), bytes.data(), tensor.data, bytes.size(),
                              UNSLOTH_COPY_KIND_DEVICE_TO_HOST, context.stream()));
    context.synchronize();
    std::vector<float> values(element_count(tensor));
    const auto type = tensor.dtype == UNSLOTH_DTYPE_F32 ? TensorType::kF32 : TensorType::kBF16;
    dequantize(type, bytes.data(), values.size(), values.data());
    return values;
  }

  void write(const std::vector<float> &values, const unsloth_tensor &tensor) {
    const auto offset =
        static_cast<const char *>(tensor.data) - static_cast<const char *>(memory()->data());
    memory()->upload(values.data(), values.size() * sizeof(float), static_cast<size_t>(offset));
  }

  std::vector<std::vector<float>> gradients() const {
    std::vector<std::vector<float>> all;
    for (const Parameter &parameter : parameters) all.push_back(read(parameter.gradient));
    return all;
  }

  void clear_gradients() const {
    for (const Parameter &parameter : parameters) {
      check(unsloth_memory_set(context.get(), parameter.gradient.data, 0,
                               byte_count(parameter.gradient), context.stream()));
    }
  }

  Gguf gguf;
  ModelConfig config;
  Context context;
  Weights weights;
  std::unique_ptr<Lora> lora;
  std::vector<Parameter> parameters;
  Batches batches;
  std::unique_ptr<Step> step;
};

double norm(const std::vector<float> &values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

// Along its own gradient the loss changes by the gradient's norm, for each weight by itself. A
// fourth-order difference, so that steps can be long beside the rounding of f32.
void agrees_with_finite_differences(const std::string &name, uint32_t rank) {
  Setup setup(name, rank, UNSLOTH_CHECKPOINTING_NONE, UNSLOTH_DTYPE_F32);
  if (setup.lora) {
    // B begins at zero, where A has no gradient.
    Random random(9);
    for (const Parameter &parameter : setup.parameters) {
      std::vector<float> values = setup.read(parameter.weight);
      for (float &value : values) value += static_cast<float>(0.2 * random.uniform() - 0.1);
      setup.write(values, parameter.weight);
    }
  }
  const Batch batch = setup.batches.get(0);
  const auto loss = static_cast<float>(setup.step->run({batch}));
  CHECK(std::isfinite(loss) && loss > 0.5F);
  CHECK(std::fabs(setup.step->evaluate(batch) - loss) < 1e-5F * loss);
  const std::vector<std::vector<float>> gradients = setup.gradients();
  for (size_t i = 0; i < setup.parameters.size(); ++i) {
    const unsloth_tensor &weight = setup.parameters[i].weight;
    const double slope = norm(gradients[i]);
    if (!(slope > 1e-3)) {
      check::fail(__FILE__, __LINE__, name + ": weight " + std::to_string(i) + " has no gradient");
      continue;
    }
    const std::vector<float> values = setup.read(weight);
    const double length = std::min(0.02, 0.02 / slope);
    const auto loss_at = [&](double distance) {
      std::vector<float> moved = values;
      for (size_t j = 0; j < moved.size(); ++j) {
        moved[j] += static_cast<float>(distance * gradients[i][j] / slope);
      }
      setup.write(moved, weight);
      return static_cast<double>(setup.step->evaluate(batch));
    };
    const double near = loss_at(length) - loss_at(-length);
    const double far = loss_at(2 * length) - loss_at(-2 * length);
    const double difference = (8 * near - far) / (12 * length);
    setup.write(values, weight);
    const double error = std::fabs(difference - slope) / slope;
    if (!(error < 5e-3)) {
      check::fail(__FILE__, __LINE__,
                  name + ": the gradient of weight " + std::to_string(i) + " of " +
                      std::to_string(setup.parameters.size()) + " has the norm " +
                      std::to_string(slope) + ", the loss changes by " +
                      std::to_string(difference));
    }
  }
}

// What is kept and what is computed again makes no difference to a single bit.
void policies_agree(uint32_t rank, unsloth_dtype dtype,
                    unsloth_dtype of_layers = UNSLOTH_DTYPE_F32) {
  std::vector<std::vector<float>> expected;
  double expected_loss = 0;
  for (const unsloth_checkpointing policy :
       {UNSLOTH_CHECKPOINTING_NONE, UNSLOTH_CHECKPOINTING_ELEMENTWISE, UNSLOTH_CHECKPOINTING_MLP,
        UNSLOTH_CHECKPOINTING_PROJECTIONS, UNSLOTH_CHECKPOINTING_FULL}) {
    Setup setup("plain_f32", rank, policy, dtype, of_layers);
    const auto before = setup.context.memory_stats();
    const double loss = setup.step->run({setup.batches.get(0)});
    const auto after = setup.context.memory_stats();
    CHECK_EQUAL(after.peak, before.in_use);  // nothing is allocated in a step
    const std::vector<std::vector<float>> gradients = setup.gradients();
    if (expected.empty()) {
      expected = gradients;
      expected_loss = loss;
    }
    CHECK_EQUAL(loss, expected_loss);
    for (size_t i = 0; i < gradients.size(); ++i) {
      CHECK(std::memcmp(gradients[i].data(), expected[i].data(),
                        gradients[i].size() * sizeof(float)) == 0);
    }
  }
}

// Sequences in one batch are sequences in batches of their own, whose gradients add up.
void batches_add_up(const std::string &name, uint32_t rank) {
  Setup setup(name, rank, UNSLOTH_CHECKPOINTING_FULL, UNSLOTH_DTYPE_F32);
  const Batch packed = setup.batches.get(0);
  const double loss = setup.step->run({packed});
  const std::vector<std::vector<float>> expected = setup.gradients();
  setup.clear_gradients();

  double sum = 0;
  for (const Example &example : examples(setup.config.num_tokens)) {
    Batches alone({example}, kTokens, 0);
    sum += setup.step->run({alone.get(0)});
  }
  CHECK(std::fabs(sum - loss) < 1e-5 * loss);
  const std::vector<std::vector<float>> gradients = setup.gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    std::vector<float> difference = gradients[i];
    for (size_t j = 0; j < difference.size(); ++j) difference[j] -= expected[i][j];
    CHECK(norm(difference) <= 1e-4 * norm(expected[i]));
  }
}

// Gradients of 16-bit activations are near those of f32, and the loss falls when they are followed.
void learns_in(unsloth_dtype dtype, uint32_t rank) {
  Setup setup("plain_f32", rank, UNSLOTH_CHECKPOINTING_NONE, dtype);
  const Optimizer::Options options = {
      1.0, 0.0,   dtype == UNSLOTH_DTYPE_F16 ? Args::LossScale::kDynamic : Args::LossScale::kNone,
      0.0, dtype, 0};
  Optimizer optimizer(setup.context, setup.parameters, options);
  // Each step has the batch twice, whose gradients are half of what they are else.
  const Step::Options step_options = {
      2, kTokens, setup.batches.max_sequences(), UNSLOTH_CHECKPOINTING_MLP, dtype, true, true};
  Step step(setup.context, setup.config, setup.weights, setup.lora.get(), step_options, &optimizer);
  const Batch batch = setup.batches.get(0);
  step.set_denominator(2 * batch.learned);
  const uint64_t before = optimizer.status().step;
  // What a graph has captured follows the rate too.
  optimizer.set_learning_rate(0);
  const double first = step.run({batch, batch});
  for (int i = 0; i < 3; ++i) CHECK_EQUAL(step.run({batch, batch}), first);
  optimizer.set_learning_rate(0.01);
  for (int i = 0; i < 16; ++i) step.run({batch, batch});
  CHECK(optimizer.status().step + optimizer.status().skipped == before + 20);
  step.set_denominator(batch.learned);
  const auto last = static_cast<double>(step.evaluate(batch));
  if (!(last < 0.7 * first)) {
    check::fail(__FILE__, __LINE__,
                "the loss went from " + std::to_string(first) + " to " + std::to_string(last) +
                    " in dtype " + std::to_string(dtype));
  }
}

// Gradients of layers in bf16 are those in f32, rounded once; a table's and the last norm's are the
// same. Of a second batch the former take the place of the first one's, and the latter are added.
void rounds_gradients_of_layers(const std::string &name) {
  const auto make = [&](unsloth_dtype of_layers) {
    return std::make_unique<Setup>(name, 0, UNSLOTH_CHECKPOINTING_NONE, UNSLOTH_DTYPE_BF16,
                                   of_layers);
  };
  const auto wide = make(UNSLOTH_DTYPE_F32);
  const auto narrow = make(UNSLOTH_DTYPE_BF16);
  const Batch batch = wide->batches.get(0);
  const double loss = wide->step->run({batch});
  const std::vector<std::vector<float>> expected = wide->gradients();
  for (const float times : {1.0F, 2.0F}) {
    CHECK_EQUAL(narrow->step->run({batch}), loss);
    const std::vector<std::vector<float>> gradients = narrow->gradients();
    size_t rounded = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const bool is_narrow = narrow->parameters[i].gradient.dtype == UNSLOTH_DTYPE_BF16;
      rounded += is_narrow ? 1 : 0;
      const double mean = norm(expected[i]) / std::sqrt(static_cast<double>(expected[i].size()));
      CHECK(mean > 1e-6);
      for (size_t j = 0; j < gradients[i].size(); ++j) {
        const float exact = expected[i][j];
        // Twice the rounding: where a sum is added in another order it may go to the other side.
        const double allowed = (is_narrow ? 0x1p-8 : 1e-6) * std::fabs(exact) + 1e-6 * mean;
        const float found = is_narrow ? gradients[i][j] : gradients[i][j] / times;
        if (std::fabs(found - exact) <= allowed) continue;
        check::fail(__FILE__, __LINE__,
                    name + ": gradient " + std::to_string(i) + " has " + std::to_string(found) +
                        " at " + std::to_string(j) + ", in f32 it is " + std::to_string(exact));
        break;
      }
    }
    const ModelTensors &model = narrow->weights.tensors();
    CHECK_EQUAL(rounded + (model.output.rank > 0 ? 3 : 2), gradients.size());
  }
}

// The loss falls by them as it does by gradients in f32.
void learns_by_rounded_gradients() {
  std::vector<std::vector<double>> losses;
  for (const unsloth_dtype of_layers : {UNSLOTH_DTYPE_F32, UNSLOTH_DTYPE_BF16}) {
    Setup setup("plain_f32", 0, UNSLOTH_CHECKPOINTING_NONE, UNSLOTH_DTYPE_BF16, of_layers);
    const Optimizer::Options options = {1.0, 0.0, Args::LossScale::kNone, 0.0, UNSLOTH_DTYPE_BF16,
                                        0};
    Optimizer optimizer(setup.context, setup.parameters, options);
    Step::Options step_options = {
        1,    kTokens, setup.batches.max_sequences(), UNSLOTH_CHECKPOINTING_MLP, UNSLOTH_DTYPE_BF16,
        true, true};
    Step step(setup.context, setup.config, setup.weights, nullptr, step_options, &optimizer);
    const Batch batch = setup.batches.get(0);
    step.set_denominator(batch.learned);
    optimizer.set_learning_rate(0.0005);
    std::vector<double> &found = losses.emplace_back();
    for (int i = 0; i < 8; ++i) found.push_back(step.run({batch}));
    CHECK(found.back() < 0.7 * found.front());
    if (of_layers == UNSLOTH_DTYPE_F32) continue;
    step_options.batches = 2;
    CHECK_THROWS(Error,
                 Step(setup.context, setup.config, setup.weights, nullptr, step_options, nullptr),
                 "gradients that are not f32 are of one batch, not 2");
  }
  for (size_t i = 0; i < losses[0].size(); ++i) {
    const double apart = std::fabs(losses[1][i] / losses[0][i] - 1);
    if (apart < 2e-2) continue;
    check::fail(__FILE__, __LINE__,
                "the loss of step " + std::to_string(i) + " is " + std::to_string(losses[1][i]) +
                    ", by gradients in f32 " + std::to_string(losses[0][i]));
  }
}

}  // namespace
}  // namespace llm

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  llm::folder = argv[1];
  if (argc > 2 && std::string(argv[2]) == "cuda") llm::backend = UNSLOTH_BACKEND_CUDA;
  for (const char *name : {"plain_f32", "llama3_f16", "biases_q4_1", "yarn_q4_0"}) {
    llm::agrees_with_finite_differences(name, 0);
  }
  llm::agrees_with_finite_differences("plain_f32", 3);
  for (const unsloth_dtype dtype : {UNSLOTH_DTYPE_F32, UNSLOTH_DTYPE_BF16, UNSLOTH_DTYPE_F16}) {
    llm::policies_agree(0, dtype);
    llm::policies_agree(4, dtype);
    llm::learns_in(dtype, 0);
    llm::learns_in(dtype, 4);
  }
  llm::policies_agree(0, UNSLOTH_DTYPE_BF16, UNSLOTH_DTYPE_BF16);
  for (const char *name : {"plain_f32", "llama3_f16", "biases_q4_1"}) {
    llm::rounds_gradients_of_layers(name);
  }
  llm::learns_by_rounded_gradients();
  llm::batches_add_up("mqa_bf16", 0);
  llm::batches_add_up("plain_f32", 2);
  return check::result();
}
