#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "args.h"
#include "chat.h"
#include "config.h"
#include "device.h"
#include "error.h"
#include "generate.h"
#include "json.h"
#include "model.h"
#include "progress.h"
#include "ranks.h"
#include "session.h"
#include "tokenizer.h"

namespace llm {
namespace {

constexpr uint64_t kChatCapacity = 4096;  // tokens of a conversation, where the model takes as many

std::string read_file(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + ": cannot open");
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) throw Error(path + ": cannot read");
  return text;
}

void print(const std::string &text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

void print_json(const Result &result, const Session &session) {
  const unsloth_inference_memory estimate = session.estimate_memory();
  const unsloth_memory_stats stats = session.context().memory_stats();
  JsonWriter json;
  json.begin_object();
  json.key("prompt_tokens").value(result.prompt_tokens);
  json.key("tokens").value(result.continuations[0].tokens);
  json.key("text").value(result.continuations[0].text);
  if (result.continuations.size() > 1) {
    json.key("sequences").begin_array();
    for (const Continuation &each : result.continuations) {
      json.begin_object();
      json.key("text").value(each.text);
      json.key("tokens").value(each.tokens);
      json.end_object();
    }
    json.end_array();
  }
  json.key("mean_nll").value(result.mean_nll);
  json.key("prefill_tokens_per_second").value(result.prefill_tokens_per_second);
  json.key("decode_tokens_per_second").value(result.decode_tokens_per_second);
  json.key("graph").value(session.uses_graph());
  json.key("memory").begin_object();
  json.key("estimated").begin_object();
  json.key("weights").value(estimate.weights);
  json.key("kv_cache").value(estimate.kv_cache);
  json.key("activations").value(estimate.activations);
  json.key("workspace").value(estimate.workspace);
  json.key("logits").value(estimate.logits);
  json.key("total").value(estimate.total);
  json.end_object();
  json.key("real").begin_object();
  json.key("in_use").value(stats.in_use);
  json.key("peak").value(stats.peak);
  json.key("device").value(session.context().device_memory_in_use());
  json.end_object();
  json.end_object();
  json.end_object();
  print(json.text() + "\n");
}

void print_continuations(const Result &result) {
  for (size_t i = 0; i < result.continuations.size(); ++i) {
    print("--- " + std::to_string(i + 1) + "\n" + result.continuations[i].text + "\n");
  }
}

void print_summary(const Result &result, const Session &session) {
  constexpr double kMiB = 1 << 20;
  size_t generated = 0;
  for (const Continuation &each : result.continuations) generated += each.tokens.size();
  std::fprintf(stderr, "prompt: %zu tokens, %.1f tokens/s; generated: %zu tokens, %.1f tokens/s; ",
               result.prompt_tokens.size(), result.prefill_tokens_per_second, generated,
               result.decode_tokens_per_second);
  std::fprintf(stderr, "memory: %.1f MiB, %.1f MiB estimated\n",
               static_cast<double>(session.context().memory_stats().peak) / kMiB,
               static_cast<double>(session.estimate_memory().total) / kMiB);
  if (session.uses_graph()) std::fprintf(stderr, "decoded by replaying a CUDA graph\n");
}

std::vector<TokenId> encode_prompt(const Args &args, const Gguf &gguf, const Tokenizer &tokenizer) {
  std::string text = *args.prompt;
  if (args.chat) {
    const ChatTemplate chat = ChatTemplate::recognize(gguf.get_string("tokenizer.chat_template"));
    text = chat.opening() + chat.message("user", text) + chat.open_reply();
  }
  return tokenizer.encode(text, {true, true});
}

// All ranks run the same tokens, of which the first prints.
void run_prompt(const Args &args, const Model &model, const Gguf &gguf,
                const Tokenizer &tokenizer) {
  const bool prints = model.ranks().is_first();
  const std::vector<TokenId> prompt = encode_prompt(args, gguf, tokenizer);
  const uint64_t context_length = model.config().context_length;
  if (prompt.size() >= context_length) {
    throw Error("the prompt has " + std::to_string(prompt.size()) +
                " tokens, and the model's context is " + std::to_string(context_length));
  }
  const auto max_tokens =
      static_cast<uint32_t>(std::min<uint64_t>(args.tokens, context_length - prompt.size()));
  const Room room = {prompt.size() + max_tokens, args.sequences, prompt.size()};
  Session session(model, room, args.graph, args.cache);
  Sampler sampler(args.sampling);
  const bool streams = prints && !args.json && args.sequences == 1;
  if (streams && !args.chat) print(*args.prompt);
  const Result result =
      generate(&session, tokenizer, &sampler, prompt,
               {max_tokens, args.sequences, args.json, args.warm_up}, streams ? print : nullptr);
  if (!prints) return;
  if (args.json) {
    print_json(result, session);
    return;
  }
  if (streams) {
    print("\n");
  } else {
    print_continuations(result);
  }
  print_summary(result, session);
}

// A conversation, line by line. The cache keeps it: each turn runs only what is new.
void run_chat(const Args &args, const Model &model, const Gguf &gguf, const Tokenizer &tokenizer) {
  const ChatTemplate chat = ChatTemplate::recognize(gguf.get_string("tokenizer.chat_template"));
  const uint64_t capacity = std::min(kChatCapacity, model.config().context_length);
  Session session(model, {capacity}, args.graph, args.cache);
  if (args.warm_up) session.warm_up();
  Sampler sampler(args.sampling);
  std::vector<TokenId> not_run;  // the end of a reply that was cut short
  for (std::string line; print("> "), std::getline(std::cin, line);) {
    const bool first = session.length() == 0;
    const std::string turn = (first ? chat.opening() : chat.close_reply()) +
                             chat.message("user", line) + chat.open_reply();
    std::vector<TokenId> prompt = not_run;
    const std::vector<TokenId> tokens = tokenizer.encode(turn, {first, true});
    prompt.insert(prompt.end(), tokens.begin(), tokens.end());
    const uint64_t room = session.capacity() - session.length();
    if (prompt.size() >= room) {
      print("The conversation has filled its " + std::to_string(session.capacity()) + " tokens.");
      break;
    }
    const auto max_tokens =
        static_cast<uint32_t>(std::min<uint64_t>(args.tokens, room - prompt.size()));
    const Result result =
        generate(&session, tokenizer, &sampler, prompt, {max_tokens, 1, false, false}, print);
    print("\n");
    not_run.clear();
    const Continuation &reply = result.continuations[0];
    if (!reply.ended && !reply.tokens.empty()) not_run.push_back(reply.tokens.back());
  }
  print("\n");
}

void run_perplexity(const Args &args, const Model &model, const Tokenizer &tokenizer) {
  const std::vector<TokenId> tokens = tokenizer.encode(read_file(*args.perplexity), {true, false});
  const uint64_t capacity = std::min<uint64_t>(tokens.size(), model.config().context_length);
  Session session(model, {capacity}, false, args.cache);
  Result result;
  if (!model.ranks().is_first()) {
    score(&session, tokens, nullptr);
    return;
  }
  {
    ProgressBar bar("scoring", tokens.size());
    result = score(&session, tokens, [&](uint64_t done) { bar.advance(done); });
  }
  if (args.json) {
    print_json(result, session);
  } else {
    std::printf("mean NLL %.4f, perplexity %.3f\n", result.mean_nll, std::exp(result.mean_nll));
    print_summary(result, session);
  }
}

void run(const Args &args) {
  const Gguf gguf = Gguf::open(args.model);
  const ModelConfig config = read_config(gguf);
  const Tokenizer tokenizer(gguf);
  const bool cuda = args.device == Args::Device::kCuda;
  const unsloth_backend backend = cuda ? UNSLOTH_BACKEND_CUDA : UNSLOTH_BACKEND_CPU;
  const std::vector<int32_t> sizes = {args.tensor_parallel, args.pipeline_parallel,
                                      args.context_parallel};
  std::optional<Process> process;
  if (args.rank) process = Process{*args.rank, args.meet};
  run_ranks(backend, args.threads, sizes, process,
            [&](const Context &context, const std::vector<Group> &groups) {
              const Ranks ranks = {groups[0], groups[1], groups[2], args.rank.has_value()};
              const Model model = Model::load(context, gguf, config, args, ranks);
              if (args.perplexity) {
                run_perplexity(args, model, tokenizer);
              } else if (args.prompt) {
                run_prompt(args, model, gguf, tokenizer);
              } else {
                run_chat(args, model, gguf, tokenizer);
              }
            });
}

}  // namespace
}  // namespace llm

int main(int argc, char **argv) {
  constexpr int kFailure = 1;
  constexpr int kUsage = 2;
  try {
    const llm::Args args = llm::parse_args(argc, argv);
    if (args.help) {
      std::fputs(llm::usage().c_str(), stdout);
      return 0;
    }
    llm::run(args);
    return 0;
  } catch (const llm::UsageError &error) {
    std::fprintf(stderr, "engine: %s\n\n%s", error.what(), llm::usage().c_str());
    return kUsage;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return kFailure;
  }
}
