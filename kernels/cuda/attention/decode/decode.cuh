// Attention of a few query rows to many keys on Hopper: bound by reading K and V once.
//
// One warp loads (producer.cuh), the others compute (consumer.cuh); blocks are persistent and have
// equal shares of all keys (schedule.cuh), after Dao et al., "Flash-Decoding for long-context
// inference" (2023), and Osama et al., "Stream-K" (2023).
#pragma once

#include <type_traits>

#include "attention/decode/arguments.h"
#include "common/dependent_launch.cuh"
#include "config.h"
#include "consumer.cuh"
#include "contract.h"
#include "producer.cuh"
#include "shared.cuh"

namespace unsloth {

template <DecodeConfig C, class T>
__device__ __forceinline__ void attention_decoding(const AttentionDecodingArguments &p) {
  extern __shared__ uint8_t dynamic[];
  Shared<C, T> &shared =
      *reinterpret_cast<Shared<C, T> *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    shared.init_barriers();
    fence_mbarrier_init();
  }
  // Barriers and maps are no memory that the kernel before writes.
  await_previous_kernel();
  sum_tiles(p, shared);
  __syncthreads();

  if (uniform(threadIdx.x / 32) == C.warps) {
    Producer<C, T>(p, shared).run();
  } else {
    Consumer<C, T>(p, shared).run();
  }
}

template <class T>
constexpr Float kDtype = std::is_same_v<T, __half> ? Float::kF16 : Float::kBf16;

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_ATTENTION_DECODING(name, type, config)                            \
  extern "C" __global__ void __launch_bounds__(unsloth::threads(unsloth::config), \
                                               unsloth::config.blocks)            \
      name(const __grid_constant__ AttentionDecodingArguments params) {           \
    unsloth::let_next_kernel_start();                                             \
    unsloth::attention_decoding<unsloth::config, type>(params);                   \
  }                                                                               \
  extern "C" __device__ const AttentionDecodingLaunch name##_launch = {           \
      static_cast<int32_t>(unsloth::kDtype<type>),                                \
      unsloth::config.codes,                                                      \
      unsloth::config.head_dim,                                                   \
      unsloth::config.heads,                                                      \
      unsloth::config.tile,                                                       \
      unsloth::config.blocks,                                                     \
      unsloth::threads(unsloth::config),                                          \
      unsloth::shared_bytes<unsloth::config, type>(),                             \
  };

// The same for both types.
#define UNSLOTH_ATTENTION_DECODING_16BIT(suffix, config)                              \
  UNSLOTH_ATTENTION_DECODING(attention_decoding_bf16_##suffix, __nv_bfloat16, config) \
  UNSLOTH_ATTENTION_DECODING(attention_decoding_f16_##suffix, __half, config)
