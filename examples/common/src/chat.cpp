#include "chat.h"

#include "error.h"

namespace llm {
namespace {

constexpr std::string_view kSpaces = " \t\r\n\v\f";

std::string trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpaces) - first + 1));
}

// The system message that a ChatML template writes out as a literal, as in
// {{ '<|im_start|>system\nYou are ...<|im_end|>\n' }}; other mentions of a system turn are closed
// by a quote before the text and insert the caller's message.
std::string literal_system_message(const std::string &source) {
  constexpr std::string_view kOpen = "<|im_start|>system";
  constexpr std::string_view kClose = "<|im_end|>";
  for (size_t at = source.find(kOpen); at != std::string::npos; at = source.find(kOpen, at + 1)) {
    size_t start = at + kOpen.size();
    if (source.compare(start, 2, "\\n") == 0) {
      start += 2;
    } else if (source.compare(start, 1, "\n") == 0) {
      start += 1;
    } else {
      continue;
    }
    const size_t end = source.find(kClose, start);
    if (end == std::string::npos) break;
    const std::string text = source.substr(start, end - start);
    if (!text.empty() && text.find_first_of("'\"{}\\") == std::string::npos) return text;
  }
  return "";
}

}  // namespace

ChatTemplate ChatTemplate::recognize(const std::string &source) {
  const auto mentions = [&](const char *text) { return source.find(text) != std::string::npos; };
  if (mentions("<|im_start|>") && mentions("<|im_end|>")) {
    ChatTemplate chat(Family::kChatMl);
    chat.default_system_ = literal_system_message(source);
    return chat;
  }
  if (mentions("<|start_header_id|>") && mentions("<|eot_id|>")) {
    return ChatTemplate(Family::kLlama3);
  }
  throw Error(
      "the model's chat template is of no family that is known here (ChatML and Llama 3): " +
      source.substr(0, 120) + (source.size() > 120 ? "..." : ""));
}

std::string ChatTemplate::opening() const {
  return default_system_.empty() ? "" : message("system", default_system_);
}

std::string ChatTemplate::message(std::string_view role, std::string_view content) const {
  const std::string name(role);
  switch (family_) {
    case Family::kChatMl:
      return "<|im_start|>" + name + "\n" + std::string(content) + "<|im_end|>\n";
    case Family::kLlama3:
      return "<|start_header_id|>" + name + "<|end_header_id|>\n\n" + trim(content) + "<|eot_id|>";
  }
  return "";
}

std::string ChatTemplate::open_reply() const {
  switch (family_) {
    case Family::kChatMl:
      return "<|im_start|>assistant\n";
    case Family::kLlama3:
      return "<|start_header_id|>assistant<|end_header_id|>\n\n";
  }
  return "";
}

std::string ChatTemplate::reply(std::string_view content) const {
  const std::string turn = family_ == Family::kLlama3 ? trim(content) : std::string(content);
  return turn + close_reply();
}

std::string ChatTemplate::close_reply() const {
  switch (family_) {
    case Family::kChatMl:
      return "<|im_end|>\n";
    case Family::kLlama3:
      return "<|eot_id|>";
  }
  return "";
}

}  // namespace llm
