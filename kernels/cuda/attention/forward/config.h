// Tile shapes: the data that the kernels are instantiated from, and what follows from it.
#pragma once

#include "contract.h"

namespace unsloth {

struct TileConfig {
  int head_dim;    // of Q and K
  int head_dim_v;  // of V and O
  int warpgroups;  // consumers; each owns 64 query rows
  int block_n;     // keys per step
  int stages;      // buffers for K, and as many for V
  int q_stages;  // buffers for Q, where O is staged too; with 2, Q is there before its tile starts
  bool q_registers;  // Q is held in registers: less shared memory traffic, if there is room
  bool take_turns;   // consumers issue their products in a fixed rotation ("ping-pong")
  bool early_exp;    // half of the exponentials are computed before P V is waited for
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

// Which serves what, and from which length on, is the host's choice
// (src/cuda/attention/hopper/choose.rs). `Short` tiles have fewer rows.
//                                       d    dv  wg   bn  st  qs q_reg  turns  early
// clang-format off
constexpr TileConfig kTile64 =           {64,  64,  3, 128, 2, 2, false, true,  true};
constexpr TileConfig kTile64Short =      {64,  64,  2, 128, 3, 2, true,  true,  true};
constexpr TileConfig kTile96 =           {96,  96,  2, 128, 2, 2, false, true,  true};
constexpr TileConfig kTile128 =          {128, 128, 2, 128, 2, 2, true,  true,  true};
constexpr TileConfig kTile192 =          {192, 192, 2, 64,  2, 1, false, false, true};
constexpr TileConfig kTile192V128 =      {192, 128, 2, 128, 2, 1, false, false, true};
constexpr TileConfig kTile256 =          {256, 256, 2, 64,  2, 1, false, false, true};
constexpr TileConfig kTile256Softcap =   {256, 256, 2, 80,  2, 1, false, false, true};
// clang-format on

}  // namespace unsloth
