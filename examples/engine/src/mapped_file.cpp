#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace engine {

MappedFile::MappedFile(const std::string &path) {
  const auto fail = [&path](const char *what) {
    throw Error(path + ": " + what + ": " + std::strerror(errno));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("cannot open");
  struct stat info = {};
  void *map = MAP_FAILED;
  const char *failed = nullptr;
  if (fstat(fd, &info) != 0) {
    failed = "cannot stat";
  } else if (!S_ISREG(info.st_mode)) {
    errno = EINVAL;
    failed = "not a regular file";
  } else if (info.st_size > 0) {
    map = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) failed = "cannot map";
  }
  const int error = errno;
  close(fd);  // the mapping keeps the file
  errno = error;
  if (failed != nullptr) fail(failed);
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

}  // namespace engine
