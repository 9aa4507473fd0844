// The kernels of a few rows: for one, four and eight of them.
#pragma once

#include "few_rows.cuh"

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_BLOCKS_OF(blocks, rows, name)                                      \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)                      \
      linear_blocks_##name(const __grid_constant__ LinearBlocksArguments params) {        \
    unsloth::let_next_kernel_start();                                                     \
    if (params.constant == 0) unsloth::await_previous_kernel();                           \
    extern __shared__ uint4 dynamic[];                                                    \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                                \
    unsloth::FewRows<unsloth::Blocks::blocks, rows>(params, bytes).run();                 \
  }                                                                                       \
  extern "C" __device__ const LinearBlocksLaunch linear_blocks_##name##_launch = {        \
      static_cast<int32_t>(unsloth::Blocks::blocks),                                      \
      0,                                                                                  \
      rows,                                                                               \
      unsloth::kColumns,                                                                  \
      unsloth::Unit<unsloth::Blocks::blocks>::kWeights,                                   \
      unsloth::Unit<unsloth::Blocks::blocks>::kSlotBytes,                                 \
      64 + static_cast<int32_t>(sizeof(unsloth::Digits<unsloth::Blocks::blocks>::Scale)), \
      unsloth::FewRows<unsloth::Blocks::blocks, rows>::kSumsBytes,                        \
      unsloth::kThreads,                                                                  \
      unsloth::kSharedBytes,                                                              \
  };

#define UNSLOTH_LINEAR_BLOCKS(name, blocks)     \
  UNSLOTH_LINEAR_BLOCKS_OF(blocks, 1, name##_1) \
  UNSLOTH_LINEAR_BLOCKS_OF(blocks, 4, name##_4) \
  UNSLOTH_LINEAR_BLOCKS_OF(blocks, 8, name##_8)
