// Instantiates a kernel, and beside it what the host must know of it.
#pragma once

#include "heads.cuh"

#define UNSLOTH_QK_NORM_ROPE(name, type, head_dim, backward)                            \
  extern "C" __global__ void __launch_bounds__(                                         \
      unsloth::kThreads, backward ? unsloth::kBackwardBlocks : unsloth::kForwardBlocks) \
      name(const __grid_constant__ QkNormRopeRingArguments params) {                    \
    unsloth::let_next_kernel_start();                                                   \
    extern __shared__ __align__(16) uint8_t dynamic[];                                  \
    unsloth::Warp<type, head_dim, backward> warp(params, dynamic);                      \
    unsloth::await_previous_kernel();                                                   \
    warp.run();                                                                         \
  }                                                                                     \
  extern "C" __device__ const QkNormRopeRingLaunch name##_launch = {                    \
      static_cast<int32_t>(unsloth::kDtype<type>),                                      \
      head_dim,                                                                         \
      backward,                                                                         \
      unsloth::Warp<type, head_dim, backward>::kHeads,                                  \
      unsloth::kThreads,                                                                \
      sizeof(unsloth::Warp<type, head_dim, backward>::Shared),                          \
  };
