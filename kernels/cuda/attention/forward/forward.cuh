// The attention forward kernel for Hopper: warp-specialised, persistent, TMA in and out.
//
// Warpgroup 0 loads (producer.cuh), the others compute (consumer.cuh). See Shah et al.,
// "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), for the
// overall scheme.
#pragma once

#include <type_traits>

#include "attention/forward/arguments.h"
#include "common/dependent_launch.cuh"
#include "common/registers.cuh"
#include "config.h"
#include "consumer.cuh"
#include "producer.cuh"
#include "shared.cuh"

namespace unsloth {

template <TileConfig C, class T, Mask kMask, bool kSoftcap>
__device__ __forceinline__ void attention_forward(const AttentionForwardArguments &p) {
  extern __shared__ uint8_t dynamic[];
  Shared<C, T> &shared =
      *reinterpret_cast<Shared<C, T> *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    shared.init_barriers();
    fence_mbarrier_init();
  }
  __syncthreads();

  // Uniform over the warp, which lets descriptors live in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    release_registers_to<producer_registers(C)>();
    if (p.ragged) {
      produce<C, T, kMask, true>(p, shared);
    } else {
      produce<C, T, kMask, false>(p, shared);
    }
  } else {
    acquire_registers_to<consumer_registers(C)>();
    Consumer<C, T, kMask, kSoftcap>(p, shared, warpgroup - 1).run();
  }
}

enum class Role { kUsual, kShort };

template <class T>
constexpr Float kDtype = std::is_same_v<T, __half> ? Float::kF16 : Float::kBf16;

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it. `role`: kUsual or kShort.
#define UNSLOTH_ATTENTION_FORWARD(name, type, tile, mask, softcap, role)             \
  extern "C" __global__ void __launch_bounds__(unsloth::threads(unsloth::tile), 1)   \
      name(const __grid_constant__ AttentionForwardArguments params) {               \
    unsloth::let_next_kernel_start();                                                \
    unsloth::await_previous_kernel();                                                \
    unsloth::attention_forward<unsloth::tile, type, unsloth::mask, softcap>(params); \
  }                                                                                  \
  extern "C" __device__ const AttentionForwardLaunch name##_launch = {               \
      static_cast<int32_t>(unsloth::kDtype<type>),                                   \
      unsloth::tile.head_dim,                                                        \
      unsloth::tile.head_dim_v,                                                      \
      static_cast<int32_t>(unsloth::mask),                                           \
      softcap,                                                                       \
      static_cast<int32_t>(unsloth::Role::role),                                     \
      unsloth::block_m(unsloth::tile),                                               \
      unsloth::tile.block_n,                                                         \
      unsloth::threads(unsloth::tile),                                               \
      unsloth::shared_bytes<unsloth::tile, type>(),                                  \
  };

// The same for both types.
#define UNSLOTH_ATTENTION_FORWARD_16BIT(suffix, tile, mask, softcap, role)                       \
  UNSLOTH_ATTENTION_FORWARD(attention_forward_bf16_##suffix, __nv_bfloat16, tile, mask, softcap, \
                            role)                                                                \
  UNSLOTH_ATTENTION_FORWARD(attention_forward_f16_##suffix, __half, tile, mask, softcap, role)
