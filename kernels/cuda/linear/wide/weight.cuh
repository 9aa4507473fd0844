// What a lane has of a weight as the left-hand side of wgmma.
#pragma once

#include <cstdint>

namespace unsloth {

// Weights of a row that are multiplied between two waits, of which a product takes 16; registers of
// a lane's two rows of them.
constexpr int kHalf = 64, kChunks = kHalf / 16, kLeft = 4 * kChunks;

// Of 16 neighbours, a byte each, the pairs 2 t and 8 + 2 t: `at` is that of the first.
__device__ __forceinline__ uint32_t four_of_sixteen(const uint8_t *at) {
  const uint32_t low = *reinterpret_cast<const uint16_t *>(at);
  const uint32_t high = *reinterpret_cast<const uint16_t *>(at + 8);
  return low | high << 16;
}

}  // namespace unsloth
