// A pace for what a warp asks memory for. Asked for more than it gives, memory gives less: rows of
// its banks are opened anew for each of many requests that wait.
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
    uint32_t late;
    do {
      late = now() - due_;
    } while (static_cast<int32_t>(late) < 0);
    due_ += interval_ + (late < interval_ ? 0 : late);
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
