// Blocks of which one waits for another run on threads of their own, or one after the other.
#pragma once

#include <cstdint>
#include <thread>

namespace unsloth {

inline void store_tag(uint64_t *to, uint64_t tag) { __atomic_store_n(to, tag, __ATOMIC_RELEASE); }

inline void await_tag(const uint64_t *from, uint64_t tag) {
  while (__atomic_load_n(from, __ATOMIC_ACQUIRE) != tag) std::this_thread::yield();
}

}  // namespace unsloth
