// setmaxnreg: moves registers between warpgroups at run time. Every warp of the warpgroup must
// execute it, the count is a multiple of 8, and the sum over the block may not exceed what it was
// launched with. ptxas honours it only under __launch_bounds__(threads, 1).
#pragma once

namespace unsloth {

template <int kRegisters>
__device__ __forceinline__ void release_registers_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace unsloth
