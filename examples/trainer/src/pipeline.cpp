#include "pipeline.h"

#include "error.h"
#include "weights.h"

namespace llm {

Pipeline::Pipeline(const Context &context, const Group &group, uint64_t micro_batches)
    : context_(&context), group_(group) {
  auto params = unsloth::make<unsloth_pipeline_schedule_params>();
  params.kind = UNSLOTH_PIPELINE_ONE_F_ONE_B;
  params.stages = group.size;
  params.rank = group.rank;
  params.micro_batches = static_cast<int64_t>(micro_batches);
  auto summary = unsloth::make<unsloth_pipeline_summary>();
  check(unsloth_pipeline_schedule(&params, &summary, nullptr, 0));
  actions_.resize(static_cast<size_t>(summary.num_actions));
  num_slots_ = static_cast<uint64_t>(summary.num_slots);
  check(unsloth_pipeline_schedule(&params, &summary, actions_.data(), actions_.size()));
}

void Pipeline::transfer(const unsloth_pipeline_action &action, unsloth_tensor in,
                        unsloth_tensor out, unsloth_tensor gradient) const {
  switch (action.step) {
    case UNSLOTH_PIPELINE_STEP_RECEIVE_ACTIVATION:
      return receive(*context_, group_, in, action.peer);
    case UNSLOTH_PIPELINE_STEP_SEND_ACTIVATION:
      return send(*context_, group_, out, action.peer);
    case UNSLOTH_PIPELINE_STEP_RECEIVE_GRADIENT:
      return receive(*context_, group_, gradient, action.peer);
    case UNSLOTH_PIPELINE_STEP_SEND_GRADIENT:
      return send(*context_, group_, gradient, action.peer);
    default:
      throw Error("a schedule has step " + std::to_string(action.step));
  }
}

void Pipeline::reserve(unsloth_tensor gradient) {
  if (is_first()) received_ = Buffer(*context_, byte_count(gradient));
}

void Pipeline::add_to_first(unsloth_tensor gradient) const {
  if (is_last()) send(*context_, group_, gradient, 0);
  if (!is_first()) return;
  unsloth_tensor received = gradient;
  received.data = received_.data();
  receive(*context_, group_, received, group_.size - 1);
  // The library adds where it normalises the sum, which nobody needs here.
  auto params = unsloth::make<unsloth_rms_norm_params>();
  params.epsilon = 1;
  params.x = received;
  params.residual = gradient;
  check(unsloth_rms_norm_forward(context_->get(), &params, context_->stream()));
}

void Pipeline::share_first(unsloth_tensor weight) const {
  if (is_first()) send(*context_, group_, weight, group_.size - 1);
  if (is_last()) receive(*context_, group_, weight, 0);
}

void Pipeline::share_last(unsloth_tensor values) const {
  broadcast(*context_, group_, values, group_.size - 1);
}

}  // namespace llm
