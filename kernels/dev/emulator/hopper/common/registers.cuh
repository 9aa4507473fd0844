// setmaxnreg, on the host, where there are as many registers as anybody wants: what is counted is
// whether a block has those that its warps ask for.
#pragma once

#include "device.h"

namespace unsloth {

template <int kRegisters>
void release_registers_to() {
  machine::block->set_registers(kRegisters);
}

template <int kRegisters>
void acquire_registers_to() {
  machine::block->set_registers(kRegisters);
}

}  // namespace unsloth
