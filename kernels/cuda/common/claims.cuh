// Work that persistent blocks take from a counter, so that those that memory serves sooner do more
// of it: the first piece of each follows from its place in the grid, all others are claimed.
//
// The counter is two words of the caller's memory, aligned to 16 bytes, that may hold anything.
// What tells that it has been set to zero for this launch is a tag that no other launch has, so
// whoever comes first sets it, at no cost of time, and a launch needs no other before it. The tag
// is in both words, lest either be overwritten alone.
//
// A launch that a graph repeats has the tag that it had, and finds the count that the last claim
// left: zero.
#pragma once

#include <cstdint>

#include "common/memory.cuh"

namespace unsloth {

constexpr int kCountBits = 32;

// Before a block's first claim.
__device__ __forceinline__ void begin_claims(unsigned long long *counter, uint64_t tag) {
  const uint64_t zero = tag << kCountBits;
  uint64_t seen[2] = {0, 0};
  for (;;) {
    uint64_t old[2];
    atomic_cas_128(counter, seen, tag, zero, old);
    const bool is_set = old[0] == tag && old[1] >> kCountBits == zero >> kCountBits;
    if (is_set || (old[0] == seen[0] && old[1] == seen[1])) return;
    seen[0] = old[0];
    seen[1] = old[1];
  }
}

// How many claims there were before this one.
__device__ __forceinline__ uint32_t claim(unsigned long long *counter) {
  return static_cast<uint32_t>(atomicAdd(counter + 1, 1ull));
}

// By whoever made the last claim of all. There are as many claims as pieces of work: all but the
// blocks' first pieces are claimed, and each block that has had a piece claims once in vain.
__device__ __forceinline__ void end_claims(unsigned long long *counter, uint64_t tag) {
  counter[1] = tag << kCountBits;
}

}  // namespace unsloth
