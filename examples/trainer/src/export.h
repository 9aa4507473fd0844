// Trained weights as GGUF files.
#pragma once

#include <string>

#include "config.h"
#include "device.h"
#include "gguf.h"
#include "lora.h"
#include "weights.h"

namespace llm {

// The model of `gguf` with what was trained in place of its own: matrices of `type`, the rest f32,
// metadata and tokenizer as they are. `lora` is null where the weights themselves were trained.
void write_model(const std::string &path, const Context &context, const Gguf &gguf,
                 const Weights &weights, Lora *lora, TensorType type);

// A and B by themselves, as llama.cpp's `--lora` takes them.
void write_adapter(const std::string &path, const Context &context, const Gguf &gguf,
                   const Lora &lora);

}  // namespace llm
