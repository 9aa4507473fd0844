// JSON, examples and their masks, packing. The argument is data/libunsloth.jsonl.
#include "data.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "gguf_builder.h"
#include "json_reader.h"

namespace llm {
namespace {

void json() {
  const Json value = parse_json(
      " {\"a\": [1, -2.5e1, true, null], \"b\": {\"c\": \"x\\n\\u00e9\\ud83c\\udf55\"}} ");
  CHECK_EQUAL(value.find("a")->items.size(), 4U);
  CHECK_EQUAL(value.find("a")->items[1].number, -25.0);
  CHECK(value.find("a")->items[2].boolean);
  CHECK(value.find("a")->items[3].kind == Json::Kind::kNull);
  CHECK_EQUAL(value.find("b")->find("c")->string, std::string("x\n\xC3\xA9\xF0\x9F\x8D\x95"));
  CHECK(value.find("d") == nullptr);

  struct Case {
    std::string text;
    const char *message;
  };
  const Case cases[] = {
      {"", "a value is missing, at character 1"},
      {"{} x", "nothing may follow the value, at character 4"},
      {"{\"a\" 1}", "':' is missing, at character 6"},
      {"{a: 1}", "a key in quotes is missing"},
      {"{\"a\": 1, \"a\": 2}", "the key 'a' appears twice"},
      {"[1, ]", "a value is missing, at character 5"},
      {"[1", "']' is missing"},
      {"\"a", "a string has no end"},
      {"\"a\\", "a string has no end"},
      {"\"a\nb\"", "a control character"},
      {"\"\\q\"", "the escape '\\q' is unknown"},
      {"\"\\u12g4\"", "four hexadecimal digits"},
      {"\"\\ud800\"", "half of a surrogate pair"},
      {"\"\\ud800\\u0041\"", "half of a surrogate pair"},
      {"01", "nothing may follow"},
      {"1.", "a digit is missing"},
      {"-", "a digit is missing"},
      {"tru", "a value is missing"},
      {std::string(100, '['), "nested too deep"},
  };
  for (const Case &each : cases) CHECK_THROWS(JsonError, parse_json(each.text), each.message);
}

// A byte-level vocabulary: ids 0 to 255 are the bytes, then the turns of ChatML.
struct TestModel {
  std::string bytes;
  Gguf gguf;
  Tokenizer tokenizer;

  TestModel() : bytes(build()), gguf(parse(bytes)), tokenizer(gguf) {}

  static std::string build() {
    GgufBuilder builder;
    std::vector<std::string> tokens;
    std::vector<int32_t> kinds;
    tokens = {"<unk>", "<|im_start|>", "<|im_end|>"};
    kinds = {2, 3, 3};
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      tokens.emplace_back(name);
      kinds.push_back(6);
    }
    builder.set("tokenizer.ggml.model", std::string("llama"));
    builder.set("tokenizer.ggml.tokens", tokens);
    builder.set("tokenizer.ggml.token_type", kinds);
    builder.set("tokenizer.ggml.scores", std::vector<float>(tokens.size(), 0.0F));
    builder.set("tokenizer.ggml.bos_token_id", 1U);
    builder.set("tokenizer.ggml.eos_token_id", 2U);
    builder.set("tokenizer.ggml.unknown_token_id", 0U);
    builder.set("tokenizer.ggml.add_bos_token", false);
    builder.set("tokenizer.ggml.add_space_prefix", false);
    builder.set("tokenizer.chat_template",
                std::string("{{'<|im_start|>' + message['role'] + '<|im_end|>'}}"));
    return builder.build();
  }
  static Gguf parse(const std::string &file) {
    return Gguf::parse(reinterpret_cast<const std::byte *>(file.data()), file.size(), "test.gguf");
  }
};

class TemporaryFile {
 public:
  TemporaryFile(const std::string &name, const std::string &text) : path("/tmp/data_test_" + name) {
    std::ofstream(path, std::ios::binary) << text;
  }
  ~TemporaryFile() { std::remove(path.c_str()); }
  const std::string path;
};

Dataset read(const TestModel &model, const std::string &name, const std::string &text,
             uint64_t max_tokens = 1000) {
  const TemporaryFile file(name, text);
  return read_dataset(file.path, model.gguf, model.tokenizer, max_tokens);
}

// What is learned, as text; control tokens are '^' (the start of a turn) and '$' (its end).
std::string learned(const Example &example) {
  std::string text;
  for (size_t i = 0; i < example.tokens.size(); ++i) {
    if (example.learned[i] == 0) continue;
    const TokenId token = example.tokens[i];
    text += token == 1 ? '^' : token == 2 ? '$' : static_cast<char>(token - 3);
  }
  return text;
}

void examples() {
  const TestModel model;
  const Dataset dataset = read(model, "a.jsonl",
                               "{\"text\": \"ab\"}\n"
                               "\n"
                               "{\"prompt\": \"q\", \"completion\": \"ans\"}\n"
                               "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"},"
                               " {\"role\": \"assistant\", \"content\": \"yes\"},"
                               " {\"role\": \"user\", \"content\": \"more\"},"
                               " {\"role\": \"assistant\", \"content\": \"no\"}]}");
  CHECK_EQUAL(dataset.examples.size(), 3U);
  CHECK_EQUAL(learned(dataset.examples[0]), std::string("ab$"));
  CHECK_EQUAL(learned(dataset.examples[1]), std::string("ans$"));
  CHECK_EQUAL(dataset.examples[1].tokens.size(), 5U);
  // The answers and what ends them, not the line feed after it, nor the questions.
  CHECK_EQUAL(learned(dataset.examples[2]), std::string("yes$no$"));
  CHECK_EQUAL(dataset.cut, 0U);

  // A text is cut into pieces, each of which begins with the last token of the one before.
  const Dataset text = read(model, "b.txt", "abcdefg", 3);
  CHECK_EQUAL(text.examples.size(), 3U);
  for (const Example &piece : text.examples) CHECK(piece.tokens.size() <= 4);
  CHECK_EQUAL(text.examples[0].tokens.back(), text.examples[1].tokens.front());

  const Dataset cut = read(model, "c.jsonl",
                           "{\"prompt\": \"123456\", \"completion\": \"a\"}\n"
                           "{\"prompt\": \"1\", \"completion\": \"abcdef\"}\n",
                           4);
  CHECK_EQUAL(cut.cut, 2U);
  CHECK_EQUAL(cut.dropped, 1U);
  CHECK_EQUAL(learned(cut.examples.at(0)), std::string("abcd"));
}

void bad_files() {
  const TestModel model;
  struct Case {
    const char *name;
    const char *text;
    const char *message;
  };
  const Case cases[] = {
      {"a.jsonl", "{\"text\": \"a\"}\n\n{\"text\": }\n",
       "a.jsonl:3: a value is missing, at character 10"},
      {"a.jsonl", "[1]\n", ":1: the line is not an object"},
      {"a.jsonl", "{\"x\": 1}\n", "none of the keys text, messages and prompt"},
      {"a.jsonl", "{\"text\": 1}\n", "'text' is not a string"},
      {"a.jsonl", "{\"prompt\": \"a\"}\n", "the key 'completion' is missing"},
      {"a.jsonl", "{\"messages\": []}\n", "'messages' is not an array of messages"},
      {"a.jsonl", "{\"messages\": [{\"role\": \"user\"}]}\n", "the key 'content' is missing"},
      {"a.jsonl", "{\"messages\": [{\"role\": \"tool\", \"content\": \"\"}]}\n", "the role 'tool'"},
      {"a.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n",
       "nothing to learn"},
      {"a.jsonl", "\n", "there is nothing to learn"},
      {"a.txt", "", "there is nothing to learn"},
      {"a.csv", "a", "ends neither in .txt nor in .jsonl"},
  };
  for (const Case &each : cases) {
    CHECK_THROWS(Error, read(model, each.name, each.text), each.message);
  }
  CHECK_THROWS(Error, read_dataset("/nowhere.jsonl", model.gguf, model.tokenizer, 8),
               "cannot open");
}

// What `make finetune` teaches: a question and an answer a line, and none of them cut.
void shipped_file(const std::string &path) {
  const TestModel model;
  const Dataset dataset = read_dataset(path, model.gguf, model.tokenizer, 512);
  CHECK(dataset.examples.size() >= 40);
  CHECK_EQUAL(dataset.cut, 0U);
  for (const Example &example : dataset.examples) {
    const std::string answer = learned(example);
    CHECK(answer.size() > 10);
    CHECK_EQUAL(answer.find('$'), answer.size() - 1);
  }
}

std::vector<Example> counted(size_t count) {
  std::vector<Example> examples;
  for (size_t i = 0; i < count; ++i) {
    Example example;
    const size_t length = 2 + i * 7 % 13;
    for (size_t j = 0; j < length; ++j) {
      example.tokens.push_back(static_cast<TokenId>(100 * i + j));
      example.learned.push_back(j >= length / 2 ? 1 : 0);
    }
    examples.push_back(example);
  }
  return examples;
}

void packing() {
  constexpr uint64_t kTokens = 32;
  constexpr size_t kExamples = 25;
  Batches batches(counted(kExamples), kTokens, 7);
  const uint64_t per_epoch = batches.count(1);
  std::vector<TokenId> firsts;
  uint64_t used = 0;
  for (uint64_t number = 0; number < per_epoch; ++number) {
    const Batch batch = batches.get(number);
    CHECK_EQUAL(batch.ids.size(), kTokens);
    CHECK_EQUAL(batch.targets.size(), kTokens);
    CHECK_EQUAL(batch.cu_seqlens.size(), batches.max_sequences() + 1);
    CHECK_EQUAL(batch.cu_seqlens.front(), 0);
    CHECK_EQUAL(batch.cu_seqlens.back(), static_cast<int32_t>(kTokens));
    uint64_t valid = 0;
    for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
      const int32_t start = batch.cu_seqlens[s];
      const int32_t end = batch.cu_seqlens[s + 1];
      CHECK(start <= end);
      if (static_cast<uint64_t>(start) < batch.used) firsts.push_back(batch.ids[start]);
      for (int32_t i = start; i < end; ++i) {
        CHECK_EQUAL(batch.positions[i], i - start);
        if (batch.targets[i] == kIgnored) continue;
        ++valid;
        CHECK_EQUAL(batch.targets[i], batch.ids[i] + 1);  // the token after it, of the same example
        CHECK(static_cast<uint64_t>(i) < batch.used);
      }
    }
    CHECK_EQUAL(valid, batch.learned);
    used += batch.used;
  }
  // Every example once, and little room left.
  std::sort(firsts.begin(), firsts.end());
  CHECK_EQUAL(firsts.size(), kExamples);
  for (size_t i = 0; i < firsts.size(); ++i) CHECK_EQUAL(firsts[i], static_cast<TokenId>(100 * i));
  CHECK(used * 10 >= (per_epoch - 1) * kTokens * 9);

  // The same again, also out of order; another epoch and another seed are otherwise.
  Batches again(counted(kExamples), kTokens, 7);
  const Batch later = again.get(per_epoch + 1);
  CHECK_EQUAL(again.get(0).ids, batches.get(0).ids);
  CHECK_EQUAL(batches.get(per_epoch + 1).ids, later.ids);
  CHECK(batches.get(0).ids != batches.get(per_epoch).ids);
  CHECK(Batches(counted(kExamples), kTokens, 8).get(0).ids != batches.get(0).ids);
  CHECK(batches.count(3) >= 3 * per_epoch - 3);
}

// What ranks have one behind the other is the whole, and sequences end where they did.
void parts() {
  constexpr uint64_t kTokens = 32;
  Batches batches(counted(25), kTokens, 7);
  const Batch whole = batches.get(1);
  for (const int32_t size : {2, 4}) {
    Batch all;
    for (int32_t rank = 0; rank < size; ++rank) {
      const Batch part = part_of(whole, rank, size);
      const auto tokens = static_cast<int32_t>(kTokens) / size;
      CHECK_EQUAL(part.learned, whole.learned);
      CHECK_EQUAL(part.cu_seqlens.size(), whole.cu_seqlens.size());
      CHECK_EQUAL(part.cu_seqlens_k.size(), whole.cu_seqlens.size());
      for (size_t s = 0; s < whole.cu_seqlens.size(); ++s) {
        const int32_t begin = whole.cu_seqlens[s] - rank * tokens;
        CHECK_EQUAL(part.cu_seqlens[s], std::min(std::max(begin, 0), tokens));
      }
      all.ids.insert(all.ids.end(), part.ids.begin(), part.ids.end());
      all.targets.insert(all.targets.end(), part.targets.begin(), part.targets.end());
      all.positions.insert(all.positions.end(), part.positions.begin(), part.positions.end());
    }
    CHECK_EQUAL(all.ids, whole.ids);
    CHECK_EQUAL(all.targets, whole.targets);
    CHECK_EQUAL(all.positions, whole.positions);
  }
}

}  // namespace
}  // namespace llm

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  llm::shipped_file(argv[1]);
  llm::json();
  llm::examples();
  llm::bad_files();
  llm::packing();
  llm::parts();
  return check::result();
}
