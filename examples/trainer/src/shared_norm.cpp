#include "shared_norm.h"

#include <cmath>

namespace llm {

SharedNorm::SharedNorm(const Context &context, const Group &group,
                       const std::vector<Parameter> &own)
    : context_(&context),
      group_(group),
      stand_in_(context, 2 * sizeof(float)),
      norms_(context, static_cast<size_t>(group.size) * sizeof(float)) {
  const float zeros[2] = {};
  stand_in_.upload(zeros, sizeof(zeros));
  std::vector<unsloth_parameter> table;
  for (const Parameter &parameter : own) {
    unsloth_parameter entry = {};
    entry.weight = parameter.weight;
    entry.gradient = parameter.gradient;
    table.push_back(entry);
  }
  const unsloth_parameter_group still = {};
  auto params = unsloth::make<unsloth_optimizer_params>();
  params.kind = UNSLOTH_OPTIMIZER_SGD;
  params.parameters = table.data();
  params.num_parameters = table.size();
  params.groups = &still;
  params.num_groups = 1;
  size_t size = 0;
  check(unsloth_optimizer_state_size(context.get(), &params, &size));
  state_ = Buffer(context, size);
  params.state = state_.data();
  params.state_size = state_.bytes();
  check(measure_.create(context.get(), params, context.stream()));
}

Parameter SharedNorm::stand_in() const {
  float *const weight = static_cast<float *>(stand_in_.data());
  return {unsloth::tensor(weight, UNSLOTH_DTYPE_F32, {1}),
          unsloth::tensor(weight + 1, UNSLOTH_DTYPE_F32, {1}), false};
}

void SharedNorm::exchange() {
  check(unsloth_optimizer_step(measure_, context_->stream()));
  auto status = unsloth::make<unsloth_optimizer_status>();
  check(unsloth_optimizer_read(measure_, context_->stream(), &status));
  const auto rank = static_cast<size_t>(group_.rank);
  norms_.upload(&status.gradient_norm, sizeof(float), rank * sizeof(float));
  std::vector<float> norms(static_cast<size_t>(group_.size));
  auto params = unsloth::make<unsloth_all_gather_params>();
  params.comm = group_.comm;
  params.out = unsloth::tensor(norms_.data(), UNSLOTH_DTYPE_F32, {norms.size()});
  check(unsloth_all_gather_forward(context_->get(), &params, context_->stream()));
  norms_.download(norms.data(), norms.size() * sizeof(float));
  double sum = 0;
  for (size_t other = 0; other < norms.size(); ++other) {
    if (other != rank) sum += static_cast<double>(norms[other]) * norms[other];
  }
  const auto norm = static_cast<float>(std::sqrt(sum));
  stand_in_.upload(&norm, sizeof(norm), sizeof(float));
}

}  // namespace llm
