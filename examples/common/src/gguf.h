// Reader of GGUF files (versions 2 and 3, which are laid out alike): typed metadata, and named
// tensors that point into the mapping. Nothing in the file is trusted: every count, length, type
// and offset is checked against the bytes that are there before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "mapped_file.h"
#include "quants.h"

namespace llm {

struct GgufTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;  // outermost first (the file keeps the innermost first)
  uint64_t elements = 0;
  uint64_t bytes = 0;  // of its blocks
  const std::byte *data = nullptr;
  float scale = 1;  // what all elements are multiples of, where the type has it behind the blocks

  // Decodes `count` elements from `first` on, whole blocks.
  void decode(uint64_t first, uint64_t count, float *values) const;
};

// A key of the metadata and its value as the file has them, so that they can be copied.
struct GgufEntry {
  std::string key;
  const std::byte *data = nullptr;  // the key's length, the key, the type, the value
  uint64_t bytes = 0;
};

class Gguf {
 public:
  // Integers are widened to 64 bits and floats to double, in arrays as well as alone.
  using Value = std::variant<bool, uint64_t, int64_t, double, std::string, std::vector<uint64_t>,
                             std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

  // Maps the file; tensors stay valid for as long as the object (moved or not) lives.
  static Gguf open(const std::string &path);
  // Reads from memory that outlives the object. `name` begins every error message.
  static Gguf parse(const std::byte *data, size_t size, const std::string &name);

  uint64_t file_bytes() const { return file_bytes_; }
  const std::vector<GgufTensor> &tensors() const { return tensors_; }
  const GgufTensor *find_tensor(const std::string &name) const;
  // Throws unless the tensor is there and has exactly this shape.
  const GgufTensor &tensor(const std::string &name, const std::vector<uint64_t> &shape) const;

  const std::vector<GgufEntry> &entries() const { return entries_; }  // in the file's order
  const Value *find(const std::string &key) const;
  // Each throws if the key is missing or of another kind.
  uint64_t get_uint(const std::string &key) const;
  double get_float(const std::string &key) const;
  const std::string &get_string(const std::string &key) const;
  const std::vector<std::string> &get_strings(const std::string &key) const;
  // Each gives the fallback if the key is missing and throws if it is of another kind.
  uint64_t get_uint(const std::string &key, uint64_t fallback) const;
  double get_float(const std::string &key, double fallback) const;
  bool get_bool(const std::string &key, bool fallback) const;
  std::string get_string(const std::string &key, const std::string &fallback) const;
  std::vector<int64_t> get_ints(const std::string &key) const;   // empty if missing
  std::vector<double> get_floats(const std::string &key) const;  // empty if missing

  [[noreturn]] void fail(const std::string &message) const;

 private:
  Gguf() = default;
  const Value &require(const std::string &key) const;

  std::optional<MappedFile> file_;
  std::string name_;
  uint64_t file_bytes_ = 0;
  std::map<std::string, Value> metadata_;
  std::vector<GgufEntry> entries_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t> tensor_index_;
};

}  // namespace llm
