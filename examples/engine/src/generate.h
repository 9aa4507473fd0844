// What the engine does with a model: continue a prompt, or score a text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sampler.h"
#include "session.h"
#include "tokenizer.h"

namespace llm {

// How a prompt goes on.
struct Continuation {
  std::vector<TokenId> tokens;  // generated; the token that ended the generation is not among them
  std::string text;             // of the generated tokens
  // Whether the model ended the text. If not, the last token was never run through the model.
  bool ended = false;
};

struct Result {
  std::vector<TokenId> prompt_tokens;
  std::vector<Continuation> continuations = std::vector<Continuation>(1);
  double mean_nll = 0;  // negative log-likelihood per prompt token; NaN where nothing is scored
  double prefill_tokens_per_second = 0;
  double decode_tokens_per_second = 0;  // of all continuations together
};

struct GenerateOptions {
  uint32_t max_tokens = 0;
  uint32_t sequences = 1;  // as many as the session has room for
  bool score_prompt = false;
  // In an empty session: runs the prompt once and forgets it, so that no figure has what loads at
  // its first use.
  bool warm_up = false;
};

// Appends the prompt to the session and continues it, once or several times; hands out the first
// text as it comes.
Result generate(Session *session, const Tokenizer &tokenizer, Sampler *sampler,
                const std::vector<TokenId> &prompt, const GenerateOptions &options,
                const std::function<void(const std::string &)> &on_text);

// The mean negative log-likelihood of `tokens`, in windows as long as the session has room for. The
// first token of each window has nothing to be predicted from and is not scored.
Result score(Session *session, const std::vector<TokenId> &tokens,
             const std::function<void(uint64_t)> &on_progress);

}  // namespace llm
