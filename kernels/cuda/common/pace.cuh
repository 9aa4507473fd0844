// A pace at which a warp asks memory for what it copies. Memory that is asked for more than it can
// give gives less than it could (`linear/one_row/LADDER.md`).
#pragma once

#include <cstdint>

namespace unsloth {

class Pace {
 public:
  // `interval`: nanoseconds from one request to the next, or 0 for no pace.
  __device__ __forceinline__ explicit Pace(uint32_t interval) : interval_(interval), due_(now()) {}

  // Waits until the next request is due. A late one does not let those behind it come faster.
  __device__ __forceinline__ void await_turn() {
    if (interval_ == 0) return;
    uint32_t time;
    // What seems to be due later than an interval from now was due long ago: in 32 bits the time
    // begins anew every four seconds.
    do {
      time = now();
    } while (due_ - time - 1 < interval_);
    due_ = (time - due_ < interval_ ? due_ : time) + interval_;
  }

 private:
  // The device's time, whatever its clock is, in steps of 32 ns on Hopper.
  static __device__ __forceinline__ uint32_t now() {
    uint32_t nanoseconds;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds)::"memory");
    return nanoseconds;
  }

  const uint32_t interval_;
  uint32_t due_;
};

}  // namespace unsloth
