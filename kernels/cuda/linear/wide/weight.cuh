// What a lane has of a weight as the left-hand side of wgmma, and how many threads multiply.
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

// Threads of a pair of warpgroups, which multiply all rows of the weight of a tile.
constexpr int kPair = 256;
// Rows of x up to which blocks of a cluster give each other all their sums.
constexpr int kFewRows = 64;
// Whether each warp multiplies by itself (`mma`): tiles of 16 rows of x, of which `wgmma` would
// multiply 32 (by_warps.cuh).
template <class Weight, int kRows>
constexpr bool kByWarps = Weight::kOfCodes && kRows == 16;
// Threads of a block that multiply.
template <class Weight, int kRows>
constexpr int kConsumers = kByWarps<Weight, kRows> ? 2 * kPair : kPair;

}  // namespace unsloth
