#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace llm {

MappedFile::MappedFile(const std::string &path) {
  const auto reason = [&path](const char *what) {
    return path + ": " + what + ": " + std::strerror(errno);
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(reason("cannot open"));
  struct stat info = {};
  void *map = MAP_FAILED;
  std::string failure;
  if (fstat(fd, &info) != 0) {
    failure = reason("cannot stat");
  } else if (!S_ISREG(info.st_mode)) {
    failure = path + ": not a regular file";
  } else if (info.st_size > 0) {
    map = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) failure = reason("cannot map");
  }
  close(fd);  // the mapping keeps the file
  if (!failure.empty()) throw Error(failure);
  if (map != MAP_FAILED) {
    data_ = static_cast<const std::byte *>(map);
    size_ = static_cast<size_t>(info.st_size);
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte *>(data_), size_);
}

MappedFile::MappedFile(MappedFile &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

}  // namespace llm
