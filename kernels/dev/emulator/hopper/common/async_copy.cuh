// Copies that a thread does not wait for, on the host: a group is copied as late as it may, when it
// is waited for.
#pragma once

#include "memory.cuh"

namespace unsloth {

inline void start_copy(void *to, const void *from) {
  if (uintptr_t(to) % 16 != 0 || uintptr_t(from) % 16 != 0) {
    machine::block->fail("a misaligned copy");
  }
  machine::Thread &thread = machine::block->self();
  thread.late.push_back({to, from, thread.late_groups});
}

inline void fetch_line(const void *) {}

inline void commit_copies() { machine::block->self().late_groups++; }

template <int kLater>
void await_copies() {
  machine::Thread &thread = machine::block->self();
  std::erase_if(thread.late, [&](const machine::Late &copy) {
    const bool waited_for = copy.group + kLater < thread.late_groups;
    if (waited_for) memcpy(copy.to, copy.from, 16);
    return waited_for;
  });
}

}  // namespace unsloth
