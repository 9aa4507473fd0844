// Sums of gradients over ranks on the CPU, of one dtype and of several.
#include "reducer.h"

#include <optional>
#include <vector>

#include "check.h"
#include "quants.h"
#include "upload.h"
#include "weights.h"

namespace llm {
namespace {

constexpr unsloth_dtype kF32 = UNSLOTH_DTYPE_F32;
constexpr unsloth_dtype kBF16 = UNSLOTH_DTYPE_BF16;

// A gradient, or where it has no elements an absent one.
struct Gradient {
  unsloth_dtype dtype;
  uint64_t elements;
};

// Every sum here is exact in the dtype, and one of f32 in no other; another rank's values differ.
float value(unsloth_dtype dtype, size_t gradient, uint64_t element, int32_t rank) {
  const auto whole = static_cast<float>((3 * gradient + element) % 11 + 16 * (rank + 1));
  return dtype == kF32 ? whole + 0x1p-12F * static_cast<float>(element + 1) : whole;
}

TensorType type_of(unsloth_dtype dtype) {
  return dtype == kF32 ? TensorType::kF32 : TensorType::kBF16;
}

void adds_up(const std::vector<Gradient> &gradients, int32_t size) {
  run_ranks(UNSLOTH_BACKEND_CPU, 2, {size}, std::nullopt,
            [&](const Context &context, const std::vector<Group> &groups) {
              const Group &group = groups[0];
              uint64_t room = 0;
              for (const Gradient &of : gradients) {
                room += aligned(of.elements * element_size(of.dtype));
              }
              Buffer memory(context, room);
              std::vector<unsloth_tensor> tensors;
              std::vector<std::byte> bytes(room);
              uint64_t used = 0;
              for (size_t i = 0; i < gradients.size(); ++i) {
                const auto [dtype, elements] = gradients[i];
                if (elements == 0) {
                  tensors.push_back({});
                  continue;
                }
                char *const data = static_cast<char *>(memory.data()) + used;
                tensors.push_back(unsloth::tensor(data, dtype, {elements}));
                std::vector<float> own(elements);
                for (uint64_t j = 0; j < elements; ++j) own[j] = value(dtype, i, j, group.rank);
                encode(own.data(), elements, type_of(dtype), bytes.data() + used);
                used += aligned(byte_count(tensors.back()));
              }
              memory.upload(bytes.data(), room);
              Reducer reducer(context, group);
              reducer.add(tensors);
              reducer.join();
              memory.download(bytes.data(), room);
              for (size_t i = 0; i < gradients.size(); ++i) {
                const auto [dtype, elements] = gradients[i];
                if (elements == 0) continue;
                const auto at = static_cast<const char *>(tensors[i].data) -
                                static_cast<const char *>(memory.data());
                std::vector<float> found(elements);
                dequantize(type_of(dtype), bytes.data() + at, elements, found.data());
                std::vector<float> sums(elements);
                for (uint64_t j = 0; j < elements; ++j) {
                  for (int32_t rank = 0; rank < size; ++rank) sums[j] += value(dtype, i, j, rank);
                }
                CHECK_EQUAL(found, sums);
              }
            });
}

}  // namespace
}  // namespace llm

int main() {
  using llm::kBF16;
  using llm::kF32;
  const std::vector<std::vector<llm::Gradient>> cases = {
      {{kF32, 5}},
      {{kBF16, 5}},
      {{kBF16, 3}, {kBF16, 0}, {kBF16, 300}, {kBF16, 1}},
      {{kF32, 0}, {kBF16, 7}, {kF32, 200}, {kF32, 9}, {kF32, 0}, {kBF16, 65}},
      {{kF32, 0}},
  };
  for (const auto &gradients : cases) {
    for (const int32_t size : {2, 3}) llm::adds_up(gradients, size);
  }
  return check::result();
}
