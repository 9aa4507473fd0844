// A file mapped read-only into memory for as long as the object lives.
#pragma once

#include <cstddef>
#include <string>

namespace llm {

class MappedFile {
 public:
  explicit MappedFile(const std::string &path);
  ~MappedFile();
  MappedFile(MappedFile &&other) noexcept;
  MappedFile &operator=(MappedFile &&) = delete;

  const std::byte *data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const std::byte *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace llm
