// Words in the memory of another rank, whose kernels run in threads of their own.
#pragma once

#include <cstdint>
#include <thread>

namespace unsloth {

inline void write_marked(void *to, uint2 words, uint32_t mark) {
  const uint64_t high = static_cast<uint64_t>(mark) << 32;
  uint64_t *const pair = static_cast<uint64_t *>(to);
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) machine::block->fail("misaligned words");
  __atomic_store_n(pair, high | words.x, __ATOMIC_RELAXED);
  __atomic_store_n(pair + 1, high | words.y, __ATOMIC_RELAXED);
}

inline bool read_marked(const void *from, uint32_t mark, uint2 &words) {
  const uint64_t *const pair = static_cast<const uint64_t *>(from);
  const uint64_t first = __atomic_load_n(pair, __ATOMIC_RELAXED);
  const uint64_t second = __atomic_load_n(pair + 1, __ATOMIC_RELAXED);
  words = {static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
  const bool both = first >> 32 == mark && second >> 32 == mark;
  if (!both) std::this_thread::yield();
  return both;
}

inline uint32_t read_of_host(const uint32_t *from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}

}  // namespace unsloth
