#include "gguf_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"
#include "output_file.h"

namespace llm {
namespace {

// Of metadata values, as GGUF numbers them.
constexpr uint32_t kUint32 = 4;
constexpr uint32_t kFloat32 = 6;
constexpr uint32_t kString = 8;

constexpr uint64_t kChunk = 1 << 18;  // elements at a time: whole blocks of every type

template <typename T>
void append(std::string *bytes, T value) {
  bytes->append(reinterpret_cast<const char *>(&value), sizeof(value));
}

void append_string(std::string *bytes, const std::string &text) {
  append(bytes, uint64_t{text.size()});
  *bytes += text;
}

uint64_t padded(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

void GgufWriter::set(const std::string &key, const std::string &value) {
  std::string bytes;
  append_string(&bytes, value);
  set(key, kString, bytes.data(), bytes.size());
}

void GgufWriter::set(const std::string &key, uint32_t value) {
  set(key, kUint32, &value, sizeof(value));
}

void GgufWriter::set(const std::string &key, float value) {
  set(key, kFloat32, &value, sizeof(value));
}

void GgufWriter::set(const std::string &key, uint32_t type, const void *value, size_t bytes) {
  append_string(&metadata_, key);
  append(&metadata_, type);
  metadata_.append(static_cast<const char *>(value), bytes);
  ++metadata_count_;
}

void GgufWriter::copy(const GgufEntry &entry) {
  // Offsets are multiples of what the writer uses, whatever another file asked for.
  if (entry.key == "general.alignment") return;
  metadata_.append(reinterpret_cast<const char *>(entry.data), entry.bytes);
  ++metadata_count_;
}

void GgufWriter::add_tensor(const std::string &name, const std::vector<uint64_t> &shape,
                            TensorType type, Source source) {
  uint64_t elements = 1;
  for (const uint64_t size : shape) elements *= size;
  const BlockLayout layout = block_layout(static_cast<uint32_t>(type));
  if (shape.back() % layout.elements != 0) {
    throw Error("tensor '" + name + "' has rows of " + std::to_string(shape.back()) +
                " elements, not a multiple of the " + std::to_string(layout.elements) +
                " in a block of " + tensor_type_name(static_cast<uint32_t>(type)));
  }
  const uint64_t bytes = elements / layout.elements * layout.bytes;
  tensors_.push_back({name, shape, type, elements, bytes, std::move(source)});
}

uint64_t GgufWriter::data_bytes() const {
  uint64_t bytes = 0;
  for (const Tensor &tensor : tensors_) bytes += tensor.bytes;
  return bytes;
}

void GgufWriter::write(const std::string &path,
                       const std::function<void(uint64_t bytes)> &done) const {
  constexpr uint64_t kAlignment = 32;
  std::string head = "GGUF";
  append(&head, uint32_t{3});
  append(&head, uint64_t{tensors_.size()});
  append(&head, metadata_count_);
  head += metadata_;
  uint64_t offset = 0;
  for (const Tensor &tensor : tensors_) {
    append_string(&head, tensor.name);
    append(&head, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size) {
      append(&head, *size);
    }
    append(&head, tensor.type);
    append(&head, offset);
    offset = padded(offset + tensor.bytes, kAlignment);
  }

  OutputFile file(path);
  file.write(head.data(), head.size());
  std::vector<float> values;
  std::vector<std::byte> encoded;
  for (const Tensor &tensor : tensors_) {
    file.pad(kAlignment);
    const BlockLayout layout = block_layout(static_cast<uint32_t>(tensor.type));
    for (uint64_t first = 0; first < tensor.elements; first += kChunk) {
      const uint64_t count = std::min(kChunk, tensor.elements - first);
      values.resize(count);
      encoded.resize(count / layout.elements * layout.bytes);
      tensor.source(first, count, values.data());
      encode(values.data(), count, tensor.type, encoded.data());
      file.write(encoded.data(), encoded.size());
      done(encoded.size());
    }
  }
  file.pad(kAlignment);
  file.commit();
}

}  // namespace llm
