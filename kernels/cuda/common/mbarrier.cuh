// Transaction barriers in shared memory (mbarrier).
//
// A barrier completes a phase when its expected arrivals and its expected bytes have both come; the
// phase's parity then flips. Waiting for parity p returns once the phase of parity p has completed,
// so a wait for parity 1 on a fresh barrier returns at once: a producer, which starts by waiting
// for "empty", uses that to pass through its first round.
#pragma once

#include <cstdint>

#include "jitter.cuh"
#include "memory.cuh"

namespace unsloth {

struct alignas(8) Mbarrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals)
                 : "memory");
  }

  // Releases: what the thread did before is visible to whoever waits for this phase.
  __device__ __forceinline__ void arrive() {
    jitter();
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this))
                 : "memory");
  }

  // Arrives and adds to the bytes the phase waits for; TMA takes them off as it delivers.
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    jitter();
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }

  __device__ __forceinline__ bool try_wait(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done != 0;
  }

  __device__ __forceinline__ void wait(uint32_t parity) {
    jitter();
#ifdef UNSLOTH_BOUNDED_WAIT  // debugging: wrong results rather than a hang
    for (uint32_t spins = 0; !try_wait(parity) && spins < (1u << 20); ++spins) {
    }
#else
    while (!try_wait(parity)) {
    }
#endif
  }
};

// Makes freshly initialised barriers visible to the asynchronous proxy; a block barrier must
// follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A position in a ring of kStages buffers: which one, and the parity of the current round.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace unsloth
