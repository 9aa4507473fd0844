// Tile shapes, and what follows from them.
#pragma once

#include "contract.h"

namespace unsloth {

constexpr int kBlockM = 64;  // queries of a block
template <int D>
constexpr int kStep = D <= 64 ? 2 * kBlockM : kBlockM;  // queries of a step of consumer.cuh
constexpr int kBlockN = 128;  // keys of a block, 64 for each of two warpgroups
template <int D>
constexpr int kKeys = D > 128 ? 64 : kBlockN;  // roles.cuh: the same 64 for both
constexpr int kStages = 2;                     // buffers for what two steps have apart
constexpr int kChunk = 64;                     // columns of one 128-byte swizzled chunk
template <int D>
constexpr int kPadded = (D + kChunk - 1) / kChunk * kChunk;  // columns as they lie in memory
constexpr int kThreads = 384;
// Blocks of threads that add to the same sums of dQ, each its columns: orders in which they do.
template <int D>
constexpr int kOrders = D > 128 ? 2 : 1;
constexpr int kMostLead = 2;      // see Steps::lead
constexpr int kLastBlocks = 264;  // about two for each multiprocessor
constexpr int kRunBlocks = 128;   // about one, and a power of two as heads and batches often are

// Registers per thread after the hand-over from producer to consumers.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
// A block is launched with as many registers as divide evenly, in eights; who waits for more than
// are given back waits for ever.
static_assert(kProducerRegisters * 128 + kConsumerRegisters * 256 <=
              65536 / kThreads / 8 * 8 * kThreads);

// Named barriers (0 is the block's).
enum : int {
  kBarrierConsumers = 1,                    // of turns, that of each second one
  kBarrierDqFull = 2,                       // and the next: of each warpgroup
  kBarrierDqEmpty = kBarrierDqFull + 2,     // likewise
  kBarrierOtherTurn = kBarrierDqEmpty + 2,  // that of the turns between
  kBarrierRowsCleared,
  kBarrierArrival,  // of two warps of producers (sums.cuh)
  kBarrierAdded     // likewise
};
constexpr int kDqThreads = 128 + 32;  // a warpgroup, and the warp that sends its dQ

}  // namespace unsloth
