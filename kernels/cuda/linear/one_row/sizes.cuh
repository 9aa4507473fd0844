// How a block of threads is parted, and a row of the weight.
#pragma once

#include "linear/blocks/units.cuh"

namespace unsloth {

// Warps that multiply, and those that copy.
constexpr uint32_t kWarps = 16, kAskers = 2;
// Their threads, and all.
constexpr uint32_t kMultipliers = 32 * kWarps, kThreads = kMultipliers + 32 * kAskers;
constexpr uint32_t kSharedBytes = 227 * 1024;
// Neighbouring weights of a row that a warp multiplies at a time, and how many of them are copied
// together.
constexpr uint32_t kStep = 256, kSteps = 8;
// Barriers: of those that multiply, and of all.
constexpr int kAmongMultipliers = 1, kReady = 2;
// Units of 32 neighbours: of a step, and of a quad, whose products go to columns of their own.
constexpr uint32_t kUnits = kStep / 32, kQuad = 4;

// A chunk of a tile in shared memory.
template <Blocks kBlocks>
struct Chunk {
  using F = Format<kBlocks>;
  static constexpr uint32_t kStepBytes = kStep / F::kLength * F::kBytes;
  static constexpr uint32_t kBytes = kSteps * kStepBytes;
  // From row to row: the same words of eight of them lie in different banks.
  static constexpr uint32_t kPitch = kBytes + (kBytes % 128 == 16 ? 32 : 16);
  static_assert(kPitch % 16 == 0 && (kPitch / 4 % 32 == 4 || kPitch / 4 % 32 == 12));
  static constexpr uint32_t kSlotBytes = kColumns * kPitch;
};

}  // namespace unsloth
