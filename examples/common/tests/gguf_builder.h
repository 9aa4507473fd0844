// Writes GGUF files in memory, well-formed ones and others.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace llm {

class GgufBuilder {
 public:
  enum : uint32_t {
    kUint8 = 0,
    kUint32 = 4,
    kInt32 = 5,
    kFloat32 = 6,
    kBool = 7,
    kString = 8,
    kArray = 9,
    kUint64 = 10,
  };

  struct Tensor {
    std::string name;
    std::vector<uint64_t> dimensions;  // innermost first, as in the file
    uint32_t type;
    uint64_t offset;
  };

  uint32_t version = 3;
  std::vector<Tensor> tensors;
  std::string data;

  GgufBuilder &entry(const std::string &key, uint32_t type, const std::string &bytes) {
    metadata_ += string(key) + number(type) + bytes;
    ++metadata_count_;
    return *this;
  }
  GgufBuilder &set(const std::string &key, const std::string &value) {
    return entry(key, kString, string(value));
  }
  GgufBuilder &set(const std::string &key, uint32_t value) {
    return entry(key, kUint32, number(value));
  }
  GgufBuilder &set(const std::string &key, bool value) {
    return entry(key, kBool, std::string(1, value ? '\1' : '\0'));
  }
  GgufBuilder &set(const std::string &key, const std::vector<std::string> &values) {
    std::string bytes = number(uint32_t{kString}) + number(uint64_t{values.size()});
    for (const std::string &value : values) bytes += string(value);
    return entry(key, kArray, bytes);
  }
  GgufBuilder &set(const std::string &key, const std::vector<int32_t> &values) {
    return array(key, kInt32, values);
  }
  GgufBuilder &set(const std::string &key, const std::vector<float> &values) {
    return array(key, kFloat32, values);
  }

  std::string build() const { return build(tensors.size(), metadata_count_); }

  std::string build(uint64_t tensor_count, uint64_t metadata_count) const {
    std::string file = "GGUF" + number(version) + number(tensor_count) + number(metadata_count);
    file += metadata_;
    for (const Tensor &tensor : tensors) {
      file += string(tensor.name) + number(static_cast<uint32_t>(tensor.dimensions.size()));
      for (const uint64_t size : tensor.dimensions) file += number(size);
      file += number(tensor.type) + number(tensor.offset);
    }
    file.resize((file.size() + 31) / 32 * 32, '\0');
    return file + data;
  }

  template <typename T>
  static std::string number(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }

  static std::string string(const std::string &text) {
    return number(uint64_t{text.size()}) + text;
  }

 private:
  template <typename T>
  GgufBuilder &array(const std::string &key, uint32_t type, const std::vector<T> &values) {
    std::string bytes = number(type) + number(uint64_t{values.size()});
    for (const T value : values) bytes += number(value);
    return entry(key, kArray, bytes);
  }

  std::string metadata_;
  uint64_t metadata_count_ = 0;
};

}  // namespace llm
