#include "generate.h"

#include <algorithm>
#include <chrono>
#include <limits>

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
  TextStream stream(tokenizer);
  const auto emit = [&](const std::string &text) {
    result.text += text;
    if (on_text && !text.empty()) on_text(text);
  };
  const auto choose = [&] {
    if (sampler->is_greedy()) return session->likeliest();
    // The matrix may have more rows than there are tokens, for the sake of its shape.
    const auto drawn = [&] {
      const float *logits = session->logits(session->rows().size() - 1, 1);
      return sampler->sample(logits, tokenizer.vocab_size());
    };
    return session->share(session->has_last() ? drawn() : 0);
  };
  const auto sample = [&](Stopwatch *watch) {
    watch->start();
    const TokenId token = choose();
    watch->stop();
    return token;
  };
  size_t decoded = 0;
  while (result.tokens.size() < options.max_tokens) {
    const bool first = result.tokens.empty();
    if (!first) {
      decode_watch.start();
      session->forward(&result.tokens.back(), 1);
      decode_watch.stop();
      ++decoded;
    }
    const TokenId token = sample(first ? &prefill_watch : &decode_watch);
    result.ended = tokenizer.ends_generation(token);
    if (result.ended) break;
    result.tokens.push_back(token);
    emit(stream.push(token));
  }
  emit(stream.finish());
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
