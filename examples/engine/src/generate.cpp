#include "generate.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "error.h"

namespace llm {
namespace {

class Stopwatch {
 public:
  void start() { started_ = Clock::now(); }
  void stop() { total_ += Clock::now() - started_; }
  double per_second(size_t count) const {
    const double seconds = std::chrono::duration<double>(total_).count();
    return count > 0 && seconds > 0 ? static_cast<double>(count) / seconds : 0.0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point started_;
  Clock::duration total_{};
};

// Of the rows that this rank has the logits of.
struct Score {
  double sum = 0;
  uint64_t count = 0;
};

// Over all ranks.
double mean(const Score &own, Session *session) {
  const double sum = session->total(own.sum);
  const double count = session->total(static_cast<double>(own.count));
  return count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
}

// Runs the tokens through the model chunk by chunk; leaves the logits of the last one in the
// session. Scoring needs the logits of every token, which generation does not: it is left out of
// the time.
void prefill(Session *session, const TokenId *tokens, size_t count, Stopwatch *watch, Score *score,
             const std::function<void(uint64_t)> &on_progress) {
  for (size_t start = 0; start < count;) {
    const size_t size = std::min<size_t>(count - start, session->max_chunk());
    watch->start();
    session->forward(tokens + start, size);
    session->synchronize();
    watch->stop();
    // A row predicts the token behind its own; what the last one predicts is not known here.
    const bool ends = start + size == count && session->has_last();
    const size_t scored = score == nullptr ? 0 : session->rows().size() - (ends ? 1 : 0);
    for (size_t row = 0; row < scored;) {
      const size_t rows = std::min<size_t>(scored - row, session->max_logit_rows());
      const float *logits = session->logits(row, rows);
      for (size_t i = 0; i < rows; ++i) {
        score->sum -= log_probability(logits + i * session->vocab_size(), session->vocab_size(),
                                      tokens[start + session->rows()[row + i] + 1]);
      }
      row += rows;
      score->count += rows;
    }
    start += size;
    if (on_progress) on_progress(size);
  }
}

// Continuations of a prompt, which grow by a token at a time, until each has ended.
class Continuations {
 public:
  using OnText = std::function<void(const std::string &)>;

  // `on_text` takes the first one's text.
  Continuations(const Tokenizer &tokenizer, size_t count, const OnText &on_text)
      : tokenizer_(&tokenizer),
        streams_(count, TextStream(tokenizer)),
        all_(count),
        last_(count),
        on_text_(on_text) {}

  size_t num_growing() const {
    return static_cast<size_t>(
        std::count_if(all_.begin(), all_.end(), [](const auto &each) { return !each.ended; }));
  }
  // What a step runs of each. What one that has ended goes on with is read by nobody.
  const std::vector<TokenId> &last() const { return last_; }

  // Of the rows of logits, one for each or one for all, a token for each.
  std::vector<TokenId> draw(Sampler *sampler, const float *logits, size_t rows, size_t row_size) {
    std::vector<TokenId> drawn = last_;
    for (size_t i = 0; i < all_.size(); ++i) {
      const float *const row = logits + (rows == 1 ? 0 : i) * row_size;
      // The matrix may have more rows than there are tokens, for the sake of its shape.
      if (!all_[i].ended) drawn[i] = sampler->sample(row, tokenizer_->vocab_size());
    }
    return drawn;
  }

  void push(const std::vector<TokenId> &tokens) {
    last_ = tokens;
    for (size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].ended) continue;
      all_[i].ended = tokenizer_->ends_generation(tokens[i]);
      if (all_[i].ended) continue;
      all_[i].tokens.push_back(tokens[i]);
      emit(i, streams_[i].push(tokens[i]));
    }
  }

  std::vector<Continuation> finish() {
    for (size_t i = 0; i < all_.size(); ++i) emit(i, streams_[i].finish());
    return std::move(all_);
  }

 private:
  void emit(size_t i, const std::string &text) {
    all_[i].text += text;
    if (i == 0 && on_text_ && !text.empty()) on_text_(text);
  }

  const Tokenizer *tokenizer_;
  std::vector<TextStream> streams_;
  std::vector<Continuation> all_;
  std::vector<TokenId> last_;
  const OnText &on_text_;
};

}  // namespace

Result generate(Session *session, const Tokenizer &tokenizer, Sampler *sampler,
                const std::vector<TokenId> &prompt, const GenerateOptions &options,
                const std::function<void(const std::string &)> &on_text) {
  if (prompt.empty()) throw Error("the prompt has no token: there is nothing to continue");
  Result result;
  result.prompt_tokens = prompt;

  if (options.warm_up) {
    Stopwatch unread;
    prefill(session, prompt.data(), prompt.size(), &unread, nullptr, nullptr);
    session->reset();
  }
  Stopwatch prefill_watch;
  Score prompt_score;
  prefill(session, prompt.data(), prompt.size(), &prefill_watch,
          options.score_prompt ? &prompt_score : nullptr, nullptr);
  result.mean_nll = mean(prompt_score, session);

  Stopwatch decode_watch;
  Continuations continuations(tokenizer, options.sequences, on_text);
  // Behind the prompt there is one token for all.
  const auto choose = [&] {
    const size_t rows = session->num_sequences();
    if (sampler->is_greedy()) {
      const std::vector<TokenId> &likeliest = session->likeliest();
      return rows == 1 ? std::vector<TokenId>(options.sequences, likeliest[0]) : likeliest;
    }
    std::vector<TokenId> drawn(options.sequences);
    if (session->has_last()) {
      const float *logits = session->logits(session->rows().size() - rows, rows);
      drawn = continuations.draw(sampler, logits, rows, session->vocab_size());
    }
    return session->share(drawn);
  };
  size_t decoded = 0;
  for (uint32_t made = 0; made < options.max_tokens && continuations.num_growing() > 0; ++made) {
    Stopwatch *const watch = made == 0 ? &prefill_watch : &decode_watch;
    watch->start();
    if (made > 0) {
      session->fork();
      session->forward(continuations.last().data(), continuations.last().size());
      decoded += continuations.num_growing();
    }
    const std::vector<TokenId> tokens = choose();
    watch->stop();
    continuations.push(tokens);
  }
  result.continuations = continuations.finish();
  result.prefill_tokens_per_second = prefill_watch.per_second(prompt.size());
  result.decode_tokens_per_second = decode_watch.per_second(decoded);
  return result;
}

Result score(Session *session, const std::vector<TokenId> &tokens,
             const std::function<void(uint64_t)> &on_progress) {
  if (tokens.size() < 2)
    throw Error("the text has fewer than two tokens: there is nothing to score");
  Result result;
  result.prompt_tokens = tokens;
  Stopwatch watch;
  Score total;
  for (size_t start = 0; start < tokens.size();) {
    const size_t size = std::min<size_t>(tokens.size() - start, session->capacity());
    session->reset();
    prefill(session, tokens.data() + start, size, &watch, &total, on_progress);
    start += size;
  }
  watch.start();
  result.mean_nll = mean(total, session);  // which ranks behind this one may still work for
  watch.stop();
  result.prefill_tokens_per_second = watch.per_second(tokens.size());
  return result;
}

}  // namespace llm
