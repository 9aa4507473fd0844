// A file that takes its place whole or not at all: it is written beside its place under a temporary
// name, brought to the disk, then renamed. Whatever fails before leaves the old file as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llm {

class OutputFile {
 public:
  // Throws, as every call does, with the path and the reason.
  explicit OutputFile(const std::string &path);
  ~OutputFile();  // without a commit, removes what was written
  OutputFile(const OutputFile &) = delete;
  OutputFile &operator=(const OutputFile &) = delete;

  void write(const void *data, size_t bytes);
  // Zeros up to the next multiple of `alignment`.
  void pad(uint64_t alignment);
  uint64_t position() const { return position_; }
  void commit();

 private:
  [[noreturn]] void fail(const char *what) const;
  void flush();

  std::string path_;
  std::string temporary_;
  int file_ = -1;
  std::vector<std::byte> buffer_;
  uint64_t position_ = 0;
};

}  // namespace llm
