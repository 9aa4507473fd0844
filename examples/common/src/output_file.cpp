#include "output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "error.h"

namespace llm {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

std::string folder_of(const std::string &path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

OutputFile::OutputFile(const std::string &path) : path_(path), temporary_(path + ".partial") {
  file_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail("cannot create");
  buffer_.reserve(kBufferBytes);
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  close(file_);
  unlink(temporary_.c_str());
}

void OutputFile::write(const void *data, size_t bytes) {
  const auto *start = static_cast<const std::byte *>(data);
  position_ += bytes;
  while (bytes > 0) {
    const size_t part =
        bytes < kBufferBytes - buffer_.size() ? bytes : kBufferBytes - buffer_.size();
    buffer_.insert(buffer_.end(), start, start + part);
    start += part;
    bytes -= part;
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void OutputFile::pad(uint64_t alignment) {
  const std::vector<std::byte> zeros((alignment - position_ % alignment) % alignment);
  write(zeros.data(), zeros.size());
}

void OutputFile::flush() {
  const std::byte *start = buffer_.data();
  size_t left = buffer_.size();
  while (left > 0) {
    const ssize_t written = ::write(file_, start, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot write");
    start += written;
    left -= static_cast<size_t>(written);
  }
  buffer_.clear();
}

void OutputFile::commit() {
  flush();
  if (fsync(file_) != 0) fail("cannot write");
  const int file = file_;
  file_ = -1;
  if (close(file) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    unlink(temporary_.c_str());
    errno = reason;
    fail("cannot write");
  }
  // The new name, too, is to outlive a loss of power. Not every file system lets folders be opened.
  const int folder = open(folder_of(path_).c_str(), O_RDONLY | O_CLOEXEC);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
}

void OutputFile::fail(const char *what) const {
  throw Error(path_ + ": " + what + ": " + std::strerror(errno));
}

}  // namespace llm
