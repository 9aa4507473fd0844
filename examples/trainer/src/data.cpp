#include "data.h"

#include <unsloth.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>

#include "chat.h"
#include "error.h"
#include "json_reader.h"
#include "random.h"

namespace llm {
namespace {

// A batch has room for one sequence in so many tokens: shorter ones would need longer tables.
constexpr uint64_t kTokensPerSequence = 8;

std::string read_file(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(path + ": cannot open");
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) throw Error(path + ": cannot read");
  return text;
}

bool ends_with(const std::string &text, const std::string &end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// What is wrong with a line; who reads the file adds which.
class LineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Reader {
 public:
  Reader(const Gguf &gguf, const Tokenizer &tokenizer) : gguf_(gguf), tokenizer_(tokenizer) {}

  Example text(const std::string &text) const {
    Example example;
    add(text, {true, false}, true, &example);
    end(&example);
    return example;
  }

  // Throws LineError.
  Example line(const std::string &line) {
    Json json;
    try {
      json = parse_json(line);
    } catch (const JsonError &error) {
      throw LineError(error.what());
    }
    if (json.kind != Json::Kind::kObject) throw LineError("the line is not an object");
    if (json.find("text") != nullptr) return text(string(json, "text"));
    if (json.find("messages") != nullptr) return messages(*json.find("messages"));
    if (json.find("prompt") == nullptr) {
      throw LineError("the object has none of the keys text, messages and prompt");
    }
    Example example;
    add(string(json, "prompt"), {true, false}, false, &example);
    add(string(json, "completion"), {false, false}, true, &example);
    end(&example);
    return example;
  }

 private:
  static const std::string &string(const Json &json, const char *key) {
    const Json *value = json.find(key);
    if (value == nullptr) throw LineError("the key '" + std::string(key) + "' is missing");
    if (value->kind != Json::Kind::kString) {
      throw LineError("'" + std::string(key) + "' is not a string");
    }
    return value->string;
  }

  void add(const std::string &text, Tokenizer::EncodeOptions options, bool learned,
           Example *example) const {
    const std::vector<TokenId> tokens = tokenizer_.encode(text, options);
    example->tokens.insert(example->tokens.end(), tokens.begin(), tokens.end());
    example->learned.resize(example->tokens.size(), learned ? 1 : 0);
  }

  void end(Example *example) const {
    const std::optional<TokenId> token = tokenizer_.end_of_text();
    if (!token || (!example->tokens.empty() && example->tokens.back() == *token)) return;
    example->tokens.push_back(*token);
    example->learned.push_back(1);
  }

  Example messages(const Json &messages) {
    if (messages.kind != Json::Kind::kArray || messages.items.empty()) {
      throw LineError("'messages' is not an array of messages");
    }
    if (!chat_) chat_ = ChatTemplate::recognize(gguf_.get_string("tokenizer.chat_template"));
    Example example;
    bool answered = false;
    // What comes before a turn of the model is encoded in one piece, and the turn by itself, as
    // both are when the model is asked.
    std::string context;
    for (size_t i = 0; i < messages.items.size(); ++i) {
      const std::string &role = string(messages.items[i], "role");
      const std::string &content = string(messages.items[i], "content");
      if (role != "system" && role != "user" && role != "assistant") {
        throw LineError("the role '" + role + "' is not system, user or assistant");
      }
      if (i == 0 && role != "system") context += chat_->opening();
      if (role != "assistant") {
        context += chat_->message(role, content);
        continue;
      }
      answered = true;
      add(context + chat_->open_reply(), {example.tokens.empty(), true}, false, &example);
      context.clear();
      // The turn ends with a token that is learned; a line feed may follow, which nobody samples.
      const size_t start = example.tokens.size();
      add(chat_->reply(content), {false, true}, true, &example);
      const auto begin = example.tokens.begin() + static_cast<int64_t>(start);
      const auto ending = std::find_if(begin, example.tokens.end(), [&](TokenId token) {
        return tokenizer_.ends_generation(token);
      });
      for (auto at = ending; at < example.tokens.end(); ++at) {
        example.learned[static_cast<size_t>(at - example.tokens.begin())] = at == ending ? 1 : 0;
      }
    }
    if (!answered) throw LineError("no message is the assistant's: there is nothing to learn");
    return example;
  }

  const Gguf &gguf_;
  const Tokenizer &tokenizer_;
  std::optional<ChatTemplate> chat_;
};

// Cuts to `max_tokens` inputs and their targets; false where nothing to learn is left.
bool cut(uint64_t max_tokens, Example *example, Dataset *dataset) {
  if (example->tokens.size() > max_tokens + 1) {
    example->tokens.resize(max_tokens + 1);
    example->learned.resize(max_tokens + 1);
    ++dataset->cut;
  }
  const auto &learned = example->learned;
  if (!learned.empty() && std::find(learned.begin() + 1, learned.end(), 1) != learned.end()) {
    return true;
  }
  ++dataset->dropped;
  return false;
}

}  // namespace

Dataset read_dataset(const std::string &path, const Gguf &gguf, const Tokenizer &tokenizer,
                     uint64_t max_tokens) {
  Dataset dataset;
  Reader reader(gguf, tokenizer);
  const std::string text = read_file(path);
  if (ends_with(path, ".txt")) {
    const Example whole = reader.text(text);
    // Each piece begins with the last token of the one before it, so that every token is learned.
    for (size_t start = 0; start + 1 < whole.tokens.size(); start += max_tokens) {
      const size_t end = std::min<size_t>(start + max_tokens + 1, whole.tokens.size());
      Example piece;
      piece.tokens.assign(whole.tokens.begin() + static_cast<int64_t>(start),
                          whole.tokens.begin() + static_cast<int64_t>(end));
      piece.learned.assign(piece.tokens.size(), 1);
      dataset.examples.push_back(std::move(piece));
    }
  } else if (ends_with(path, ".jsonl")) {
    size_t number = 0;
    for (size_t start = 0; start < text.size();) {
      const size_t end = std::min(text.find('\n', start), text.size());
      const std::string line = text.substr(start, end - start);
      start = end + 1;
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        Example example = reader.line(line);
        if (cut(max_tokens, &example, &dataset)) dataset.examples.push_back(std::move(example));
      } catch (const LineError &error) {
        throw Error(path + ":" + std::to_string(number) + ": " + error.what());
      }
    }
  } else {
    throw Error(path + ": the name ends neither in .txt nor in .jsonl");
  }
  if (dataset.examples.empty()) throw Error(path + ": there is nothing to learn");
  return dataset;
}

Batches::Batches(std::vector<Example> examples, uint64_t tokens, uint64_t seed)
    : examples_(std::move(examples)),
      tokens_(tokens),
      // One more for what the others leave.
      max_sequences_(tokens / kTokensPerSequence + 2),
      seed_(seed) {
  pack(0);
}

// Each example goes where it leaves the least room, or to a new batch.
void Batches::pack(uint64_t epoch) {
  std::vector<uint32_t> order(examples_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  Random random(seed_, epoch);
  random.shuffle(&order);

  packed_.clear();
  std::multimap<uint64_t, size_t> with_room;  // batches by the tokens that they have left
  for (const uint32_t example : order) {
    const uint64_t length = examples_[example].tokens.size() - 1;
    auto found = with_room.lower_bound(length);
    size_t batch = packed_.size();
    uint64_t room = tokens_;
    if (found != with_room.end()) {
      room = found->first;
      batch = found->second;
      with_room.erase(found);
    } else {
      packed_.emplace_back();
    }
    packed_[batch].push_back(example);
    if (packed_[batch].size() + 1 < max_sequences_) with_room.emplace(room - length, batch);
  }
  random.shuffle(&packed_);  // the last to be opened is the least full
  epoch_ = epoch;
}

uint64_t Batches::count(uint64_t epochs) {
  uint64_t total = 0;
  for (uint64_t epoch = 0; epoch < epochs; ++epoch) {
    pack(epoch);
    total += packed_.size();
  }
  pack(0);
  first_ = 0;
  return total;
}

Batch Batches::get(uint64_t number) {
  if (number < first_) {
    pack(0);
    first_ = 0;
  }
  while (number >= first_ + packed_.size()) {
    first_ += packed_.size();
    pack(epoch_ + 1);
  }

  Batch batch;
  batch.cu_seqlens.push_back(0);
  const auto end_sequence = [&batch] {
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
  };
  for (const uint32_t index : packed_[number - first_]) {
    const Example &example = examples_[index];
    for (size_t i = 0; i + 1 < example.tokens.size(); ++i) {
      const bool learned = example.learned[i + 1] != 0;
      batch.ids.push_back(example.tokens[i]);
      batch.targets.push_back(learned ? example.tokens[i + 1] : kIgnored);
      batch.positions.push_back(static_cast<int32_t>(i));
      batch.learned += learned ? 1 : 0;
    }
    end_sequence();
  }
  batch.used = batch.ids.size();
  for (int32_t position = 0; batch.ids.size() < tokens_; ++position) {
    batch.ids.push_back(0);
    batch.targets.push_back(kIgnored);
    batch.positions.push_back(position);
  }
  while (batch.cu_seqlens.size() <= max_sequences_) end_sequence();
  return batch;
}

Batch part_of(const Batch &batch, int32_t rank, int32_t size) {
  const size_t tokens = batch.ids.size() / static_cast<size_t>(size);
  const auto begin = static_cast<std::ptrdiff_t>(tokens) * rank;
  const auto slice = [&](const std::vector<int32_t> &values) {
    const auto first = values.begin() + begin;
    return std::vector<int32_t>(first, first + static_cast<std::ptrdiff_t>(tokens));
  };
  Batch part;
  part.learned = batch.learned;
  part.used = batch.used;
  part.ids = slice(batch.ids);
  part.targets = slice(batch.targets);
  part.positions.resize(tokens);
  part.cu_seqlens.resize(batch.cu_seqlens.size());
  part.cu_seqlens_k.resize(batch.cu_seqlens.size());
  auto params = unsloth::make<unsloth_context_parallel_packed_params>();
  params.causal = 1;
  params.rank = rank;
  params.size = size;
  params.tokens = static_cast<int64_t>(tokens);
  params.batch = static_cast<int64_t>(batch.cu_seqlens.size()) - 1;
  params.cu_seqlens = batch.cu_seqlens.data();
  unsloth::check(unsloth_context_parallel_packed_get(
      &params, part.cu_seqlens.data(), part.cu_seqlens_k.data(), part.positions.data()));
  return part;
}

}  // namespace llm
