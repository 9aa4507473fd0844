#include "checkpoint.h"

#include <cstring>
#include <sstream>

#include "error.h"
#include "mapped_file.h"
#include "output_file.h"

namespace llm {
namespace {

constexpr char kMagic[8] = {'U', 'N', 'S', 'L', 'T', 'R', 'N', '1'};

// Writes, and keeps the checksum of what it wrote.
class Writer {
 public:
  explicit Writer(const std::string &path) : file_(path) {}

  void write(const void *data, size_t bytes) {
    file_.write(data, bytes);
    checksum_ = checksum(data, bytes, checksum_);
  }
  void number(uint64_t value) { write(&value, sizeof(value)); }
  void section(const void *data, size_t bytes) {
    number(bytes);
    write(data, bytes);
  }
  void commit() {
    number(checksum_);
    file_.commit();
  }

 private:
  OutputFile file_;
  uint64_t checksum_ = 0;
};

class Reader {
 public:
  explicit Reader(const std::string &path) : path_(path), file_(path) {}

  [[noreturn]] void fail(const std::string &message) const { throw Error(path_ + ": " + message); }

  const std::byte *take(uint64_t bytes) {
    if (bytes > file_.size() - at_) fail("the checkpoint is damaged: it ends too early");
    const std::byte *start = file_.data() + at_;
    at_ += bytes;
    checksum_ = checksum(start, bytes, checksum_);
    return start;
  }
  uint64_t number() {
    uint64_t value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  std::vector<std::byte> section() {
    const uint64_t bytes = number();
    const std::byte *start = take(bytes);
    return {start, start + bytes};
  }
  void finish() {
    const uint64_t expected = checksum_;
    if (number() != expected || at_ != file_.size()) {
      fail("the checkpoint is damaged: its checksum is another");
    }
  }

 private:
  std::string path_;
  MappedFile file_;
  uint64_t at_ = 0;
  uint64_t checksum_ = 0;
};

std::vector<std::string> lines(const std::string &text) {
  std::vector<std::string> lines;
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

// FNV-1a over words of 8 bytes, whose halves are mixed since a product only carries upwards.
uint64_t checksum(const void *data, size_t bytes, uint64_t seed) {
  constexpr uint64_t kPrime = 0x100000001B3U;
  uint64_t hash = seed ^ 0xCBF29CE484222325U;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 32;
  };
  const auto *at = static_cast<const unsigned char *>(data);
  uint64_t word = 0;
  for (; bytes >= sizeof(word); bytes -= sizeof(word), at += sizeof(word)) {
    std::memcpy(&word, at, sizeof(word));
    mix(word);
  }
  for (; bytes > 0; --bytes, ++at) mix(*at);
  return hash;
}

void write_checkpoint(const std::string &path, const Checkpoint &checkpoint) {
  Writer writer(path);
  writer.write(kMagic, sizeof(kMagic));
  writer.section(checkpoint.arguments.data(), checkpoint.arguments.size());
  writer.number(checkpoint.steps);
  writer.number(checkpoint.batches);
  for (const Checkpoint::Part &part : checkpoint.parts) {
    writer.section(part.weights.data(), part.weights.size());
    writer.section(part.optimizer.data(), part.optimizer.size());
  }
  writer.commit();
}

Checkpoint read_checkpoint(const std::string &path, const std::string &arguments,
                           size_t num_parts) {
  Reader reader(path);
  if (std::memcmp(reader.take(sizeof(kMagic)), kMagic, sizeof(kMagic)) != 0) {
    reader.fail("not a checkpoint of this program");
  }
  Checkpoint checkpoint;
  const std::vector<std::byte> text = reader.section();
  checkpoint.arguments.assign(reinterpret_cast<const char *>(text.data()), text.size());
  const std::vector<std::string> made_with = lines(checkpoint.arguments);
  const std::vector<std::string> asked = lines(arguments);
  for (size_t i = 0; i < made_with.size() && i < asked.size(); ++i) {
    if (made_with[i] != asked[i]) {
      reader.fail("the checkpoint was made with '" + made_with[i] + "', not '" + asked[i] + "'");
    }
  }
  if (made_with.size() != asked.size()) reader.fail("the checkpoint is of another version");
  checkpoint.steps = reader.number();
  checkpoint.batches = reader.number();
  checkpoint.parts.resize(num_parts);
  for (Checkpoint::Part &part : checkpoint.parts) {
    part.weights = reader.section();
    part.optimizer = reader.section();
  }
  reader.finish();
  return checkpoint;
}

}  // namespace llm
