// Rows of x in shared memory.
#pragma once

#include <cstdint>

namespace unsloth {

// Where line `line` of a row of x lies in shared memory: the same lines of neighbouring rows in
// other banks.
__device__ __forceinline__ uint32_t line_of(uint32_t row, uint32_t line) {
  return line ^ (row & 1) << 2;
}

}  // namespace unsloth
