// Transaction barriers, on the host.
#pragma once

#include "jitter.cuh"
#include "memory.cuh"

namespace unsloth {

struct alignas(8) Mbarrier {
  machine::Barrier state;

  void init(uint32_t arrivals) { state = {0, arrivals, arrivals, 0}; }
  void arrive() { machine::block->arrive(state); }
  void arrive_expect(uint32_t bytes) {
    state.bytes += bytes;
    arrive();
  }
  bool try_wait(uint32_t parity) { return state.phase != (parity & 1); }
  void wait(uint32_t parity) { machine::block->wait(state, parity); }
};

inline void fence_mbarrier_init() {}

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace unsloth
