// Shapes of blocks: the data that the kernels are instantiated from, and what follows from it.
#pragma once

namespace unsloth {

struct DecodeConfig {
  int head_dim;  // of Q, K, V and O
  int heads;     // of keys that are read together: a token's lie side by side
  int warps;     // that compute, as many for each head; each has its own keys of a tile
  int tile;      // keys of a step: a multiple of 16 for each warp
  int entries;   // tiles of K or of V that memory may be asked for at a time
  int blocks;    // on a multiprocessor
  bool codes;    // K and V are codes of 8-bit floats (e4m3)
};

constexpr int kRows = 16;       // query rows of a block and head: those of a fragment
constexpr int kSlice = 16;      // keys of a fragment
constexpr int kItems = 2;       // pieces of work that are known ahead, with their queries
constexpr int kWalkParts = 64;  // parts of a batch, the tiles of which are summed up

consteval int threads(const DecodeConfig &c) { return (c.warps + 1) * 32; }
consteval int warps_of_head(const DecodeConfig &c) { return c.warps / c.heads; }
consteval int slices(const DecodeConfig &c) { return c.tile / (kSlice * warps_of_head(c)); }
consteval int element_bytes(const DecodeConfig &c) { return c.codes ? 1 : 2; }
consteval int row_bytes(const DecodeConfig &c) { return c.head_dim * element_bytes(c); }
// Of a row in shared memory: what a swizzle spans. Longer rows are in several chunks.
consteval int chunk_bytes(const DecodeConfig &c) { return row_bytes(c) < 128 ? 64 : 128; }
consteval int chunks(const DecodeConfig &c) { return row_bytes(c) / chunk_bytes(c); }
// Whether a block reads at least 256 neighbouring bytes of a token. Keys and values of shorter
// pieces are not marked as read once, and in pages the first keys are not asked for before the
// queries. Both were slower, beside a fault that is mended; they were not timed again (LADDER.md).
consteval bool reads_long_pieces(const DecodeConfig &c) { return c.heads * row_bytes(c) >= 256; }
// Rows end with units that keep their neighbours in other banks.
consteval int q_pitch(const DecodeConfig &c) { return c.head_dim + 8; }
consteval int o_pitch(const DecodeConfig &c) { return c.head_dim + 8; }

// Those with several heads read 256 bytes of a token: as many streams as there are heads, each of
// short rows, would keep memory busy with opening pages. More entries than these make the ends of
// blocks lie further apart (LADDER.md). Two small blocks of a multiprocessor hide each other's
// begins and ends, of which a batch of many sequences has many.
//                                         d    heads warps tile entries blocks codes
// clang-format off
constexpr DecodeConfig kDecode64 =       { 64,  1,    8,    128, 6,      1,     false};
constexpr DecodeConfig kDecode64Heads =  { 64,  2,    8,    128, 3,      1,     false};
constexpr DecodeConfig kDecode128 =      {128,  1,    8,    128, 3,      1,     false};
constexpr DecodeConfig kDecode128Many =  {128,  1,    4,    64,  4,      2,     false};
constexpr DecodeConfig kDecode256 =      {256,  1,    4,    64,  4,      1,     false};
constexpr DecodeConfig kCodes64 =        { 64,  1,    8,    256, 5,      1,     true};
constexpr DecodeConfig kCodes64Heads =   { 64,  4,    8,    128, 3,      1,     true};
constexpr DecodeConfig kCodes128 =       {128,  1,    8,    256, 3,      1,     true};
constexpr DecodeConfig kCodes128Heads =  {128,  2,    8,    128, 3,      1,     true};
constexpr DecodeConfig kCodes256 =       {256,  1,    4,    128, 3,      1,     true};
// clang-format on

}  // namespace unsloth
