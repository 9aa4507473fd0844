// Writer of GGUF files, version 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gguf.h"

namespace llm {

class GgufWriter {
 public:
  // Gives the elements of a tensor from `first` on, `count` of them.
  using Source = std::function<void(uint64_t first, uint64_t count, float *values)>;

  // A key is set once; the order is the file's.
  void set(const std::string &key, const std::string &value);
  void set(const std::string &key, uint32_t value);
  void set(const std::string &key, float value);
  // As another file has it, which lives until `write` is done.
  void copy(const GgufEntry &entry);

  // The shape is outermost first. The source is asked when the file is written.
  void add_tensor(const std::string &name, const std::vector<uint64_t> &shape, TensorType type,
                  Source source);

  // Puts a whole file in the place of what was there, or leaves that and throws. `done` is called
  // with the bytes of each part that was written.
  void write(const std::string &path, const std::function<void(uint64_t bytes)> &done) const;
  // Of the tensors.
  uint64_t data_bytes() const;

 private:
  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;
    TensorType type;
    uint64_t elements;
    uint64_t bytes;
    Source source;
  };

  void set(const std::string &key, uint32_t type, const void *value, size_t bytes);

  std::string metadata_;
  uint64_t metadata_count_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace llm
