// Tile shapes: the data that the kernels are instantiated from, and what follows from it.
#pragma once

namespace unsloth {

enum class Mask { kNone, kCausal, kWindow };

struct TileConfig {
  int head_dim;     // of Q and K
  int head_dim_v;   // of V and O
  int warpgroups;   // consumers; each owns 64 query rows
  int block_n;      // keys per step
  int stages;       // buffers for K, and as many for V
  bool own_output;  // O is staged in its own shared memory rather than in Q's
  bool take_turns;  // consumers issue their products in a fixed rotation ("ping-pong")
  int scores;       // score tiles in flight per warpgroup: 1, or 2 (the next one computes ahead)
};

constexpr int kRowsPerWarpgroup = 64;
constexpr int kChunk = 64;  // columns of one 128-byte swizzled chunk

consteval int block_m(const TileConfig &c) { return c.warpgroups * kRowsPerWarpgroup; }
consteval int threads(const TileConfig &c) { return (c.warpgroups + 1) * 128; }
consteval int chunks(int columns) { return (columns + kChunk - 1) / kChunk; }
consteval int chunk_elements(int rows, int columns) { return rows * chunks(columns) * kChunk; }

// Registers per thread after the hand-over from producer to consumers: at most 65,536 in all.
consteval int producer_registers(const TileConfig &c) { return c.warpgroups == 3 ? 32 : 40; }
consteval int consumer_registers(const TileConfig &c) { return c.warpgroups == 3 ? 160 : 232; }

//                                  d    dv  wg   bn  st  own_o  turns  scores
constexpr TileConfig kTile64 =      {64,  64,  3, 128, 2, true,  true,  1};
constexpr TileConfig kTile96 =      {96,  96,  2, 128, 2, true,  true,  1};
constexpr TileConfig kTile128 =     {128, 128, 2, 128, 2, true,  true,  1};
constexpr TileConfig kTile128Full = {128, 128, 2, 160, 2, true,  true,  1};
constexpr TileConfig kTile192 =     {192, 192, 2, 96,  2, false, false, 1};
constexpr TileConfig kTile192V128 = {192, 128, 2, 112, 2, false, false, 1};
constexpr TileConfig kTile256 =     {256, 256, 2, 80,  2, false, false, 1};

}  // namespace unsloth
