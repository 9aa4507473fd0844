// Shapes of blocks: the data that the kernels are instantiated from, and what follows from it.
#pragma once

namespace unsloth {

struct DecodeConfig {
  int head_dim;  // of Q, K, V and O
  int warps;     // that compute; each has its own keys of a tile
  int tile;      // keys of a step: a multiple of 16 for each warp
  int entries;   // tiles of K or of V that memory may be asked for at a time
  int blocks;    // on a multiprocessor
};

constexpr int kRows = 16;       // query rows of a block: those of a fragment
constexpr int kSlice = 16;      // keys of a fragment
constexpr int kChunk = 64;      // columns of one 128-byte swizzled chunk
constexpr int kItems = 2;       // pieces of work that are known ahead, with their queries
constexpr int kWalkParts = 64;  // parts of a batch, the tiles of which are summed up

consteval int threads(const DecodeConfig &c) { return (c.warps + 1) * 32; }
consteval int slices(const DecodeConfig &c) { return c.tile / (kSlice * c.warps); }
// Rows end with units that keep their neighbours in other banks.
consteval int q_pitch(const DecodeConfig &c) { return c.head_dim + 8; }
consteval int o_pitch(const DecodeConfig &c) { return c.head_dim + 8; }
// The weights of a pair's parts take the place of its blocks' O.
consteval int most_blocks(const DecodeConfig &c) { return c.warps * o_pitch(c); }

//                                    d    warps tile entries blocks
constexpr DecodeConfig kDecode64 = {64, 4, 128, 12, 1};
constexpr DecodeConfig kDecode128 = {128, 4, 64, 10, 1};
constexpr DecodeConfig kDecode256 = {256, 4, 64, 4, 1};

}  // namespace unsloth
