// JSON and chat templates.
#include <limits>
#include <string>
#include <vector>

#include "chat.h"
#include "check.h"
#include "error.h"
#include "json.h"

namespace llm {
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

  JsonWriter line(JsonWriter::Style::kOneLine);
  line.begin_object().key("a").value(1);
  line.key("b").begin_object().key("c").value("d").end_object().end_object();
  CHECK_EQUAL(line.text(), std::string("{\"a\": 1, \"b\": {\"c\": \"d\"}}"));
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
  CHECK_EQUAL(with_system.open_reply() + with_system.reply(" a\n"),
              with_system.message("assistant", " a\n"));

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
  CHECK_EQUAL(chat.open_reply() + chat.reply(" hi \n"), chat.message("assistant", " hi \n"));
  CHECK_THROWS(Error, ChatTemplate::recognize("[INST] {{ message }} [/INST]"), "of no family");
  CHECK_THROWS(Error, ChatTemplate::recognize(""), "of no family");
}

}  // namespace
}  // namespace llm

int main() {
  llm::json();
  llm::chat_ml();
  llm::llama3();
  return check::result();
}
