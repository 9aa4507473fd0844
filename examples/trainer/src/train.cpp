#include "train.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "agreement.h"
#include "checkpoint.h"
#include "config.h"
#include "data.h"
#include "device.h"
#include "error.h"
#include "export.h"
#include "gguf.h"
#include "json.h"
#include "lora.h"
#include "mapped_file.h"
#include "memory.h"
#include "optimizer.h"
#include "output_file.h"
#include "pipeline.h"
#include "progress.h"
#include "ranks.h"
#include "schedule.h"
#include "shared_norm.h"
#include "step.h"
#include "tokenizer.h"
#include "weights.h"

namespace llm {
namespace {

constexpr double kMiB = 1 << 20;

volatile std::sig_atomic_t interrupted = 0;

// While it lives, a first signal asks to stop; a second one stops the program.
class SignalGuard {
 public:
  SignalGuard() {
    interrupted = 0;
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigaction(SIGINT, &action, &old_interrupt_);
    sigaction(SIGTERM, &action, &old_terminate_);
  }
  ~SignalGuard() {
    sigaction(SIGINT, &old_interrupt_, nullptr);
    sigaction(SIGTERM, &old_terminate_, nullptr);
  }
  SignalGuard(const SignalGuard &) = delete;
  SignalGuard &operator=(const SignalGuard &) = delete;

 private:
  struct sigaction old_interrupt_ = {};
  struct sigaction old_terminate_ = {};
};

// The numbers of a step.
struct Report {
  uint64_t step;  // from 1
  double loss;
  double learning_rate;
  uint64_t tokens;  // of examples
  double seconds;
  unsloth_optimizer_status status;
};

// Lines of JSON, to standard output and to a file, as they come.
class Log {
 public:
  Log(const Args &args, bool append) : to_output_(args.json), path_(args.log) {
    if (path_.empty()) return;
    file_ = std::fopen(path_.c_str(), append ? "a" : "w");
    if (file_ == nullptr) throw Error(path_ + ": cannot open: " + std::strerror(errno));
  }
  ~Log() {
    if (file_ != nullptr) std::fclose(file_);
  }
  Log(const Log &) = delete;
  Log &operator=(const Log &) = delete;

  void write(const std::string &line) {
    if (to_output_) {
      std::printf("%s\n", line.c_str());
      std::fflush(stdout);
    }
    if (file_ == nullptr) return;
    if (std::fprintf(file_, "%s\n", line.c_str()) < 0 || std::fflush(file_) != 0) {
      throw Error(path_ + ": cannot write: " + std::strerror(errno));
    }
  }

 private:
  bool to_output_;
  std::string path_;
  std::FILE *file_ = nullptr;
};

// Finds out before training whether a file could be written after it.
void probe(const std::string &path) {
  if (!path.empty()) OutputFile file(path);
}

std::string checksum_of(const std::string &path) {
  const MappedFile file(path);
  return std::to_string(file.size()) + " bytes " +
         std::to_string(checksum(file.data(), file.size()));
}

class Trainer {
 public:
  Trainer(const Args &args, const Context &context, const Group &group, Agreement *agreement);

  Outcome run();

 private:
  std::string describe() const;
  std::string checkpoint_path() const { return args_.checkpoint_dir + "/trainer.checkpoint"; }
  Trained trained() { return {&context_, &weights_, lora_.get(), optimizer_.get()}; }
  void save();
  void resume();
  Report run_step();
  void check_finite(const Report &report) const;
  std::string to_json(const Report &report) const;
  std::string note(const Report &report) const;
  void write_outputs();

  // Calls `write` on the first rank, with what is trained: all ranks have the same, or their
  // layers, or their share of the optimizer.
  template <typename Write>
  void on_first(const Write &write);

  // Ranks divide either the layers, or every batch's tokens, or a step's batches.
  bool in_stages() const { return args_.pipeline_parallel > 1; }
  bool divides_tokens() const { return args_.context_parallel > 1; }
  Group stages() const { return in_stages() ? group_ : Group(); }
  Group copies() const { return in_stages() ? Group() : group_; }
  // Ranks of one have nothing to share.
  bool shares_optimizer() const { return args_.shard_optimizer && args_.data_parallel > 1; }
  Group shares() const { return shares_optimizer() ? group_ : Group(); }
  // Whether a rank keeps what others do not.
  bool has_own() const { return in_stages() || shares_optimizer(); }
  // Of the batches of a step, this rank's.
  uint64_t num_batches() const {
    return args_.accumulate / static_cast<uint64_t>(args_.data_parallel);
  }
  bool is_first() const { return group_.rank == 0; }

  const Args &args_;
  const Context &context_;
  Group group_;
  Agreement *agreement_;
  Gguf gguf_;
  ModelConfig config_;
  Tokenizer tokenizer_;
  Batches batches_;
  uint64_t num_steps_;
  Weights weights_;
  std::unique_ptr<Lora> lora_;
  std::unique_ptr<SharedNorm> norm_;  // of ranks in stages
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<Step> step_;
  uint64_t estimate_ = 0;
  std::string description_;
  uint64_t steps_done_ = 0;
  uint64_t batches_done_ = 0;
  std::optional<uint64_t> saved_step_;
};

Batches read_batches(const Args &args, const Gguf &gguf, const ModelConfig &config,
                     const Tokenizer &tokenizer, bool tells) {
  const uint64_t longest = std::min(args.batch_tokens, config.context_length);
  Dataset dataset = read_dataset(args.data, gguf, tokenizer, longest);
  if (dataset.cut > 0 && tells) {
    std::fprintf(stderr,
                 "%llu examples are longer than %llu tokens and were cut; %llu of them had "
                 "nothing left to learn\n",
                 static_cast<unsigned long long>(dataset.cut),
                 static_cast<unsigned long long>(longest),
                 static_cast<unsigned long long>(dataset.dropped));
  }
  return Batches(std::move(dataset.examples), args.batch_tokens, args.seed);
}

uint64_t count_steps(const Args &args, Batches *batches) {
  if (args.steps > 0) return args.steps;
  return (batches->count(args.epochs) + args.accumulate - 1) / args.accumulate;
}

Trainer::Trainer(const Args &args, const Context &context, const Group &group, Agreement *agreement)
    : args_(args),
      context_(context),
      group_(group),
      agreement_(agreement),
      gguf_(Gguf::open(args.model)),
      config_(read_config(gguf_)),
      tokenizer_(gguf_),
      batches_(read_batches(args, gguf_, config_, tokenizer_, group.rank == 0)),
      num_steps_(count_steps(args, &batches_)),
      weights_(Weights::load(context_, gguf_, config_, args.weights, stages(), shares())) {
  if (args.lora.rank > 0) {
    lora_ = std::make_unique<Lora>(context_, config_, weights_, args.lora, args.dtype, args.seed);
  } else {
    weights_.add_gradients(context_, args.gradients);
  }
  const Optimizer::Options optimizer = {args.clip,       args.weight_decay, args.loss_scaling,
                                        args.loss_scale, args.dtype,        args.seed,
                                        shares()};
  std::vector<Parameter> parameters = lora_ ? lora_->parameters() : weights_.parameters();
  if (in_stages()) {
    norm_ = std::make_unique<SharedNorm>(context_, group_, parameters);
    parameters.push_back(norm_->stand_in());
    pipeline_ = std::make_unique<Pipeline>(context_, group_, num_batches());
  }
  optimizer_ = std::make_unique<Optimizer>(context_, parameters, optimizer);
  Step::Options step = {};
  step.batches = num_batches();
  step.tokens = batches_.tokens() / static_cast<uint64_t>(args.context_parallel);
  step.max_sequences = batches_.max_sequences();
  step.checkpointing = args.checkpointing;
  step.dtype = args.dtype;
  step.deterministic = args.deterministic;
  step.use_graph = args.graph;
  step.group = copies();
  step.divides_tokens = divides_tokens();
  step.shares_optimizer = shares_optimizer();
  step.pipeline = pipeline_.get();
  step.norm = norm_.get();
  step_ = std::make_unique<Step>(context_, config_, weights_, lora_.get(), step, optimizer_.get());
  estimate_ =
      estimate_memory({args, context_, config_, weights_, lora_.get(), batches_, *step_,
                       num_batches(), pipeline_.get(), args.context_parallel, shares().size});
  if (!args.checkpoint_dir.empty()) description_ = describe();
  if (has_own()) agreement_->show(group_, trained());
}

// What the bits of a run follow from. Where it runs, and what it keeps of activations, is not
// among it.
std::string Trainer::describe() const {
  std::string text;
  const auto line = [&text](const std::string &name, const std::string &value) {
    text += name + " " + value + "\n";
  };
  line("--model", checksum_of(args_.model));
  line("--data", checksum_of(args_.data));
  line("--dtype", std::to_string(args_.dtype));
  line("--weights", std::to_string(args_.weights));
  line("--lora", std::to_string(args_.lora.rank));
  line("--lora-alpha", std::to_string(args_.lora.alpha));
  std::string targets;
  if (lora_) {
    for (const Target target : args_.lora.targets) {
      targets += (targets.empty() ? "" : ",") + std::string(kTargetNames[static_cast<int>(target)]);
    }
  }
  line("--lora-targets", targets);
  line("--steps", std::to_string(num_steps_));
  line("--batch-tokens", std::to_string(args_.batch_tokens));
  line("--accumulate", std::to_string(args_.accumulate));
  line("--data-parallel", std::to_string(args_.data_parallel));
  line("--shard-optimizer", std::to_string(shares_optimizer() ? 1 : 0));
  line("--pipeline-parallel", std::to_string(args_.pipeline_parallel));
  line("--context-parallel", std::to_string(args_.context_parallel));
  line("--learning-rate", std::to_string(args_.learning_rate));
  line("--warmup", std::to_string(args_.warmup));
  line("--schedule", std::to_string(static_cast<int>(args_.schedule)));
  line("--weight-decay", std::to_string(args_.weight_decay));
  line("--clip", std::to_string(args_.clip));
  line("--loss-scale", std::to_string(static_cast<int>(args_.loss_scaling)) + " " +
                           std::to_string(args_.loss_scale));
  line("--seed", std::to_string(args_.seed));
  line("--gradients", std::to_string(args_.gradients));
  return text;
}

template <typename Write>
void Trainer::on_first(const Write &write) {
  if (!has_own()) {
    if (is_first()) write(std::vector<Trained>{trained()});
    return;
  }
  agreement_->meet(group_);
  if (is_first()) write(agreement_->trained());
  agreement_->meet(group_);
}

void Trainer::save() {
  on_first([this](const std::vector<Trained> &all) {
    Checkpoint checkpoint;
    checkpoint.arguments = description_;
    checkpoint.steps = steps_done_;
    checkpoint.batches = batches_done_;
    for (const Trained &trained : all) {
      Checkpoint::Part &part = checkpoint.parts.emplace_back();
      // Ranks that share the optimizer have the same weights.
      if (in_stages() || checkpoint.parts.size() == 1) {
        part.weights.resize(trained.memory()->bytes());
        trained.memory()->download(part.weights.data(), part.weights.size());
      }
      part.optimizer = trained.optimizer->save();
    }
    write_checkpoint(checkpoint_path(), checkpoint);
  });
  saved_step_ = steps_done_;
}

void Trainer::resume() {
  const Group parts = has_own() ? group_ : Group();
  const Checkpoint checkpoint =
      read_checkpoint(checkpoint_path(), description_, static_cast<size_t>(parts.size));
  const std::vector<std::byte> &weights =
      checkpoint.parts[static_cast<size_t>(stages().rank)].weights;
  Buffer *const memory = trained().memory();
  if (weights.size() != memory->bytes()) {
    throw Error(checkpoint_path() + ": the checkpoint is of another model");
  }
  memory->upload(weights.data(), weights.size());
  optimizer_->load(checkpoint.parts[static_cast<size_t>(parts.rank)].optimizer);
  steps_done_ = checkpoint.steps;
  batches_done_ = checkpoint.batches;
  saved_step_ = steps_done_;
}

Report Trainer::run_step() {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Batch> batches;
  uint64_t learned = 0;
  Report report = {};
  const uint64_t first =
      args_.data_parallel > 1 ? static_cast<uint64_t>(group_.rank) * num_batches() : 0;
  for (uint64_t i = 0; i < args_.accumulate; ++i) {
    Batch batch = batches_.get(batches_done_ + i);
    learned += batch.learned;
    report.tokens += batch.used;
    if (i < first || i >= first + num_batches()) continue;
    batches.push_back(divides_tokens() ? part_of(batch, group_.rank, group_.size)
                                       : std::move(batch));
  }
  step_->set_denominator(learned);
  report.learning_rate =
      learning_rate(args_.schedule, args_.learning_rate, args_.warmup, steps_done_, num_steps_);
  optimizer_->set_learning_rate(report.learning_rate);
  report.loss = step_->run(batches);
  batches_done_ += args_.accumulate;
  report.status = optimizer_->status();
  report.step = ++steps_done_;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

// Infinite gradients are what a changing loss scale looks for, and the optimizer leaves out such a
// step. An infinite loss is not: nothing would come of going on.
void Trainer::check_finite(const Report &report) const {
  const bool searching = args_.loss_scaling == Args::LossScale::kDynamic;
  const bool gradients = report.status.found_inf != 0 && !searching;
  if (std::isfinite(report.loss) && !gradients) return;
  std::string message = "the " + std::string(gradients ? "gradient" : "loss") + " of step " +
                        std::to_string(report.step) +
                        " is not finite: a lower --learning-rate or "
                        "longer --warmup may help";
  if (saved_step_) {
    message += "; the checkpoint of step " + std::to_string(*saved_step_) + " is as it was";
  }
  throw Error(message);
}

std::string Trainer::to_json(const Report &report) const {
  JsonWriter json(JsonWriter::Style::kOneLine);
  json.begin_object();
  json.key("step").value(report.step);
  json.key("loss").value(report.loss);
  json.key("learning_rate").value(report.learning_rate);
  json.key("gradient_norm").value(static_cast<double>(report.status.gradient_norm));
  json.key("loss_scale").value(static_cast<double>(report.status.loss_scale));
  json.key("skipped").value(report.status.found_inf != 0);
  json.key("tokens").value(report.tokens);
  json.key("tokens_per_second").value(static_cast<double>(report.tokens) / report.seconds);
  json.key("memory").begin_object();
  json.key("estimated").value(estimate_);
  json.key("real").value(context_.memory_stats().peak);
  json.end_object();
  json.end_object();
  return json.text();
}

std::string Trainer::note(const Report &report) const {
  char text[160];
  std::snprintf(text, sizeof(text),
                "step %llu/%llu, loss %.4f, %.0f tokens/s, %.0f MiB (%.0f "
                "estimated)",
                static_cast<unsigned long long>(report.step),
                static_cast<unsigned long long>(num_steps_), report.loss,
                static_cast<double>(report.tokens) / report.seconds,
                static_cast<double>(context_.memory_stats().peak) / kMiB,
                static_cast<double>(estimate_) / kMiB);
  return text;
}

void Trainer::write_outputs() {
  on_first([this](const std::vector<Trained> &all) {
    if (!args_.output.empty()) write_model(args_.output, gguf_, all, args_.output_type);
    if (!args_.output_lora.empty()) write_adapter(args_.output_lora, gguf_, all);
  });
}

Outcome Trainer::run() {
  if (args_.resume) resume();
  std::optional<Log> log;
  std::optional<SignalGuard> signals;
  std::optional<ProgressBar> bar;
  if (is_first()) {
    log.emplace(args_, args_.resume);
    signals.emplace();
    bar.emplace("training", num_steps_);
    bar->advance(steps_done_);
  }
  std::string last;
  while (agreement_->goes_on(group_, steps_done_, steps_done_ < num_steps_ && interrupted == 0)) {
    const Report report = run_step();
    if (log) log->write(to_json(report));
    check_finite(report);
    last = note(report);
    if (bar) {
      bar->advance(1);
      bar->set_note(last);
    }
    if (args_.save_every > 0 && steps_done_ % args_.save_every == 0) save();
  }
  bar.reset();
  if (!last.empty() && !args_.json && is_first()) std::fprintf(stderr, "%s\n", last.c_str());
  if (!args_.checkpoint_dir.empty() && saved_step_ != steps_done_) save();
  if (steps_done_ != num_steps_) {
    if (is_first()) {
      std::fprintf(stderr, "interrupted after step %llu%s\n",
                   static_cast<unsigned long long>(steps_done_),
                   args_.checkpoint_dir.empty() ? "" : ": --resume goes on from here");
    }
    return Outcome::kInterrupted;
  }
  write_outputs();
  return Outcome::kDone;
}

}  // namespace

Outcome train(const Args &args) {
  if (!args.checkpoint_dir.empty() && mkdir(args.checkpoint_dir.c_str(), 0777) != 0 &&
      errno != EEXIST) {
    throw Error(args.checkpoint_dir + ": cannot create: " + std::strerror(errno));
  }
  probe(args.output);
  probe(args.output_lora);
  Agreement agreement;
  Outcome outcome = Outcome::kDone;
  const int32_t size =
      std::max({args.data_parallel, args.pipeline_parallel, args.context_parallel});
  run_ranks(args.backend, args.threads, {size}, std::nullopt,
            [&](const Context &context, const std::vector<Group> &groups) {
              const Group &group = groups[0];
              try {
                const Outcome own = Trainer(args, context, group, &agreement).run();
                if (group.rank == 0) outcome = own;
              } catch (...) {
                agreement.stop(std::current_exception());
                throw;
              }
            });
  return outcome;
}

}  // namespace llm
