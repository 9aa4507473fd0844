// Blocks of which one waits for another run on threads of their own, or one after the other.
#pragma once

#include <thread>

#include "tma.cuh"

namespace unsloth {

inline void await_value(const int *from, int value) {
  while (__atomic_load_n(from, __ATOMIC_ACQUIRE) != value) std::this_thread::yield();
}

inline void publish_value(int *to, int value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

inline int claim(int *to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL); }

inline void await_at_least(const int *from, int value) {
  while (__atomic_load_n(from, __ATOMIC_ACQUIRE) < value) std::this_thread::yield();
}

inline void publish_more(int *to, int value) { __atomic_fetch_add(to, value, __ATOMIC_RELEASE); }

}  // namespace unsloth
