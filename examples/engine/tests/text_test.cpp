// JSON, chat templates and the command line.
#include <limits>
#include <string>
#include <vector>

#include "args.h"
#include "chat.h"
#include "check.h"
#include "error.h"
#include "json.h"

namespace engine {
namespace {

void json() {
  JsonWriter json;
  json.begin_object();
  json.key("tokens").value(std::vector<int32_t>{1, -2});
  json.key("none").value(std::vector<int32_t>{});
  json.key("text").value("\"\\/\b\n\r\t\x1f\x7f \xC3\xA9\xF0\x9F\x8D\x95\xFF");
  json.key("rate").value(0.1);
  json.key("count").value(std::numeric_limits<uint64_t>::max());
  json.key("bad").value(std::numeric_limits<double>::quiet_NaN());
  json.key("flag").value(true);
  json.key("inner").begin_object().key("a").value(1).end_object();
  json.key("empty").begin_object().end_object();
  json.end_object();
  CHECK_EQUAL(json.text(), std::string("{\n"
                                       "  \"tokens\": [1, -2],\n"
                                       "  \"none\": [],\n"
                                       "  \"text\": \"\\\"\\\\/\\u0008\\n\\r\\t\\u001f\\u007f "
                                       "\xC3\xA9\xF0\x9F\x8D\x95\xEF\xBF\xBD\",\n"
                                       "  \"rate\": 0.1,\n"
                                       "  \"count\": 18446744073709551615,\n"
                                       "  \"bad\": null,\n"
                                       "  \"flag\": true,\n"
                                       "  \"inner\": {\n"
                                       "    \"a\": 1\n"
                                       "  },\n"
                                       "  \"empty\": {}\n"
                                       "}"));
}

void chat_ml() {
  const ChatTemplate with_system = ChatTemplate::recognize(
      "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
      "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}"
      "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
      "{% endfor %}");
  CHECK_EQUAL(with_system.opening(), std::string("<|im_start|>system\nYou are kind<|im_end|>\n"));
  CHECK_EQUAL(with_system.message("user", " a\n"),
              std::string("<|im_start|>user\n a\n<|im_end|>\n"));
  CHECK_EQUAL(with_system.open_reply(), std::string("<|im_start|>assistant\n"));
  CHECK_EQUAL(with_system.close_reply(), std::string("<|im_end|>\n"));

  // A template may write \n, and mention system turns that insert the caller's own message.
  const ChatTemplate escaped = ChatTemplate::recognize(
      "{{- '<|im_start|>system\\n' }}{{- messages[0].content + '<|im_end|>\\n' }}"
      "{{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}");
  CHECK_EQUAL(escaped.opening(), std::string("<|im_start|>system\nYou are Q.<|im_end|>\n"));

  const ChatTemplate plain = ChatTemplate::recognize(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}");
  CHECK_EQUAL(plain.opening(), std::string());
}

void llama3() {
  const ChatTemplate chat = ChatTemplate::recognize(
      "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
      "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% endfor %}");
  CHECK_EQUAL(chat.opening(), std::string());
  CHECK_EQUAL(chat.message("user", " hi \n"),
              std::string("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"));
  CHECK_EQUAL(chat.open_reply(), std::string("<|start_header_id|>assistant<|end_header_id|>\n\n"));
  CHECK_THROWS(Error, ChatTemplate::recognize("[INST] {{ message }} [/INST]"), "of no family");
  CHECK_THROWS(Error, ChatTemplate::recognize(""), "of no family");
}

Args parse(std::vector<const char *> flags) {
  flags.insert(flags.begin(), "engine");
  return parse_args(static_cast<int>(flags.size()), flags.data());
}

void good_flags() {
  const Args args = parse({"--model",
                           "m",
                           "--device=cuda",
                           "--prompt",
                           "--a=b",
                           "--tokens",
                           "5",
                           "--temperature",
                           "0.5",
                           "--top-k",
                           "0",
                           "--top-p=1",
                           "--seed",
                           "18446744073709551615",
                           "--chat",
                           "--json",
                           "--threads",
                           "2",
                           "--weights",
                           "bf16"});
  CHECK_EQUAL(args.model, std::string("m"));
  CHECK(args.device == Args::Device::kCuda);
  CHECK_EQUAL(args.prompt.value_or(""), std::string("--a=b"));
  CHECK_EQUAL(args.tokens, 5U);
  CHECK_EQUAL(args.sampling.temperature, 0.5);
  CHECK_EQUAL(args.sampling.top_k, 0U);
  CHECK_EQUAL(args.sampling.top_p, 1.0);
  CHECK_EQUAL(args.sampling.seed, std::numeric_limits<uint64_t>::max());
  CHECK(args.chat);
  CHECK(args.json);
  CHECK_EQUAL(args.threads, 2U);
  CHECK(args.weights == Args::DType::kBf16);
  CHECK(args.dtype == Args::DType::kBf16);
  CHECK(args.graph);
  CHECK(!parse({"--model", "m", "--chat", "--no-graph"}).graph);
  CHECK(!args.warm_up);
  CHECK(parse({"--model", "m", "--prompt", "p", "--warm-up"}).warm_up);
  CHECK(parse({"--model", "m", "--chat", "--warm-up"}).warm_up);
  CHECK(parse({"--help", "--chat"}).help);
  CHECK(parse({"--model", "m", "--chat"}).chat);
  CHECK_EQUAL(parse({"--model", "m", "--prompt", ""}).prompt.value_or("x"), std::string());
}

// What is not said about dtypes follows from the device and from what is said.
void dtypes() {
  using DType = Args::DType;
  struct Case {
    std::vector<const char *> flags;
    DType dtype;
    DType weights;
  };
  const Case cases[] = {
      {{}, DType::kF32, DType::kBf16},
      {{"--device", "cuda"}, DType::kBf16, DType::kBf16},
      {{"--dtype", "f16"}, DType::kF16, DType::kF16},
      {{"--device", "cuda", "--dtype", "f32"}, DType::kF32, DType::kBf16},
      {{"--dtype", "bf16", "--weights", "f32"}, DType::kBf16, DType::kF32},
  };
  for (const Case &each : cases) {
    std::vector<const char *> flags = {"--model", "m", "--chat"};
    flags.insert(flags.end(), each.flags.begin(), each.flags.end());
    const Args args = parse(flags);
    CHECK(args.dtype == each.dtype);
    CHECK(args.weights == each.weights);
  }
}

void bad_flags() {
  struct Case {
    std::vector<const char *> flags;
    const char *message;
  };
  const Case cases[] = {
      {{}, "--model is needed"},
      {{"--model"}, "--model needs a value"},
      {{"--model", "m"}, "one of --prompt, --chat and --perplexity"},
      {{"--colour", "red"}, "unknown flag '--colour'"},
      {{"prompt"}, "unknown flag 'prompt'"},
      {{"--chat=yes"}, "--chat takes no value"},
      {{"--device", "tpu"}, "--device takes cpu or cuda, not 'tpu'"},
      {{"--dtype", "int8"}, "--dtype takes bf16 or f16 or f32, not 'int8'"},
      {{"--no-graph=1"}, "--no-graph takes no value"},
      {{"--weights", "q4"}, "--weights takes bf16 or f16 or f32, not 'q4'"},
      {{"--tokens", "-1"}, "--tokens takes an integer from 0 to 4294967295, not '-1'"},
      {{"--tokens", "4294967296"}, "not '4294967296'"},
      {{"--tokens", "5x"}, "not '5x'"},
      {{"--tokens", ""}, "not ''"},
      {{"--threads", "0"}, "--threads takes an integer from 1"},
      {{"--temperature", "-0.1"}, "--temperature takes a number of 0 or more"},
      {{"--temperature", "nan"}, "not 'nan'"},
      {{"--temperature", "inf"}, "not 'inf'"},
      {{"--top-p", "0"}, "--top-p takes a number above 0 and up to 1"},
      {{"--top-p", "1.1"}, "not '1.1'"},
      {{"--seed", "1e3"}, "not '1e3'"},
      {{"--model", "m", "--perplexity", "f", "--prompt", "p"}, "--perplexity scores a file"},
      {{"--model", "m", "--perplexity", "f", "--chat"}, "--perplexity scores a file"},
      {{"--model", "m", "--chat", "--json"}, "--json reports on one prompt or file"},
      {{"--model", "m", "--perplexity", "f", "--warm-up"},
       "--warm-up goes with --prompt or --chat"},
  };
  for (const Case &bad : cases) CHECK_THROWS(UsageError, parse(bad.flags), bad.message);
}

}  // namespace
}  // namespace engine

int main() {
  engine::json();
  engine::chat_ml();
  engine::llama3();
  engine::good_flags();
  engine::dtypes();
  engine::bad_flags();
  return check::result();
}
