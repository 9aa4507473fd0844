#include "gguf.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "error.h"

namespace llm {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF is read in place as little-endian");

enum class ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxDimensions = 4;
constexpr uint64_t kMinMetadataBytes = 8 + 4 + 1;  // key length, value type, a one-byte value
constexpr uint64_t kMinTensorBytes =
    8 + 4 + 8 + 4 + 8;  // name length, rank, one size, type, offset

// A position in the file that never passes its end.
class Cursor {
 public:
  Cursor(const std::byte *data, size_t size, const std::string &name)
      : data_(data), size_(size), name_(name) {}

  size_t position() const { return position_; }
  uint64_t remaining() const { return size_ - position_; }

  [[noreturn]] void fail(const std::string &message) const {
    throw Error(name_ + ": " + message + " (at byte " + std::to_string(position_) + ")");
  }

  template <typename T>
  T read(const char *what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what), sizeof(T));
    return value;
  }

  std::string read_string(const char *what) {
    const auto length = read<uint64_t>(what);
    const auto *chars = reinterpret_cast<const char *>(take(length, what));
    return std::string(chars, length);
  }

  // A count of things of at least `min_bytes` each: one that the rest of the file cannot hold is an
  // error now, not an allocation of that size.
  uint64_t read_count(uint64_t min_bytes, const char *what) {
    const auto count = read<uint64_t>(what);
    if (count > remaining() / min_bytes) {
      fail(std::string(what) + " " + std::to_string(count) + " is more than the file can hold");
    }
    return count;
  }

 private:
  const std::byte *take(uint64_t bytes, const char *what) {
    if (bytes > remaining()) {
      fail(std::string("the file ends inside ") + what + ", which takes " + std::to_string(bytes) +
           " bytes where " + std::to_string(remaining()) + " are left");
    }
    const std::byte *start = data_ + position_;
    position_ += bytes;
    return start;
  }

  const std::byte *data_;
  size_t size_;
  const std::string &name_;
  size_t position_ = 0;
};

// Calls `visit` with a value of the C++ type that a scalar metadata type is stored as.
template <typename Visit>
auto with_stored_type(Cursor &cursor, uint32_t type, const Visit &visit) {
  switch (static_cast<ValueType>(type)) {
    case ValueType::kUint8:
      return visit(uint8_t{});
    case ValueType::kInt8:
      return visit(int8_t{});
    case ValueType::kUint16:
      return visit(uint16_t{});
    case ValueType::kInt16:
      return visit(int16_t{});
    case ValueType::kUint32:
      return visit(uint32_t{});
    case ValueType::kInt32:
      return visit(int32_t{});
    case ValueType::kUint64:
      return visit(uint64_t{});
    case ValueType::kInt64:
      return visit(int64_t{});
    case ValueType::kFloat32:
      return visit(float{});
    case ValueType::kFloat64:
      return visit(double{});
    case ValueType::kBool:
      return visit(bool{});
    case ValueType::kString:
      return visit(std::string{});
    case ValueType::kArray:
      break;
  }
  cursor.fail("metadata has the unknown value type " + std::to_string(type));
}

template <typename T>
using Widened = std::conditional_t<
    std::is_same_v<T, bool> || std::is_same_v<T, std::string>, T,
    std::conditional_t<std::is_floating_point_v<T>, double,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>>;

template <typename T>
Widened<T> read_scalar(Cursor &cursor, const char *what) {
  if constexpr (std::is_same_v<T, std::string>) {
    return cursor.read_string(what);
  } else if constexpr (std::is_same_v<T, bool>) {
    const auto byte = cursor.read<uint8_t>(what);
    if (byte > 1) cursor.fail("a boolean has the value " + std::to_string(byte));
    return byte == 1;
  } else {
    return static_cast<Widened<T>>(cursor.read<T>(what));
  }
}

Gguf::Value read_value(Cursor &cursor) {
  const auto type = cursor.read<uint32_t>("a value type");
  if (static_cast<ValueType>(type) != ValueType::kArray) {
    return with_stored_type(cursor, type, [&](auto stored) -> Gguf::Value {
      return read_scalar<decltype(stored)>(cursor, "a metadata value");
    });
  }
  const auto element_type = cursor.read<uint32_t>("an array's element type");
  if (static_cast<ValueType>(element_type) == ValueType::kArray) {
    cursor.fail("an array of arrays is not supported");
  }
  return with_stored_type(cursor, element_type, [&](auto stored) -> Gguf::Value {
    using Stored = decltype(stored);
    // Booleans in arrays are kept as integers: std::vector<bool> is no array of bool.
    using Element = std::conditional_t<std::is_same_v<Stored, bool>, uint64_t, Widened<Stored>>;
    constexpr uint64_t kMinBytes = std::is_same_v<Stored, std::string> ? 8 : sizeof(Stored);
    const uint64_t count = cursor.read_count(kMinBytes, "an array's length");
    std::vector<Element> values;
    values.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      values.push_back(read_scalar<Stored>(cursor, "an array element"));
    }
    return values;
  });
}

std::string readable_types() {
  return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, TQ1_0, "
         "TQ2_0, Q2_0 and I2_S";
}

// Name, shape, type and size; the offset into the data section is returned apart.
GgufTensor read_tensor_info(Cursor &cursor, uint64_t *offset) {
  GgufTensor tensor;
  tensor.name = cursor.read_string("a tensor's name");
  const auto fail = [&](const std::string &message) {
    cursor.fail("tensor '" + tensor.name + "' " + message);
  };
  const auto rank = cursor.read<uint32_t>("a tensor's rank");
  if (rank < 1 || rank > kMaxDimensions) fail("has the rank " + std::to_string(rank));
  tensor.shape.resize(rank);
  tensor.elements = 1;
  for (uint32_t i = 0; i < rank; ++i) {
    const auto size = cursor.read<uint64_t>("a tensor's shape");
    if (size == 0) fail("has a dimension of size 0");
    if (__builtin_mul_overflow(tensor.elements, size, &tensor.elements)) {
      fail("has more elements than 64 bits can count");
    }
    tensor.shape[rank - 1 - i] = size;
  }
  const auto type = cursor.read<uint32_t>("a tensor's type");
  const BlockLayout layout = block_layout(type);
  if (layout.elements == 0) {
    const char *type_name = tensor_type_name(type);
    fail("has the type " + (type_name != nullptr ? std::string(type_name) : std::to_string(type)) +
         ", which is not read here (what is read: " + readable_types() + ")");
  }
  tensor.type = static_cast<TensorType>(type);
  if (tensor.shape.back() % layout.elements != 0) {
    fail("has rows of " + std::to_string(tensor.shape.back()) +
         " elements, not a multiple of the " + std::to_string(layout.elements) + " in a block of " +
         tensor_type_name(type));
  }
  if (__builtin_mul_overflow(tensor.elements / layout.elements, layout.bytes, &tensor.bytes)) {
    fail("has more bytes than 64 bits can count");
  }
  *offset = cursor.read<uint64_t>("a tensor's offset");
  return tensor;
}

template <typename T>
const char *kind_name() {
  if constexpr (std::is_same_v<T, uint64_t>) return "an unsigned integer";
  if constexpr (std::is_same_v<T, double>) return "a float";
  if constexpr (std::is_same_v<T, bool>) return "a boolean";
  if constexpr (std::is_same_v<T, std::string>) return "a string";
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return "an array of strings";
  return "an array of numbers";
}

template <typename T>
const T &as(const Gguf &gguf, const std::string &key, const Gguf::Value &value) {
  const T *typed = std::get_if<T>(&value);
  if (typed == nullptr) gguf.fail("metadata '" + key + "' is not " + kind_name<T>());
  return *typed;
}

// Writers differ in the signedness and width of the integers they store.
uint64_t as_uint(const Gguf &gguf, const std::string &key, const Gguf::Value &value) {
  if (const auto *number = std::get_if<int64_t>(&value); number != nullptr && *number >= 0) {
    return static_cast<uint64_t>(*number);
  }
  return as<uint64_t>(gguf, key, value);
}

}  // namespace

void GgufTensor::decode(uint64_t first, uint64_t count, float *values) const {
  const BlockLayout layout = block_layout(static_cast<uint32_t>(type));
  dequantize(type, data + first / layout.elements * layout.bytes, count, values);
  if (tail_bytes(type) == 0) return;
  for (uint64_t i = 0; i < count; ++i) values[i] *= scale;
}

Gguf Gguf::open(const std::string &path) {
  MappedFile file(path);
  Gguf gguf = parse(file.data(), file.size(), path);
  gguf.file_.emplace(std::move(file));
  return gguf;
}

Gguf Gguf::parse(const std::byte *data, size_t size, const std::string &name) {
  Gguf gguf;
  gguf.name_ = name;
  gguf.file_bytes_ = size;
  Cursor cursor(data, size, gguf.name_);

  if (size < 4 || std::memcmp(data, "GGUF", 4) != 0) cursor.fail("not a GGUF file");
  cursor.read<uint32_t>("the magic number");
  const auto version = cursor.read<uint32_t>("the version");
  if (version == 0x02000000U || version == 0x03000000U) {
    cursor.fail("a big-endian GGUF file is not supported");
  }
  if (version != 2 && version != 3) {
    cursor.fail("GGUF version " + std::to_string(version) + " is not supported (2 and 3 are)");
  }
  const auto tensor_count = cursor.read_count(kMinTensorBytes, "the tensor count");
  const auto metadata_count = cursor.read_count(kMinMetadataBytes, "the metadata count");

  for (uint64_t i = 0; i < metadata_count; ++i) {
    const size_t start = cursor.position();
    std::string key = cursor.read_string("a metadata key");
    Value value = read_value(cursor);
    if (!gguf.metadata_.emplace(key, std::move(value)).second) {
      cursor.fail("metadata '" + key + "' appears twice");
    }
    gguf.entries_.push_back({std::move(key), data + start, cursor.position() - start});
  }
  const uint64_t alignment = gguf.get_uint("general.alignment", kDefaultAlignment);
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > (1U << 30)) {
    cursor.fail("general.alignment " + std::to_string(alignment) + " is not a power of two");
  }

  std::vector<uint64_t> offsets(tensor_count);
  gguf.tensors_.reserve(tensor_count);
  for (uint64_t i = 0; i < tensor_count; ++i) {
    gguf.tensors_.push_back(read_tensor_info(cursor, &offsets[i]));
    if (!gguf.tensor_index_.emplace(gguf.tensors_.back().name, i).second) {
      cursor.fail("tensor '" + gguf.tensors_.back().name + "' appears twice");
    }
  }

  const uint64_t data_start = (cursor.position() + alignment - 1) / alignment * alignment;
  const uint64_t data_bytes = data_start < size ? size - data_start : 0;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    GgufTensor &tensor = gguf.tensors_[i];
    if (offsets[i] % alignment != 0) {
      gguf.fail("tensor '" + tensor.name + "' starts at " + std::to_string(offsets[i]) +
                ", not a multiple of the alignment " + std::to_string(alignment));
    }
    const uint64_t tail = tail_bytes(tensor.type);
    const uint64_t left = offsets[i] < data_bytes ? data_bytes - offsets[i] : 0;
    if (left < tail || tensor.bytes > left - tail) {
      gguf.fail("tensor '" + tensor.name + "' needs " + std::to_string(tensor.bytes + tail) +
                " bytes at offset " + std::to_string(offsets[i]) + " of a data section of " +
                std::to_string(data_bytes) + ": the file is truncated");
    }
    tensor.data = data + data_start + offsets[i];
    if (tail > 0) std::memcpy(&tensor.scale, tensor.data + tensor.bytes, sizeof(tensor.scale));
  }
  return gguf;
}

void Gguf::fail(const std::string &message) const { throw Error(name_ + ": " + message); }

const GgufTensor *Gguf::find_tensor(const std::string &name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const GgufTensor &Gguf::tensor(const std::string &name, const std::vector<uint64_t> &shape) const {
  const GgufTensor *tensor = find_tensor(name);
  if (tensor == nullptr) fail("tensor '" + name + "' is missing");
  if (tensor->shape != shape) {
    const auto print = [](const std::vector<uint64_t> &sizes) {
      std::string text;
      for (const uint64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
      return "[" + text + "]";
    };
    fail("tensor '" + name + "' has the shape " + print(tensor->shape) + ", not " + print(shape));
  }
  return *tensor;
}

const Gguf::Value *Gguf::find(const std::string &key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

const Gguf::Value &Gguf::require(const std::string &key) const {
  const Value *value = find(key);
  if (value == nullptr) fail("metadata '" + key + "' is missing");
  return *value;
}

uint64_t Gguf::get_uint(const std::string &key) const { return as_uint(*this, key, require(key)); }

double Gguf::get_float(const std::string &key) const {
  return as<double>(*this, key, require(key));
}

const std::string &Gguf::get_string(const std::string &key) const {
  return as<std::string>(*this, key, require(key));
}

const std::vector<std::string> &Gguf::get_strings(const std::string &key) const {
  return as<std::vector<std::string>>(*this, key, require(key));
}

uint64_t Gguf::get_uint(const std::string &key, uint64_t fallback) const {
  return find(key) != nullptr ? get_uint(key) : fallback;
}

double Gguf::get_float(const std::string &key, double fallback) const {
  return find(key) != nullptr ? get_float(key) : fallback;
}

bool Gguf::get_bool(const std::string &key, bool fallback) const {
  const Value *value = find(key);
  return value != nullptr ? as<bool>(*this, key, *value) : fallback;
}

std::string Gguf::get_string(const std::string &key, const std::string &fallback) const {
  return find(key) != nullptr ? get_string(key) : fallback;
}

std::vector<int64_t> Gguf::get_ints(const std::string &key) const {
  const Value *value = find(key);
  if (value == nullptr) return {};
  if (const auto *numbers = std::get_if<std::vector<uint64_t>>(value)) {
    return {numbers->begin(), numbers->end()};
  }
  return as<std::vector<int64_t>>(*this, key, *value);
}

std::vector<double> Gguf::get_floats(const std::string &key) const {
  const Value *value = find(key);
  return value != nullptr ? as<std::vector<double>>(*this, key, *value) : std::vector<double>();
}

}  // namespace llm
