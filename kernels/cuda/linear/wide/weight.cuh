// What a lane has of a weight as the left-hand side of wgmma.
#pragma once

#include <cstdint>

namespace unsloth {

// Rows of the weight of a tile: columns of the output.
constexpr int kColumns = 128;
// What of a row of x is multiplied between two waits: half a step, 128 bytes, of which a product
// takes 32; the registers of a lane's two rows of the weight for them.
constexpr int kHalfBytes = 128, kChunks = kHalfBytes / 32, kLeft = 4 * kChunks;
// The same in weights, by an x of 16 bits.
constexpr int kHalf = kHalfBytes / 2;

// Of 16 neighbours, a byte each, the pairs 2 t and 8 + 2 t: `at` is that of the first.
__device__ __forceinline__ uint32_t four_of_sixteen(const uint8_t *at) {
  const uint32_t low = *reinterpret_cast<const uint16_t *>(at);
  const uint32_t high = *reinterpret_cast<const uint16_t *>(at + 8);
  return low | high << 16;
}

}  // namespace unsloth
