// A progress bar on standard error; silent where that is no terminal.
#pragma once

#include <cstdint>
#include <string>

namespace llm {

class ProgressBar {
 public:
  ProgressBar(std::string label, uint64_t total);
  ~ProgressBar();  // clears the line
  ProgressBar(const ProgressBar &) = delete;
  ProgressBar &operator=(const ProgressBar &) = delete;

  void advance(uint64_t amount);
  // What is written behind the bar from now on.
  void set_note(const std::string &note);

 private:
  void draw();

  std::string label_;
  std::string note_;
  uint64_t total_;
  uint64_t done_ = 0;
  int drawn_percent_ = -1;
  bool terminal_;
};

}  // namespace llm
