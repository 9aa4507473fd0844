#include "session.h"

#include <algorithm>
#include <numeric>

#include "error.h"

// One step of a Llama-family model:
//
//   hidden = embedding[tokens]
//   for each layer:
//     hidden += attention_block(rms_norm(hidden))
//     hidden += mlp(rms_norm(hidden))
//   logits = rms_norm(hidden) * output^T
//   likeliest token = argmax(logits)
//
// In a pipeline a rank has some of the layers: hidden states come from the rank before it, and go
// on to the one behind it, which works on them while this one begins the next step. The last rank
// has the logits, and tells the others which token was chosen.

namespace llm {
namespace {

constexpr uint64_t kMaxLogitRows = 32;  // a row is as long as the vocabulary
constexpr uint64_t kPageSize = 16;

// Of keys and values, hidden states being of this dtype.
unsloth_dtype dtype_of(Args::Cache cache, unsloth_dtype hidden) {
  switch (cache) {
    case Args::Cache::kF32:
      return UNSLOTH_DTYPE_F32;
    case Args::Cache::kF16:
      return UNSLOTH_DTYPE_F16;
    case Args::Cache::kBf16:
      return UNSLOTH_DTYPE_BF16;
    case Args::Cache::kF8:
      return UNSLOTH_DTYPE_F8E4M3;
    case Args::Cache::kDType:
      break;
  }
  return hidden;
}

// Pages with `shared` tokens alone are there once, and the one that the first text ends in is
// copied by each.
uint64_t num_pages(const Room &room, uint64_t pages_of_one) {
  const uint64_t own = std::max<uint64_t>(pages_of_one - room.shared / kPageSize, 1);
  return pages_of_one + (room.sequences - 1) * own;
}

// `kept` tokens of a text are in the cache.
unsloth_kv_cache_params cache_params(const ModelConfig &config, unsloth_dtype dtype,
                                     const Room &room, uint64_t kept, uint64_t max_rows) {
  const uint64_t pages_of_one = (kept + kPageSize - 1) / kPageSize;
  unsloth_kv_cache_params params = UNSLOTH_KV_CACHE_PARAMS_INIT;
  params.dtype = dtype;
  params.num_layers = static_cast<int64_t>(config.num_layers);
  params.num_kv_heads = static_cast<int64_t>(config.num_kv_heads);
  params.head_dim = static_cast<int64_t>(config.head_dim);
  params.page_size = static_cast<int64_t>(kPageSize);
  params.num_pages = static_cast<int64_t>(num_pages(room, pages_of_one));
  params.max_batch_size = static_cast<int64_t>(room.sequences);
  params.max_batch_tokens = static_cast<int64_t>(max_rows);
  params.max_sequence_length = static_cast<int64_t>(pages_of_one * kPageSize);
  return params;
}

}  // namespace

uint64_t Session::chunk_limit(const Context &context) {
  // A longer chunk reads the weights less often, and keeps a GPU busy.
  constexpr uint64_t kCpu = 1024, kGpu = 2048;
  return context.backend() == UNSLOTH_BACKEND_CPU ? kCpu : kGpu;
}

Session::Session(const Model &model, const Room &room, bool use_graph, Args::Cache cache)
    : model_(&model),
      room_(room),
      divided_(model.ranks().context.size > 1
                   ? std::make_unique<ContextParallel>(model, room.capacity)
                   : nullptr),
      max_chunk_(divided_ ? room.capacity : std::min(chunk_limit(context()), room.capacity)),
      max_rows_(divided_ ? divided_->max_rows() : std::max(max_chunk_, room.sequences)),
      max_logit_rows_(std::max(std::min(kMaxLogitRows, room.capacity), room.sequences)),
      dtype_(model.hidden_dtype()),
      cache_params_(cache_params(model.config(), dtype_of(cache, dtype_), room,
                                 divided_ ? divided_->max_kept() : room.capacity, max_rows_)),
      cache_(context().get(), cache_params_) {
  const uint64_t hidden_size = model.config().hidden_size;
  const uint64_t hidden_bytes = max_rows_ * hidden_size * element_size(dtype_);
  ids_ = Buffer(context(), max_rows_ * sizeof(TokenId));
  hidden_ = Buffer(context(), hidden_bytes);
  normalized_ = Buffer(context(), hidden_bytes);
  if (tensor_ranks() > 1) {
    sums_of_few_ =
        GroupMemory(model.ranks().tensor, 2 * kFewRows * hidden_size * element_size(dtype_));
  }
  if (model.ranks().has_output()) {
    of_ranks_.resize(max_logit_rows_ * tensor_ranks() * model.vocabulary().most);
    logits_ = Buffer(context(), of_ranks_.size() * sizeof(float));
    // Where a rank has fewer columns, what it sends is something.
    logits_.upload(of_ranks_.data(), logits_.bytes());
    if (tensor_ranks() > 1 && room.sequences > 1) {
      const uint64_t row = tensor_ranks() * model.vocabulary().most;
      whole_rows_ = Buffer(context(), room.sequences * row * sizeof(float));
    }
    host_logits_.resize(max_logit_rows_ * vocab_size());
  }

  sums_ = Buffer(context(), static_cast<size_t>(sharing().size) * sizeof(double));
  sequences_.resize(1);
  check(unsloth_kv_cache_sequence_create(cache_.get(), &sequences_[0]));
  // The largest step, for its workspace: later steps will rarely need more, so the estimate holds.
  extend(max_chunk_);
  reserve_workspace(num_rows_);
  if (context().backend() != UNSLOTH_BACKEND_CPU) {
    // It is run once, on whatever tokens: libraries of the driver load kernels at their first use.
    queue_layers(num_rows_);
    synchronize();
  }
  reset();
  if (use_graph && can_replay() && context().backend() == UNSLOTH_BACKEND_CUDA) {
    driver_ = std::make_unique<CudaDriver>();
  }
  if (driver_ || room.sequences > 1) prepare_decoding();
}

// Workspace and the graph of a step of one token of each text.
void Session::prepare_decoding() {
  fork();
  extend(num_sequences());
  reserve_workspace(num_rows_);
  if (num_sequences() > 1 && context().backend() != UNSLOTH_BACKEND_CPU) {
    // Kernels of so many rows may be others than a chunk's: they are not loaded within a capture.
    queue_step();
    synchronize();
  }
  if (driver_) capture_step();
  reset();
}

void Session::warm_up() const {
  const LayerWeights &layer = model_->layers()[0];
  // Products of other dtypes are the library's own, which are loaded with the context.
  if (context().backend() == UNSLOTH_BACKEND_CPU || model_->weight_dtype() != dtype_) return;
  std::vector<unsloth_product_shape> shapes;
  const auto add = [&](uint64_t rows, const unsloth_tensor &weight, int64_t copies) {
    unsloth_product_shape shape = {};
    shape.dtype = dtype_;
    shape.num_rows = static_cast<int64_t>(rows);
    shape.in_features = weight.shape[1];
    shape.out_features = copies * weight.shape[0];
    shapes.push_back(shape);
  };
  // Numbers of rows within an eighth of their power of two share what is loaded.
  for (uint64_t power = 16; power < max_chunk_; power *= 2) {
    for (uint64_t rows = power; rows < 2 * power; rows += power / 8) {
      add(rows, layer.qkv, 1);
      add(rows, layer.attention_output, 1);
      add(rows, layer.gate, 1);
      add(rows, layer.gate, 2);  // with up, which lies behind it
      add(rows, layer.down, 1);
    }
  }
  // Many tokens are run in parts of this size.
  for (const unsloth_tensor *weight : {&layer.qkv, &layer.attention_output, &layer.down}) {
    add(max_chunk_, *weight, 1);
  }
  add(max_chunk_, layer.gate, 2);
  check(unsloth_context_warm_up(context().get(), shapes.data(), shapes.size()));
}

void Session::fork() {
  while (sequences_.size() < room_.sequences) {
    int64_t sequence = 0;
    check(unsloth_kv_cache_sequence_fork(cache_.get(), sequences_[0], &sequence));
    sequences_.push_back(sequence);
  }
}

void Session::reset() {
  for (; sequences_.size() > 1; sequences_.pop_back()) {
    check(unsloth_kv_cache_sequence_free(cache_.get(), sequences_.back()));
  }
  check(unsloth_kv_cache_sequence_truncate(cache_.get(), sequences_[0], 0));
  length_ = 0;
  last_count_ = 0;
  rows_.clear();
}

// The current step is of one token of each text. Tables and lengths stay where they are on the
// device, and `extend` keeps them current: one graph serves every later step.
void Session::capture_step() {
  reserve_workspace(num_rows_);
  graph_ = std::make_unique<CudaGraph>(*driver_, context().stream(), [&] { queue_step(); });
}

void Session::queue_step() {
  queue_layers(num_sequences());
  queue_logits(0, num_sequences());
  queue_likeliest(num_sequences());
}

void Session::forward(const TokenId *tokens, size_t count) {
  const size_t most = num_sequences() == 1 ? max_chunk_ : num_sequences();
  if (count < num_sequences() || count > most ||
      count / num_sequences() > room_.capacity - length_) {
    throw Error("a step of " + std::to_string(count) + " tokens does not fit the session");
  }
  if (divided_ && length_ > 0 && count > 1) {
    throw Error("a text that ranks divide goes on by one token at a time");
  }
  extend(count);
  upload_ids(tokens, count);
  if (count == room_.sequences && count == num_sequences() && driver_) {
    if (!graph_) capture_step();
    graph_->launch(context().stream());
    logits_are_queued_ = true;
    return;
  }
  reserve_workspace(num_rows_);
  queue_layers(num_rows_);
}

void Session::queue_embedding(size_t count) {
  unsloth_embedding_params embedding = UNSLOTH_EMBEDDING_PARAMS_INIT;
  embedding.table = model_->embedding();
  embedding.ids = unsloth::tensor(ids_.data(), UNSLOTH_DTYPE_I32, {count});
  embedding.out = hidden_rows(0, count);
  if (tensor_ranks() > 1) {
    embedding.parallel = model_->ranks().tensor.parallel();
    embedding.vocab_begin = static_cast<int64_t>(model_->vocabulary().begin);
    embedding.vocab_size = static_cast<int64_t>(vocab_size());
  }
  check(unsloth_embedding_forward(context().get(), &embedding, context().stream()));
}

void Session::queue_logits(size_t row, size_t rows) {
  const unsloth_linear_params params = logits_params(row, rows);
  check(unsloth_linear_forward(context().get(), &params, context().stream()));
  if (tensor_ranks() == 1) return;
  unsloth_all_gather_params gather = UNSLOTH_ALL_GATHER_PARAMS_INIT;
  gather.comm = model_->ranks().tensor.comm;
  gather.out = unsloth::tensor(logits_.data(), UNSLOTH_DTYPE_F32,
                               {tensor_ranks() * rows, model_->vocabulary().most});
  check(unsloth_all_gather_forward(context().get(), &gather, context().stream()));
}

// Of the logits of so many rows that are there.
void Session::queue_likeliest(size_t rows) {
  unsloth_argmax_params params = UNSLOTH_ARGMAX_PARAMS_INIT;
  params.x = whole_rows_of_logits(rows);
  params.out = unsloth::tensor(ids_.data(), UNSLOTH_DTYPE_I32, {rows});
  check(unsloth_argmax_forward(context().get(), &params, context().stream()));
}

// One rank's rows are in one piece, and so is a single one, whose parts lie one behind the other.
// Of several rows each rank's are together: they are copied to where the parts of a row are.
unsloth_tensor Session::whole_rows_of_logits(size_t rows) {
  const uint64_t most = model_->vocabulary().most;
  const uint64_t row = tensor_ranks() * most;
  const void *data = logits_.data();
  if (tensor_ranks() > 1 && rows > 1) {
    unsloth_cast_params copy = UNSLOTH_CAST_PARAMS_INIT;
    copy.x = unsloth::tensor(logits_.data(), UNSLOTH_DTYPE_F32, {rows, tensor_ranks(), most},
                             {most, rows * most, uint64_t{1}});
    copy.out = unsloth::tensor(whole_rows_.data(), UNSLOTH_DTYPE_F32, {rows, tensor_ranks(), most});
    check(unsloth_cast_forward(context().get(), &copy, context().stream()));
    data = whole_rows_.data();
  }
  return unsloth::tensor(data, UNSLOTH_DTYPE_F32, {rows, model_->config().num_tokens},
                         {row, uint64_t{1}});
}

const float *Session::logits(size_t row, size_t rows) {
  if (!logits_are_queued_ || rows != num_sequences()) queue_logits(row, rows);
  const uint64_t most = model_->vocabulary().most;
  logits_.download(of_ranks_.data(), rows * tensor_ranks() * most * sizeof(float));
  for (uint64_t rank = 0; rank < tensor_ranks(); ++rank) {
    const uint64_t begin = std::min(rank * most, vocab_size());
    const uint64_t count = std::min(most, vocab_size() - begin);
    for (uint64_t i = 0; i < rows; ++i) {
      const float *from = of_ranks_.data() + (rank * rows + i) * most;
      std::copy_n(from, count, host_logits_.data() + i * vocab_size() + begin);
    }
  }
  return host_logits_.data();
}

const std::vector<TokenId> &Session::likeliest() {
  if (!logits_are_queued_ && has_last()) {
    queue_logits(rows_.size() - num_sequences(), num_sequences());
    queue_likeliest(num_sequences());
  }
  return share_ids(num_sequences());
}

std::vector<TokenId> Session::share(const std::vector<TokenId> &tokens) {
  if (sharing().size == 1) return tokens;
  ids_.upload(tokens.data(), tokens.size() * sizeof(TokenId));
  return share_ids(tokens.size());
}

// The rank that has the last token's logits writes the likeliest tokens to the first places of
// ids_, where the next step reads them, and sends them to the others.
const std::vector<TokenId> &Session::share_ids(size_t count) {
  if (sharing().size > 1) {
    const unsloth_tensor first = unsloth::tensor(ids_.data(), UNSLOTH_DTYPE_I32, {count});
    broadcast(context(), sharing(), first, speaker());
  }
  likeliest_.resize(count);
  ids_.download(likeliest_.data(), count * sizeof(TokenId));
  return likeliest_;
}

double Session::total(double own) {
  const Group &group = sharing();
  if (group.size == 1) return own;
  // Bits, since there is no type of 64-bit floats.
  const auto size = static_cast<uint64_t>(group.size);
  sums_.upload(&own, sizeof own, static_cast<size_t>(group.rank) * sizeof own);
  unsloth_all_gather_params gather = UNSLOTH_ALL_GATHER_PARAMS_INIT;
  gather.comm = group.comm;
  gather.out = unsloth::tensor(sums_.data(), UNSLOTH_DTYPE_I64, {size});
  check(unsloth_all_gather_forward(context().get(), &gather, context().stream()));
  std::vector<double> sums(size);
  sums_.download(sums.data(), size * sizeof own);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// Graphs of several GPUs that one process launches may wait for each other. In a pipeline and where
// ranks have some of the tokens, what a rank does in a step depends on which step it is.
bool Session::can_replay() const {
  const Ranks &ranks = model_->ranks();
  const bool has_one_gpu = ranks.tensor.size == 1 || ranks.are_processes;
  return has_one_gpu && ranks.pipeline.size * ranks.context.size == 1;
}

const Group &Session::sharing() const {
  const Ranks &ranks = model_->ranks();
  return divided_ ? ranks.context : ranks.pipeline;
}

int32_t Session::speaker() const {
  return divided_ ? divided_->speaker() : model_->ranks().pipeline.size - 1;
}

// Makes room for new tokens in the cache, as many of each text, and their step the current one.
void Session::extend(size_t count) {
  const size_t each = count / num_sequences();
  std::vector<int64_t> num_tokens(num_sequences(), static_cast<int64_t>(each));
  num_rows_ = count;
  if (divided_) {
    divided_->begin(length_, count);
    num_rows_ = divided_->num_rows();
    num_tokens[0] = static_cast<int64_t>(divided_->num_kept());
    // Behind a prompt all have the hidden states, and one makes logits of them.
    const bool makes_logits = length_ == 0 || divided_->speaker() == sharing().rank;
    rows_ = makes_logits ? divided_->tokens() : std::vector<uint32_t>();
  } else {
    rows_.resize(model_->ranks().has_output() ? count : 0);
    std::iota(rows_.begin(), rows_.end(), 0U);
  }
  check(unsloth_kv_cache_extend(cache_.get(), sequences_.data(), num_tokens.data(), num_sequences(),
                                context().stream()));
  length_ += each;
  last_count_ = count;
  logits_are_queued_ = false;
}

void Session::reserve_workspace(size_t count) {
  // On the CPU what a step of one rank needs depends on its rows and texts alone.
  const bool of_rows = context().backend() == UNSLOTH_BACKEND_CPU && !divided_;
  const bool same = count == reserved_rows_ && num_sequences() == reserved_sequences_;
  if (of_rows && same) return;
  reserved_rows_ = count;
  reserved_sequences_ = num_sequences();
  size_t size = 0;
  if (model_->ranks().has_output()) {
    const unsloth_linear_params logits = logits_params(0, max_logit_rows_);
    check(unsloth_linear_workspace_size(context().get(), &logits, &size));
  }
  // Layers have the same shapes, and the same types unless these are the file's.
  const bool as_in_file = model_->weight_dtype() == 0;
  for (size_t i = 0; i < (as_in_file ? model_->layers().size() : 1); ++i) {
    size_t attention_size = 0;
    if (divided_) {
      attention_size = divided_->workspace_size(i, call(count));
    } else {
      const unsloth_attention_block_params attention = attention_params(i, count);
      check(unsloth_attention_block_workspace_size(context().get(), &attention, &attention_size));
    }
    size_t mlp_size = 0;
    const auto rows = std::min<size_t>(count, chunk_limit(context()));
    const unsloth_mlp_params mlp = mlp_params(i, 0, rows);
    check(unsloth_mlp_workspace_size(context().get(), &mlp, &mlp_size));
    size = std::max({size, attention_size, mlp_size});
  }
  if (size <= workspace_.bytes()) return;
  graph_.reset();  // it holds the old one's address
  synchronize();   // queued work may use it
  workspace_ = Buffer();
  workspace_ = Buffer(context(), size);
}

void Session::upload_ids(const TokenId *tokens, size_t count) {
  const bool there = num_rows_ == likeliest_.size() &&
                     std::equal(likeliest_.begin(), likeliest_.end(), tokens, tokens + count);
  if (divided_ && !there) {
    std::vector<TokenId> own(num_rows_);  // padding is some token
    const std::vector<uint32_t> &which = divided_->tokens();
    for (size_t row = 0; row < which.size(); ++row) own[row] = tokens[which[row]];
    ids_.upload(own.data(), own.size() * sizeof(TokenId));
  } else if (!there) {
    ids_.upload(tokens, count * sizeof(TokenId));
  }
  likeliest_.clear();
}

// Logits of rows of the normalised hidden states, in f32 whatever these are: this rank's columns,
// at its place.
unsloth_linear_params Session::logits_params(size_t row, size_t rows) const {
  unsloth_linear_params params = UNSLOTH_LINEAR_PARAMS_INIT;
  params.x = normalized_rows(row, rows);
  params.weight = model_->output();
  const VocabularyRows &own = model_->vocabulary();
  const uint64_t first = static_cast<uint64_t>(model_->ranks().tensor.rank) * rows * own.most;
  params.out = unsloth::tensor(static_cast<float *>(logits_.data()) + first, UNSLOTH_DTYPE_F32,
                               {rows, own.rows}, {own.most, uint64_t{1}});
  params.workspace = workspace_.data();
  params.workspace_size = workspace_.bytes();
  return params;
}

}  // namespace llm
