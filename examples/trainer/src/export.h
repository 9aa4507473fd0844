// Trained weights as GGUF files.
#pragma once

#include <string>
#include <vector>

#include "agreement.h"
#include "gguf.h"

namespace llm {

// The model of `gguf` with what was trained, by one rank or some of it by each, in place of its
// own: matrices of `type`, the rest f32, metadata and tokenizer as they are.
void write_model(const std::string &path, const Gguf &gguf, const std::vector<Trained> &all,
                 TensorType type);

// A and B by themselves, as llama.cpp's `--lora` takes them.
void write_adapter(const std::string &path, const Gguf &gguf, const std::vector<Trained> &all);

}  // namespace llm
