#include "optimizer.h"

namespace llm {
namespace {

// Parameters that decay, and those that do not.
enum Kind : uint32_t { kDecaying, kOther, kNumGroups };

}  // namespace

Optimizer::Optimizer(const Context &context, const std::vector<Parameter> &parameters,
                     const Options &options)
    : context_(&context), weight_decay_(options.weight_decay) {
  std::vector<unsloth_parameter> table;
  for (const Parameter &parameter : parameters) {
    unsloth_parameter entry = {};
    entry.weight = parameter.weight;
    entry.gradient = parameter.gradient;
    entry.group = parameter.decays ? kDecaying : kOther;
    table.push_back(entry);
  }
  const unsloth_parameter_group groups[kNumGroups] = {};

  auto params = unsloth::make<unsloth_optimizer_params>();
  params.kind = UNSLOTH_OPTIMIZER_ADAM;
  params.decoupled = 1;
  params.max_norm = static_cast<float>(options.clip);
  params.zero_gradients = options.shares.size > 1 ? 0 : 1;
  params.comm = options.shares.comm;
  params.seed = options.seed;
  params.parameters = table.data();
  params.num_parameters = table.size();
  params.groups = groups;
  params.num_groups = kNumGroups;
  params.precision.compute_dtype = options.dtype;
  params.precision.master = master(options.dtype);
  params.precision.loss_scale.dynamic = options.loss_scaling == Args::LossScale::kDynamic ? 1 : 0;
  if (options.loss_scaling == Args::LossScale::kFixed) {
    params.precision.loss_scale.init = static_cast<float>(options.loss_scale);
  }

  size_t size = 0;
  check(unsloth_optimizer_state_size(context.get(), &params, &size));
  state_ = Buffer(context, size);
  params.state = state_.data();
  params.state_size = state_.bytes();
  check(optimizer_.create(context.get(), params, context.stream()));
}

unsloth_master Optimizer::master(unsloth_dtype dtype) {
  if (dtype == UNSLOTH_DTYPE_BF16) return UNSLOTH_MASTER_REMAINDER;
  return dtype == UNSLOTH_DTYPE_F16 ? UNSLOTH_MASTER_F32 : UNSLOTH_MASTER_NONE;
}

unsloth_tensor Optimizer::loss_scale() const {
  unsloth_tensor scale = {};
  check(unsloth_optimizer_loss_scale(optimizer_, &scale));
  return scale;
}

void Optimizer::set_learning_rate(double learning_rate) {
  for (uint32_t group = 0; group < kNumGroups; ++group) {
    unsloth_parameter_group values = {};
    values.learning_rate = static_cast<float>(learning_rate);
    values.weight_decay = group == kDecaying ? static_cast<float>(weight_decay_) : 0.0F;
    check(unsloth_optimizer_set_group(optimizer_, group, &values, context_->stream()));
  }
}

void Optimizer::queue_step() { check(unsloth_optimizer_step(optimizer_, context_->stream())); }

unsloth_optimizer_status Optimizer::status() const {
  auto status = unsloth::make<unsloth_optimizer_status>();
  check(unsloth_optimizer_read(optimizer_, context_->stream(), &status));
  return status;
}

std::vector<std::byte> Optimizer::save() const {
  size_t size = 0;
  check(unsloth_optimizer_saved_size(optimizer_, &size));
  std::vector<std::byte> saved(size);
  check(unsloth_optimizer_save(optimizer_, saved.data(), saved.size(), context_->stream()));
  return saved;
}

void Optimizer::load(const std::vector<std::byte> &saved) {
  check(unsloth_optimizer_load(optimizer_, saved.data(), saved.size(), context_->stream()));
}

}  // namespace llm
