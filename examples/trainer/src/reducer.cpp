#include "reducer.h"

namespace llm {

Reducer::Reducer(const Context &context, const Group &group)
    : context_(&context), group_(group), stream_(context.get()), ready_(context.get()) {}

void Reducer::follow() {
  check(unsloth_event_record(ready_.get(), context_->stream()));
  check(unsloth_stream_wait_event(context_->get(), stream_.get(), ready_.get()));
}

void Reducer::scatter(const Weights &weights, const std::vector<Piece> &pieces) {
  follow();
  for (const Piece &piece : pieces) {
    auto params = unsloth::make<unsloth_reduce_scatter_params>();
    params.comm = group_.comm;
    params.x = piece.gradients;
    params.out = weights.share(piece.gradients);
    check(unsloth_reduce_scatter_forward(context_->get(), &params, stream_.get()));
  }
}

void Reducer::share(const Weights &weights, const std::vector<Piece> &pieces) {
  for (const Piece &piece : pieces) {
    auto params = unsloth::make<unsloth_all_gather_params>();
    params.comm = group_.comm;
    params.x = weights.share(piece.weights);
    params.out = piece.weights;
    check(unsloth_all_gather_forward(context_->get(), &params, context_->stream()));
  }
}

void Reducer::add(const std::vector<unsloth_tensor> &gradients) {
  follow();
  unsloth_tensor first = {};
  char *end = nullptr;
  for (const unsloth_tensor &gradient : gradients) {
    if (gradient.rank == 0) continue;
    if (first.rank != 0 && gradient.dtype != first.dtype) {
      queue(first, end);
      first = {};
    }
    if (first.rank == 0) first = gradient;
    end = static_cast<char *>(gradient.data) + byte_count(gradient);
  }
  if (first.rank != 0) queue(first, end);
}

void Reducer::queue(const unsloth_tensor &first, const char *end) {
  const auto bytes = static_cast<uint64_t>(end - static_cast<const char *>(first.data));
  auto params = unsloth::make<unsloth_all_reduce_params>();
  params.comm = group_.comm;
  params.x = unsloth::tensor(first.data, first.dtype, {bytes / element_size(first.dtype)});
  check(unsloth_all_reduce_forward(context_->get(), &params, stream_.get()));
}

void Reducer::join() {
  check(unsloth_event_record(ready_.get(), stream_.get()));
  check(unsloth_stream_wait_event(context_->get(), context_->stream(), ready_.get()));
}

std::vector<float> Reducer::gather(const Buffer &mine, uint64_t count) {
  std::vector<float> all(count * static_cast<uint64_t>(group_.size));
  const size_t bytes = all.size() * sizeof(float);
  if (gathered_.bytes() < bytes) gathered_ = Buffer(*context_, bytes);
  auto params = unsloth::make<unsloth_all_gather_params>();
  params.comm = group_.comm;
  params.x = unsloth::tensor(mine.data(), UNSLOTH_DTYPE_F32, {count});
  params.out = unsloth::tensor(gathered_.data(), UNSLOTH_DTYPE_F32, {all.size()});
  check(unsloth_all_gather_forward(context_->get(), &params, context_->stream()));
  gathered_.download(all.data(), bytes);
  return all;
}

}  // namespace llm
