// A sum over a block's threads.
#pragma once

#include <cstdint>

namespace unsloth {

// The same on all threads, by way of a number for each warp in `of_warp`. `warps`, a power of two
// up to 32, is how many the block has. It waits for all of them once.
template <uint32_t warps>
__device__ __forceinline__ float block_sum(float x, float *of_warp) {
#pragma unroll
  for (uint32_t by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[threadIdx.x % warps];
#pragma unroll
  for (uint32_t by = warps / 2; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}

}  // namespace unsloth
