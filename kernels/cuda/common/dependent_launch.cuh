// Programmatic dependent launch: a kernel's blocks may be started while those of the kernel before
// it in the stream still run.
#pragma once

namespace unsloth {

// Waits until the kernel before has ended and its writes can be read. Every kernel begins with it,
// before it touches memory: the host launches all of them so. Products with constant weights read
// some of these first, and a step of decoding what the cache held before it. Where a product's rows
// are parted among two launches, the second ends with it instead: the first starts it no sooner
// than what both read is there, and neither reads or writes what the other writes.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the kernel behind be started once all blocks of this one have come here, and
// not only once they have ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace unsloth
