// Many groups that are held by threads (held.cuh), one after another. What threads do with one
// takes longer than its bytes need from memory, so that the next ones are on their way meanwhile.
#pragma once

#include "common/async_copy.cuh"
#include "quantize/held.cuh"

namespace unsloth {

// In shared memory.
struct InTurnShared {
  // Each thread reads what it asked for itself.
  uint4 ring[kQuantizeHeld][kThreads];
  OfWarps of_warps;
};

// `kCount`: vectors of a group that a thread has at most.
template <class T, uint32_t kCount>
class InTurn {
 public:
  __device__ __forceinline__ InTurn(const Arguments &p, uint4 *dynamic)
      : p_(p),
        shared_(*reinterpret_cast<InTurnShared *>(dynamic)),
        holders_(p, shared_.of_warps),
        end_(first_of(group_of(p) + 1)) {}

  __device__ __forceinline__ void run() {
    uint32_t group = first_of(group_of(p_)), asked = group;
    await_previous_kernel();
#pragma unroll
    for (uint32_t slot = 0; slot < kAhead; slot++) ask(slot, asked++);
    uint32_t slot = 0;
#pragma unroll 1
    for (; group < end_; group++) {
      // The oldest has come.
      await_copies<kAhead - 1>();
      holders_.template round<kCount>(group, Place<T>(p_, group).out,
                                      [&](uint32_t j) { return place(slot, j); });
      ask(slot, asked++);
      slot = slot + 1 < kAhead ? slot + 1 : 0;
    }
  }

 private:
  static constexpr uint32_t kAhead = kQuantizeHeld / kCount;

  // The first group of some threads, where the launch's threads have as many each or one more.
  // Those with more are spread: blocks of like numbers may be on one multiprocessor.
  __device__ __forceinline__ uint32_t first_of(uint32_t threads) const {
    const uint32_t all = gridDim.x * groups_of_block(p_), groups = p_.num_rows * p_.groups;
    const uint32_t each = groups / all;
    return threads * each + threads * (groups - each * all) / all;
  }

  __device__ __forceinline__ uint4 &place(uint32_t slot, uint32_t j) const {
    return shared_.ring[slot * kCount + j][threadIdx.x];
  }

  // Asks for a group, if there is one. Behind its end there are zeros.
  __device__ __forceinline__ void ask(uint32_t slot, uint32_t group) const {
    if (group < end_) {
      const uint4 *from = reinterpret_cast<const uint4 *>(Place<T>(p_, group).x);
#pragma unroll
      for (uint32_t j = 0; j < kCount; j++) {
        const bool is_there = holders_.is_there(j);
        start_copy_or_zeros(&place(slot, j), from + (is_there ? holders_.index(j) : 0), is_there);
      }
    }
    commit_copies();
  }

  const Arguments &p_;
  InTurnShared &shared_;
  const Holders<T> holders_;
  const uint32_t end_;
};

// Rounds all groups.
template <class T>
__device__ __forceinline__ void round_in_turn(const Arguments &p, uint4 *dynamic) {
  const uint32_t vectors = p.length / Vector<T>::kWidth, threads = p.warps * 32;
  if (vectors <= threads) {
    InTurn<T, 1>(p, dynamic).run();
  } else if (vectors <= 2 * threads) {
    InTurn<T, 2>(p, dynamic).run();
  } else if (vectors <= 4 * threads) {
    InTurn<T, 4>(p, dynamic).run();
  } else {
    InTurn<T, kQuantizeHeld>(p, dynamic).run();
  }
}

}  // namespace unsloth
