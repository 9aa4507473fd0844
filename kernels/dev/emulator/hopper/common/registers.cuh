// There are as many registers as anybody wants.
#pragma once

namespace unsloth {

template <int kRegisters>
void release_registers_to() {}

template <int kRegisters>
void acquire_registers_to() {}

}  // namespace unsloth
