// Chat templates. A GGUF file stores its template as a Jinja program; the family that it belongs to
// is recognised, and that family's turns are written here. A template of another family is an
// error, since a wrong one makes the model answer badly in silence.
#pragma once

#include <string>
#include <string_view>

namespace llm {

class ChatTemplate {
 public:
  // `source` is the file's `tokenizer.chat_template`.
  static ChatTemplate recognize(const std::string &source);

  // What begins every conversation: the system message that the template supplies when the caller
  // has none, or nothing. BOS is left to the tokenizer.
  std::string opening() const;
  std::string message(std::string_view role, std::string_view content) const;
  // Opens and closes the model's turn. It ends its turn with a token that is sampled, not rendered,
  // so a conversation that goes on appends the closing before the next message.
  std::string open_reply() const;
  std::string close_reply() const;
  // A whole turn of the model after its opening, as a model is taught it.
  std::string reply(std::string_view content) const;

 private:
  enum class Family { kChatMl, kLlama3 };
  explicit ChatTemplate(Family family) : family_(family) {}

  Family family_;
  std::string default_system_;
};

}  // namespace llm
