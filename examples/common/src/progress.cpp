#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace llm {

ProgressBar::ProgressBar(std::string label, uint64_t total)
    : label_(std::move(label)), total_(std::max<uint64_t>(total, 1)), terminal_(isatty(2) == 1) {
  advance(0);
}

ProgressBar::~ProgressBar() {
  if (terminal_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::advance(uint64_t amount) {
  done_ = std::min(done_ + amount, total_);
  const int percent =
      static_cast<int>(100.0 * static_cast<double>(done_) / static_cast<double>(total_));
  if (percent == drawn_percent_) return;
  drawn_percent_ = percent;
  draw();
}

void ProgressBar::set_note(const std::string &note) {
  note_ = note;
  draw();
}

void ProgressBar::draw() {
  constexpr int kWidth = 40;
  if (!terminal_) return;
  const int filled = kWidth * drawn_percent_ / 100;
  std::fprintf(stderr, "\r%s [%s%s] %3d %% %s\x1b[K", label_.c_str(),
               std::string(filled, '#').c_str(), std::string(kWidth - filled, '.').c_str(),
               drawn_percent_, note_.c_str());
  std::fflush(stderr);
}

}  // namespace llm
