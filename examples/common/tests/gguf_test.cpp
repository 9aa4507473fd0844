#include "gguf.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#include "check.h"
#include "error.h"
#include "gguf_builder.h"
#include "gguf_writer.h"
#include "output_file.h"
#include "quants.h"

namespace llm {
namespace {

constexpr uint32_t kF32 = 0;
constexpr uint32_t kQ4_1 = 3;

Gguf parse(const std::string &file) {
  return Gguf::parse(reinterpret_cast<const std::byte *>(file.data()), file.size(), "test.gguf");
}

GgufBuilder small_file() {
  GgufBuilder builder;
  builder.set("general.architecture", std::string("llama"));
  builder.set("llama.block_count", 30U);
  builder.set("flag", true);
  builder.set("names", std::vector<std::string>{"a", "", "c d"});
  builder.set("numbers", std::vector<int32_t>{1, -2, 3});
  builder.entry("epsilon", GgufBuilder::kFloat32, GgufBuilder::number(0.5F));
  builder.tensors = {{"a", {2, 3}, kF32, 0}, {"b", {32, 1}, kQ4_1, 32}};
  for (int i = 0; i < 6; ++i) builder.data += GgufBuilder::number(static_cast<float>(i));
  builder.data.resize(32, '\0');
  builder.data += std::string(20, '\0');
  return builder;
}

void reads_what_was_written() {
  const std::string file = small_file().build();
  const Gguf gguf = parse(file);
  CHECK_EQUAL(gguf.get_string("general.architecture"), std::string("llama"));
  CHECK_EQUAL(gguf.get_uint("llama.block_count"), 30U);
  CHECK_EQUAL(gguf.get_uint("missing", 7), 7U);
  CHECK_EQUAL(gguf.get_bool("flag", false), true);
  CHECK_EQUAL(gguf.get_float("epsilon"), 0.5);
  CHECK_EQUAL(gguf.get_strings("names"), (std::vector<std::string>{"a", "", "c d"}));
  CHECK_EQUAL(gguf.get_ints("numbers"), (std::vector<int64_t>{1, -2, 3}));
  CHECK_EQUAL(gguf.tensors().size(), 2U);
  const GgufTensor &a = gguf.tensor("a", {3, 2});
  std::vector<float> values(a.elements);
  dequantize(a.type, a.data, a.elements, values.data());
  CHECK_EQUAL(values, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  CHECK(gguf.find_tensor("c") == nullptr);
}

void maps_a_file() {
  char path[] = "/tmp/gguf_test_XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  const std::string file = small_file().build();
  CHECK_EQUAL(write(fd, file.data(), file.size()), static_cast<ssize_t>(file.size()));
  close(fd);
  Gguf gguf = Gguf::open(path);
  const Gguf moved = std::move(gguf);
  CHECK_EQUAL(moved.file_bytes(), file.size());
  float value = 0;
  dequantize(TensorType::kF32, moved.tensor("a", {3, 2}).data + 4, 1, &value);
  CHECK_EQUAL(value, 1.0F);
  CHECK_EQUAL(truncate(path, 0), 0);
  CHECK_THROWS(Error, Gguf::open(path), "not a GGUF file");
  unlink(path);
  CHECK_THROWS(Error, Gguf::open(path), "cannot open");
  CHECK_THROWS(Error, Gguf::open("/"), "not a regular file");
}

void names_what_is_asked_for_wrongly() {
  const std::string file = small_file().build();
  const Gguf gguf = parse(file);
  CHECK_THROWS(Error, gguf.get_uint("missing"), "metadata 'missing' is missing");
  CHECK_THROWS(Error, gguf.get_uint("flag"), "metadata 'flag' is not an unsigned integer");
  CHECK_THROWS(Error, gguf.get_string("epsilon", ""), "metadata 'epsilon' is not a string");
  CHECK_THROWS(Error, gguf.tensor("c", {1}), "tensor 'c' is missing");
  CHECK_THROWS(Error, gguf.tensor("a", {2, 3}), "tensor 'a' has the shape [3, 2], not [2, 3]");
}

// Every file that ends early is refused, wherever it ends, and nothing outside it is read.
void refuses_truncated_files() {
  const std::string whole = small_file().build();
  for (size_t size = 0; size < whole.size(); ++size) {
    // A copy of just that size, so that AddressSanitizer sees a read past it.
    const std::vector<char> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK_THROWS(Error, Gguf::parse(reinterpret_cast<const std::byte *>(part.data()), size, "part"),
                 "");
  }
}

// Whatever one byte is changed to, the reader answers or throws its own error.
void survives_corrupted_bytes() {
  const std::string whole = small_file().build();
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const unsigned value : {0x00U, 0x01U, 0x7FU, 0x80U, 0xFFU}) {
      std::string file = whole;
      file[at] = static_cast<char>(value);
      try {
        const Gguf gguf = parse(file);
        for (const GgufTensor &tensor : gguf.tensors()) {
          std::vector<float> values(tensor.elements);
          dequantize(tensor.type, tensor.data, tensor.elements, values.data());
        }
      } catch (const Error &) {
      }
    }
  }
}

void refuses_bad_headers() {
  std::string file = small_file().build();
  file[0] = 'X';
  CHECK_THROWS(Error, parse(file), "not a GGUF file");

  GgufBuilder builder = small_file();
  builder.version = 1;
  CHECK_THROWS(Error, parse(builder.build()), "version 1 is not supported");
  builder.version = 0x03000000;
  CHECK_THROWS(Error, parse(builder.build()), "big-endian");
  builder.version = 2;
  CHECK_EQUAL(parse(builder.build()).tensors().size(), 2U);

  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  CHECK_THROWS(Error, parse(small_file().build(huge, 1)), "the tensor count");
  CHECK_THROWS(Error, parse(small_file().build(1, huge)), "the metadata count");
  CHECK_THROWS(Error, parse(small_file().build(2, 7)), "");
}

void refuses_bad_metadata() {
  using B = GgufBuilder;
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  struct Case {
    uint32_t type;
    std::string bytes;
    const char *message;
  };
  const Case cases[] = {
      {13, "", "unknown value type 13"},
      {B::kBool, "\2", "a boolean has the value 2"},
      {B::kString, B::number(huge), "the file ends inside a metadata value"},
      {B::kArray, B::number(uint32_t{B::kUint8}) + B::number(huge), "an array's length"},
      {B::kArray, B::number(uint32_t{B::kString}) + B::number(huge / 8), "an array's length"},
      {B::kArray, B::number(uint32_t{B::kArray}) + B::number(uint64_t{1}), "array of arrays"},
      {B::kArray, B::number(uint32_t{99}) + B::number(uint64_t{1}), "unknown value type 99"},
  };
  for (const Case &bad : cases) {
    GgufBuilder builder;
    builder.entry("key", bad.type, bad.bytes);
    CHECK_THROWS(Error, parse(builder.build()), bad.message);
  }
  CHECK_THROWS(Error, parse(GgufBuilder().set("k", true).set("k", true).build()),
               "metadata 'k' appears twice");
  for (const uint32_t alignment : {0U, 3U, 0x80000000U}) {
    CHECK_THROWS(Error, parse(GgufBuilder().set("general.alignment", alignment).build()),
                 "is not a power of two");
  }
}

void refuses_bad_tensors() {
  const uint64_t large = uint64_t{1} << 33;
  struct Case {
    GgufBuilder::Tensor tensor;
    const char *message;
  };
  const Case cases[] = {
      {{"t", {}, kF32, 0}, "has the rank 0"},
      {{"t", {1, 1, 1, 1, 1}, kF32, 0}, "has the rank 5"},
      {{"t", {4, 0}, kF32, 0}, "has a dimension of size 0"},
      {{"t", {large, large}, kF32, 0}, "more elements than 64 bits"},
      {{"t", {large, large / 16}, kF32, 0}, "more bytes than 64 bits"},
      {{"t", {256}, 10, 0}, "tensor 't' has the type Q2_K, which is not read here"},
      {{"t", {256}, 1000, 0}, "tensor 't' has the type 1000, which is not read here"},
      {{"t", {48}, kQ4_1, 0}, "rows of 48 elements, not a multiple of the 32"},
      {{"t", {8}, kF32, 4}, "not a multiple of the alignment 32"},
      {{"t", {9}, kF32, 0}, "the file is truncated"},
      {{"t", {8}, kF32, 32}, "the file is truncated"},
      {{"t", {1}, kF32, std::numeric_limits<uint64_t>::max() - 31}, "the file is truncated"},
  };
  for (const Case &bad : cases) {
    GgufBuilder builder;
    builder.tensors = {bad.tensor};
    builder.data = std::string(32, '\0');
    CHECK_THROWS(Error, parse(builder.build()), bad.message);
  }
  GgufBuilder twice;
  twice.tensors = {{"t", {8}, kF32, 0}, {"t", {8}, kF32, 0}};
  twice.data = std::string(32, '\0');
  CHECK_THROWS(Error, parse(twice.build()), "tensor 't' appears twice");
}

std::vector<float> decode(TensorType type, const std::string &block, uint64_t elements) {
  std::vector<float> values(elements);
  dequantize(type, reinterpret_cast<const std::byte *>(block.data()), elements, values.data());
  return values;
}

// Five bits: element i below 16 is i, above 31 - i, of which the fifth bit is one.
void decodes_five_bits() {
  const std::string half = GgufBuilder::number(uint16_t{0x3800});   // 0.5
  const std::string three = GgufBuilder::number(uint16_t{0x4200});  // 3
  const std::string fifth("\x00\x00\xFF\xFF", 4);
  std::string nibbles;
  for (int i = 0; i < 16; ++i) nibbles += static_cast<char>(i | (15 - i) << 4);
  const std::vector<float> q5_0 = decode(TensorType::kQ5_0, half + fifth + nibbles, 32);
  const std::vector<float> q5_1 = decode(TensorType::kQ5_1, half + three + fifth + nibbles, 32);
  for (int i = 0; i < 32; ++i) {
    const int code = i < 16 ? i : 47 - i;
    CHECK_EQUAL(q5_0[i], 0.5F * static_cast<float>(code - 16));
    CHECK_EQUAL(q5_1[i], 0.5F * static_cast<float>(code) + 3);
  }
}

// Scales are 1, then 3 + 16; offsets 2, then 5 + 2 * 16; codes 12 and 9 in turns.
void decodes_superblocks() {
  const std::string half = GgufBuilder::number(uint16_t{0x3800});   // 0.5
  const std::string three = GgufBuilder::number(uint16_t{0x4200});  // 3
  const std::string packed =
      std::string(4, '\x41') + std::string(4, '\x82') + std::string(4, '\x53');
  const std::string pairs(128, '\x9C');
  const std::string head = half + three + packed;
  const std::vector<float> q4_k = decode(TensorType::kQ4_K, head + pairs, 256);
  // The first four groups have the fifth bit.
  const std::string fifth(32, '\x0F');
  const std::vector<float> q5_k = decode(TensorType::kQ5_K, head + fifth + pairs, 256);
  // High bits 0, 1, 2, 3 in turns; scales -8 to 7.
  std::string scales;
  for (int i = -8; i < 8; ++i) scales += static_cast<char>(i);
  const std::string q6 = pairs + std::string(64, '\xE4') + scales + half;
  const std::vector<float> q6_k = decode(TensorType::kQ6_K, q6, 256);
  for (int i = 0; i < 256; ++i) {
    const int group = i / 32;
    const int code = group % 2 == 0 ? 12 : 9;
    const auto scale = static_cast<float>(group < 4 ? 1 : 19) * 0.5F;
    const auto offset = static_cast<float>(group < 4 ? 2 : 37) * 3.0F;
    CHECK_EQUAL(q4_k[i], scale * static_cast<float>(code) - offset);
    CHECK_EQUAL(q5_k[i], scale * static_cast<float>(code + (group < 4 ? 16 : 0)) - offset);
    const int six = (i % 128 < 64 ? 12 : 9) + 16 * (i % 128 / 32);
    CHECK_EQUAL(q6_k[i], 0.5F * static_cast<float>((i / 16 - 8) * (six - 32)));
  }
}

// What is in a byte: 1, 0, -1, 1, 0 in base 3; -1, 0, 1, 2 in two bits each.
void decodes_ternary_blocks() {
  const std::string half = GgufBuilder::number(uint16_t{0x3800});  // 0.5
  // ceil(256 (2 / 3 + 1 / 9 + 0 / 27 + 2 / 81 + 1 / 243)), and 256 (0.212 in base 3).
  const std::string fives(48, static_cast<char>(207));
  const std::string fours(4, static_cast<char>(207));
  const std::vector<float> tq1_0 = decode(TensorType::kTQ1_0, fives + fours + half, 256);
  const std::vector<float> tq2_0 = decode(TensorType::kTQ2_0, std::string(64, '\xE4') + half, 256);
  const std::vector<float> q2_0 = decode(TensorType::kQ2_0, half + std::string(16, '\xE4'), 64);
  constexpr float kDigits[] = {0.5F, 0, -0.5F, 0.5F, 0};
  for (int i = 0; i < 256; ++i) {
    const int digit = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    CHECK_EQUAL(tq1_0[i], kDigits[digit]);
    CHECK_EQUAL(tq2_0[i], 0.5F * static_cast<float>(i % 128 / 32 - 1));
    if (i < 64) CHECK_EQUAL(q2_0[i], 0.5F * static_cast<float>(i % 4 - 1));
  }
}

// Codes of two blocks, then what scales them and must be there.
void reads_ternary_tensors_with_their_scale() {
  const auto file = [](size_t bytes) {
    GgufBuilder builder;
    builder.tensors = {{"t", {128, 2}, 36, 0}};
    // Codes 0, 1, 2 and 0; 2, 2, 1 and 3.
    builder.data = std::string(32, '\x18') + std::string(32, '\xA7');
    builder.data += GgufBuilder::number(0.75F) + std::string(28, '\x7F');
    builder.data.resize(bytes);
    return builder.build();
  };
  const std::string whole = file(96);
  const Gguf gguf = parse(whole);
  const GgufTensor &tensor = gguf.tensor("t", {2, 128});
  CHECK_EQUAL(tensor.bytes, 64U);
  CHECK_EQUAL(tensor.scale, 0.75F);
  std::vector<float> values(256);
  tensor.decode(0, 128, values.data());
  tensor.decode(128, 128, values.data() + 128);
  constexpr float kFirst[] = {-0.75F, 0, 0.75F, -0.75F};
  constexpr float kSecond[] = {0.75F, 0.75F, 0, 1.5F};
  for (int i = 0; i < 128; ++i) {
    CHECK_EQUAL(values[i], kFirst[i / 32]);
    CHECK_EQUAL(values[128 + i], kSecond[i / 32]);
  }
  CHECK_THROWS(Error, parse(file(95)), "needs 96 bytes");
}

void decodes_blocks() {
  const std::string half = GgufBuilder::number(uint16_t{0x3800});   // 0.5
  const std::string three = GgufBuilder::number(uint16_t{0x4200});  // 3
  std::string nibbles;
  for (int i = 0; i < 16; ++i) nibbles += static_cast<char>(i | (15 - i) << 4);
  std::vector<float> q4_0(32);
  std::vector<float> q4_1(32);
  for (int i = 0; i < 16; ++i) {
    q4_0[i] = 0.5F * static_cast<float>(i - 8);
    q4_0[i + 16] = 0.5F * static_cast<float>(7 - i);
    q4_1[i] = 0.5F * static_cast<float>(i) + 3;
    q4_1[i + 16] = 0.5F * static_cast<float>(15 - i) + 3;
  }
  CHECK_EQUAL(decode(TensorType::kQ4_0, half + nibbles, 32), q4_0);
  CHECK_EQUAL(decode(TensorType::kQ4_1, half + three + nibbles, 32), q4_1);

  std::string bytes;
  std::vector<float> q8_0(32);
  for (int i = 0; i < 32; ++i) {
    const int quant = i == 0 ? -128 : i == 31 ? 127 : 3 * i - 40;
    bytes += static_cast<char>(quant);
    q8_0[i] = 0.5F * static_cast<float>(quant);
  }
  CHECK_EQUAL(decode(TensorType::kQ8_0, half + bytes, 32), q8_0);
  CHECK_EQUAL(decode(TensorType::kF16, half + three, 2), (std::vector<float>{0.5F, 3}));
  CHECK_EQUAL(decode(TensorType::kBF16, GgufBuilder::number(uint16_t{0xC040}), 1),
              (std::vector<float>{-3}));
}

// Every f16 survives the way to f32 and back, and rounding is to the nearest, ties to even.
void converts_half_precision() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f16_to_f32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      CHECK(std::isnan(f16_to_f32(f32_to_f16(value))));
    } else {
      CHECK_EQUAL(f32_to_f16(value), bits);
    }
  }
  struct Case {
    float value;
    uint16_t f16;
    uint16_t bf16;
  };
  const Case cases[] = {
      {1.0F, 0x3C00, 0x3F80},
      {-2.0F, 0xC000, 0xC000},
      {65504.0F, 0x7BFF, 0x4780},
      {65519.9F, 0x7BFF, 0x4780},
      {65520.0F, 0x7C00, 0x4780},
      {0x1p-25F, 0x0000, 0x3300},         // half of the least subnormal: to even, 0
      {0x1.000002p-25F, 0x0001, 0x3300},  // just above it
      {0x1.002p0F, 0x3C00, 0x3F80},       // half way between 1 and the next f16: to even
      {0x1.006p0F, 0x3C02, 0x3F80},       // half way again, to even upwards
      {0x1.01p0F, 0x3C04, 0x3F80},        // half way between 1 and the next bf16: to even
      {0x1.03p0F, 0x3C0C, 0x3F82},        // half way again, to even upwards
      {std::numeric_limits<float>::infinity(), 0x7C00, 0x7F80},
  };
  for (const Case &test : cases) {
    CHECK_EQUAL(f32_to_f16(test.value), test.f16);
    CHECK_EQUAL(f32_to_bf16(test.value), test.bf16);
  }
  CHECK((f32_to_bf16(std::nanf("")) & 0x7FFF) > 0x7F80);
}

void encodes_what_it_decodes() {
  const std::vector<float> values = {0.5F, -3.0F, 1024.0F};
  for (const TensorType type : {TensorType::kF32, TensorType::kF16, TensorType::kBF16}) {
    std::vector<std::byte> bytes(values.size() * block_layout(static_cast<uint32_t>(type)).bytes);
    encode(values.data(), values.size(), type, bytes.data());
    std::vector<float> decoded(values.size());
    dequantize(type, bytes.data(), values.size(), decoded.data());
    CHECK_EQUAL(decoded, values);
  }
  std::byte unused;
  CHECK_THROWS(Error, encode(values.data(), 0, TensorType::kQ4_0, &unused), "quantising");
}

// Quotients are within half of the scale, which is the greatest magnitude by 127; zeros stay.
void quantises_to_eight_bits() {
  std::vector<float> values(64);
  for (size_t i = 0; i < 32; ++i) values[i] = static_cast<float>(i) - 20.0F;
  std::vector<std::byte> bytes(2 * 34);
  encode(values.data(), values.size(), TensorType::kQ8_0, bytes.data());
  std::vector<float> decoded(values.size());
  dequantize(TensorType::kQ8_0, bytes.data(), values.size(), decoded.data());
  for (size_t i = 0; i < 32; ++i) {
    CHECK(std::fabs(decoded[i] - values[i]) <= 20.0F / 127.0F * 0.51F);
    CHECK_EQUAL(decoded[32 + i], 0.0F);
  }
  CHECK(std::fabs(decoded[0] + 20.0F) < 0.01F);
}

void writes_what_it_reads() {
  GgufBuilder builder = small_file();
  const std::string file = builder.build();
  const Gguf source = parse(file);
  char path[] = "/tmp/gguf_test_XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  close(fd);

  GgufWriter writer;
  for (const GgufEntry &entry : source.entries()) writer.copy(entry);
  writer.set("general.type", std::string("adapter"));
  writer.set("adapter.lora.alpha", 16.0F);
  writer.set("general.file_type", 1U);
  const std::vector<uint64_t> shape = {3, 2};
  const auto count_up = [](uint64_t first, uint64_t count, float *values) {
    for (uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>(first + i);
  };
  writer.add_tensor("a", shape, TensorType::kF32, count_up);
  writer.add_tensor("long", {300000}, TensorType::kBF16, count_up);
  writer.add_tensor("blocks", {2, 64}, TensorType::kQ8_0, count_up);
  CHECK_THROWS(Error, writer.add_tensor("c", shape, TensorType::kQ8_0, count_up), "rows of 2");
  uint64_t written = 0;
  writer.write(path, [&](uint64_t bytes) { written += bytes; });
  CHECK_EQUAL(written, writer.data_bytes());

  const Gguf copy = Gguf::open(path);
  CHECK_EQUAL(copy.get_string("general.architecture"), std::string("llama"));
  CHECK_EQUAL(copy.get_ints("numbers"), (std::vector<int64_t>{1, -2, 3}));
  CHECK_EQUAL(copy.get_strings("names"), (std::vector<std::string>{"a", "", "c d"}));
  CHECK_EQUAL(copy.get_float("adapter.lora.alpha"), 16.0);
  CHECK_EQUAL(copy.get_uint("general.file_type"), 1U);
  CHECK_EQUAL(copy.entries().size(), source.entries().size() + 3);
  const GgufTensor &a = copy.tensor("a", shape);
  std::vector<float> values(a.elements);
  dequantize(a.type, a.data, a.elements, values.data());
  CHECK_EQUAL(values, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  const GgufTensor &wide = copy.tensor("long", {300000});
  values.resize(wide.elements);
  dequantize(wide.type, wide.data, wide.elements, values.data());
  CHECK_EQUAL(values[299999], bf16_to_f32(f32_to_bf16(299999.0F)));

  // What fails on the way leaves the file that was there, and nothing beside it.
  GgufWriter failing;
  failing.add_tensor("a", {1}, TensorType::kF32,
                     [](uint64_t, uint64_t, float *) { throw Error("no more"); });
  CHECK_THROWS(Error, failing.write(path, [](uint64_t) {}), "no more");
  CHECK_EQUAL(Gguf::open(path).tensors().size(), size_t{3});
  CHECK(access((std::string(path) + ".partial").c_str(), F_OK) != 0);
  CHECK_THROWS(Error, writer.write("/nowhere/a.gguf", [](uint64_t) {}), "cannot create");
  CHECK_THROWS(Error, OutputFile("/dev/full/x"), "cannot create");
  std::remove(path);
}

}  // namespace
}  // namespace llm

int main() {
  llm::reads_what_was_written();
  llm::maps_a_file();
  llm::names_what_is_asked_for_wrongly();
  llm::refuses_truncated_files();
  llm::survives_corrupted_bytes();
  llm::refuses_bad_headers();
  llm::refuses_bad_metadata();
  llm::refuses_bad_tensors();
  llm::decodes_five_bits();
  llm::decodes_superblocks();
  llm::decodes_ternary_blocks();
  llm::reads_ternary_tensors_with_their_scale();
  llm::decodes_blocks();
  llm::converts_half_precision();
  llm::encodes_what_it_decodes();
  llm::quantises_to_eight_bits();
  llm::writes_what_it_reads();
  return check::result();
}
