#include "export.h"

#include <map>
#include <utility>
#include <vector>

#include "gguf_writer.h"
#include "progress.h"

namespace llm {
namespace {

// Of GGUF's `general.file_type`.
uint32_t file_type(TensorType type) {
  switch (type) {
    case TensorType::kF16:
      return 1;
    case TensorType::kQ8_0:
      return 7;
    case TensorType::kBF16:
      return 32;
    default:
      return 0;
  }
}

// Elements of a tensor on the device.
void download(const Context &context, const unsloth_tensor &tensor, uint64_t first, uint64_t count,
              float *values) {
  const size_t element = element_size(tensor.dtype);
  std::vector<std::byte> bytes(count * element);
  check(unsloth_memory_copy(context.get(), bytes.data(),
                            static_cast<const char *>(tensor.data) + first * element, bytes.size(),
                            UNSLOTH_COPY_KIND_DEVICE_TO_HOST, context.stream()));
  context.synchronize();
  dequantize(tensor_type(tensor.dtype), bytes.data(), count, values);
}

GgufWriter::Source from_file(const GgufTensor &tensor) {
  return [&tensor](uint64_t first, uint64_t count, float *values) {
    tensor.decode(first, count, values);
  };
}

void write(const GgufWriter &writer, const std::string &path) {
  ProgressBar bar("writing " + path, writer.data_bytes());
  writer.write(path, [&bar](uint64_t bytes) { bar.advance(bytes); });
}

}  // namespace

void write_model(const std::string &path, const Gguf &gguf, const std::vector<Trained> &all,
                 TensorType type) {
  GgufWriter writer;
  for (const GgufEntry &entry : gguf.entries()) {
    if (entry.key != "general.file_type") writer.copy(entry);
  }
  writer.set("general.file_type", file_type(type));

  // What was not trained is taken from the file, which may have it more exactly.
  std::map<std::string, GgufWriter::Source> trained;
  for (const Trained &one : all) {
    const Context &context = *one.context;
    if (one.lora == nullptr) {
      for (const FileTensor &tensor : one.weights->file_tensors()) {
        trained[tensor.name] = [&context, &tensor](uint64_t first, uint64_t count, float *values) {
          download(context, tensor.tensor, first, count, values);
        };
      }
      continue;
    }
    Lora *const lora = one.lora;
    for (const Lora::Merged &merged : lora->merged_tensors()) {
      trained[merged.name] = [&context, lora, merged](uint64_t first, uint64_t count,
                                                      float *values) {
        if (first == 0) lora->merge(merged.layer);
        download(context, merged.tensor, first, count, values);
      };
    }
  }
  for (const GgufTensor &tensor : gguf.tensors()) {
    const auto found = trained.find(tensor.name);
    writer.add_tensor(tensor.name, tensor.shape, tensor.shape.size() > 1 ? type : TensorType::kF32,
                      found != trained.end() ? found->second : from_file(tensor));
  }
  write(writer, path);
}

void write_adapter(const std::string &path, const Gguf &gguf, const std::vector<Trained> &all) {
  GgufWriter writer;
  writer.set("general.architecture", gguf.get_string("general.architecture"));
  writer.set("general.type", std::string("adapter"));
  writer.set("general.name", gguf.get_string("general.name", "unnamed") + " LoRA");
  writer.set("general.file_type", file_type(TensorType::kF32));
  writer.set("adapter.type", std::string("lora"));
  writer.set("adapter.lora.alpha", static_cast<float>(all[0].lora->options().alpha));
  for (const Trained &one : all) {
    const Context &context = *one.context;
    for (const FileTensor &tensor : one.lora->file_tensors()) {
      writer.add_tensor(tensor.name, tensor.shape, TensorType::kF32,
                        [&context, &tensor](uint64_t first, uint64_t count, float *values) {
                          download(context, tensor.tensor, first, count, values);
                        });
    }
  }
  write(writer, path);
}

}  // namespace llm
