// Attention's gradients on Hopper: warp-specialised, Q and dO by TMA.
//
// Statistics of rows come first (rows.cuh). Then there are two ways. Either one kernel computes all
// gradients and adds parts of dQ to sums in memory (producer.cuh, consumer.cuh, sums.cuh;
// pair_producer.cuh, pair.cuh above 128 dimensions, where a last one makes dQ of them, rows.cuh);
// or one computes dK and dV (keys.cuh; roles.cuh above 128 dimensions) and another dQ
// (queries.cuh), with the same bits every time. sinks.cuh has the sinks' gradient. See Shah et al.,
// "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), section
// 3 and Dao, "FlashAttention-2" (2023), algorithm 2.
#pragma once

#include <type_traits>

#include "attention/backward/arguments.h"
#include "common/dependent_launch.cuh"
#include "common/registers.cuh"
#include "config.h"
#include "consumer.cuh"
#include "keys.cuh"
#include "pair.cuh"
#include "pair_producer.cuh"
#include "pair_shared.cuh"
#include "producer.cuh"
#include "queries.cuh"
#include "roles.cuh"
#include "roles_shared.cuh"
#include "rows.cuh"
#include "shared.cuh"
#include "sinks.cuh"
#include "sums.cuh"
#include "work.cuh"

namespace unsloth {

template <int D, int DV, class T, bool kApart>
using MemoryOf =
    std::conditional_t<(D <= 128), std::conditional_t<kApart, KeysShared<D, T>, StepShared<D, T>>,
                       RolesShared<D, DV, T>>;

// Dynamic shared memory, with room to align its start.
template <int D, int DV, class T, bool kApart>
consteval int shared_bytes() {
  return sizeof(MemoryOf<kPadded<D>, kPadded<DV>, T, kApart>) + 1024 - 16;
}

template <int D, int DV, class T, Mask kMask, bool kApart = false>
__device__ __forceinline__ void attention_gradients(const AttentionGradientsArguments &p) {
  static_assert(D == DV || D > 128);
  constexpr int kP = kPadded<D>, kPV = kPadded<DV>;
  using Memory = MemoryOf<kP, kPV, T, kApart>;
  extern __shared__ uint8_t dynamic[];
  Memory &shared =
      *reinterpret_cast<Memory *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
  int number = blockIdx.x;
  if constexpr (!kApart) {
    // Blocks that wait for others must know that these have begun, which the grid does not promise.
    if (p.ordered) {
      if (threadIdx.x == 0) shared.ticket = atomicAdd(p.order + p.heads_q * p.blocks_per_head, 1);
      __syncthreads();
      number = shared.ticket;
    }
  }
  const Work work = work_at<kKeys<D>, kMask, Memory::kM>(p, number);
  if (work.first_key >= work.sequence.seqlen_k) return;

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.dout);
    shared.work = work;
    shared.init_barriers();
    fence_mbarrier_init();
  }
  __syncthreads();

  // Uniform over the warp, which lets descriptors live in uniform registers.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    release_registers_to<kProducerRegisters>();
    if (warp == 0) produce<kP, kPV>(p, shared);
    if constexpr (!kApart) {
      if (warp == 1) send_dq<kP>(p, shared);
      if (warp == 2) await_others<kP, T>(p, shared);
      if (warp == 3) tell_others<kP>(p, shared);
    }
  } else {
    acquire_registers_to<kConsumerRegisters>();
    if constexpr (!kApart) {
      Consumer<D, T, kMask>(p, shared, warp - 4).run();
    } else if constexpr (D <= 128) {
      KeyConsumer<D, T>(p, shared, warp / 4 - 1).run();
    } else {
      Roles<D, DV, T>(p, shared).run(warp / 4 - 1);
    }
  }
}

// By pairs of blocks.
template <int D, int DV, class T>
consteval int pair_shared_bytes() {
  return sizeof(PairShared<D, DV, T>) + 1024 - 16;
}

template <int D, int DV, class T, Mask kMask, bool kInOrder>
__device__ __forceinline__ void attention_gradients_by_pairs(const AttentionGradientsArguments &p) {
  using Memory = PairShared<D, DV, T>;
  extern __shared__ uint8_t dynamic[];
  Memory &shared =
      *reinterpret_cast<Memory *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
  const int rank = blockIdx.x % kPair;
  int number = blockIdx.x / kPair;
  if constexpr (kInOrder) {
    // As above, without queries neither. Both blocks of a pair run or none: they share a ticket.
    if (p.ordered) {
      if (rank == 0 && threadIdx.x == 0) {
        shared.ticket = atomicAdd(p.order + p.heads_q * p.blocks_per_head * kPair, 1);
      }
      cluster_sync();
      number = load_number_from_peer(peer_address(&shared.ticket, 0));
    }
  }
  Work work = work_at<kPair * kKeys<D>, kMask, kBlockM, kPair>(p, number);
  if (work.first_key >= work.sequence.seqlen_k) {
    if constexpr (kInOrder) cluster_sync();  // the ticket has been read
    return;
  }
  work.first_key += rank * kKeys<D>;

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.dout);
    shared.work = work;
    shared.init_barriers();
    if constexpr (kInOrder) shared.init_order();
    fence_mbarrier_init();
  }
  // Before either sends the other anything.
  cluster_sync();

  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    release_registers_to<kProducerRegisters>();
    if (warp == 0) produce_pair<D, DV, T>(p, shared, rank);
    if (warp == 1) exchange<D, DV, T>(p, shared, rank);
    if constexpr (kInOrder) {
      if (warp == 2) keep_pairs_in_order<true>(p, shared, rank);
      if (warp == 3) keep_pairs_in_order<false>(p, shared, rank);
    }
  } else {
    acquire_registers_to<kConsumerRegisters>();
    Pair<D, DV, T, kInOrder>(p, shared, rank).run(warp / 4 - 1);
  }
  // Whoever has ended takes its shared memory with it, which the other may still write to.
  cluster_sync();
}

template <class T>
constexpr Float kDtype = std::is_same_v<T, __half> ? Float::kF16 : Float::kBf16;

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it. The kernel does not let the
// next one start before it has ended: with the next one's blocks beside its own it was measured to
// be slower (LADDER.md). A block of keys has `keys` of them and `blocks` of threads, which are a
// cluster where `attribute` says so, and then add to sums in order if `in_order`.
#define UNSLOTH_ATTENTION_GRADIENTS_OF(name, part, type, dim, dim_v, keys, blocks, attribute, \
                                       mask, in_order, threads, shared, call)                 \
  extern "C" __global__ void attribute __launch_bounds__(threads, 1)                          \
      name(const __grid_constant__ AttentionGradientsArguments params) {                      \
    unsloth::await_previous_kernel();                                                         \
    call(params);                                                                             \
  }                                                                                           \
  extern "C" __device__ const AttentionGradientsLaunch name##_launch = {                      \
      static_cast<int32_t>(unsloth::Part::part),                                              \
      static_cast<int32_t>(unsloth::kDtype<type>),                                            \
      dim,                                                                                    \
      dim_v,                                                                                  \
      keys,                                                                                   \
      blocks,                                                                                 \
      static_cast<int32_t>(unsloth::mask),                                                    \
      in_order,                                                                               \
      threads,                                                                                \
      shared,                                                                                 \
  };

// A block of threads for each block of keys.
#define UNSLOTH_ATTENTION_GRADIENTS(name, part, type, dim, dim_v, mask, threads, shared, call)    \
  UNSLOTH_ATTENTION_GRADIENTS_OF(name, part, type, dim, dim_v, unsloth::kKeys<dim>, 1, , mask, 0, \
                                 threads, shared, call)

#define UNSLOTH_ATTENTION_GRADIENTS_MASK(suffix, type, dim, dim_v, mask)                        \
  UNSLOTH_ATTENTION_GRADIENTS(attention_gradients_##suffix, kGradients, type, dim, dim_v, mask, \
                              unsloth::kThreads,                                                \
                              (unsloth::shared_bytes<dim, dim_v, type, false>()),               \
                              (unsloth::attention_gradients<dim, dim_v, type, unsloth::mask>))

// What all ways begin with.
#define UNSLOTH_ATTENTION_GRADIENTS_PREPARE(suffix, type, dim, dim_v)                             \
  UNSLOTH_ATTENTION_GRADIENTS(attention_gradients_##suffix##_prepare, kPrepare, type, dim, dim_v, \
                              Mask::kNone, 128, 0,                                                \
                              (unsloth::prepare_rows<unsloth::kPadded<dim>, type>))

// dK and dV alone, dQ alone, and the gradients of sinks.
#define UNSLOTH_ATTENTION_GRADIENTS_APART(suffix, type, dim, dim_v)                               \
  UNSLOTH_ATTENTION_GRADIENTS(                                                                    \
      attention_gradients_##suffix##_keys, kKeys, type, dim, dim_v, Mask::kWindow,                \
      unsloth::kThreads, (unsloth::shared_bytes<dim, dim_v, type, true>()),                       \
      (unsloth::attention_gradients<dim, dim_v, type, unsloth::Mask::kWindow, true>))             \
  UNSLOTH_ATTENTION_GRADIENTS(attention_gradients_##suffix##_queries, kQueries, type, dim, dim_v, \
                              Mask::kWindow, unsloth::kThreads,                                   \
                              (unsloth::query_shared_bytes<dim, dim_v, type>()),                  \
                              (unsloth::attention_query_gradients<dim, dim_v, type>))             \
  UNSLOTH_ATTENTION_GRADIENTS(attention_gradients_##suffix##_sinks, kSinks, type, dim, dim_v,     \
                              Mask::kNone, unsloth::kSinkThreads, unsloth::kSinkBytes,            \
                              unsloth::sum_sinks)

#define UNSLOTH_ATTENTION_GRADIENTS_PAIR(suffix, type, dim, dim_v, mask, in_order)                 \
  UNSLOTH_ATTENTION_GRADIENTS_OF(                                                                  \
      attention_gradients_##suffix, kGradients, type, dim, dim_v,                                  \
      unsloth::kPair *unsloth::kKeys<dim>, unsloth::kPair, __cluster_dims__(unsloth::kPair, 1, 1), \
      mask, in_order, unsloth::kThreads, (unsloth::pair_shared_bytes<dim, dim_v, type>()),         \
      (unsloth::attention_gradients_by_pairs<dim, dim_v, type, unsloth::mask, in_order>))

#define UNSLOTH_ATTENTION_GRADIENTS_PAIR_MASK(suffix, type, dim, dim_v, mask) \
  UNSLOTH_ATTENTION_GRADIENTS_PAIR(suffix, type, dim, dim_v, mask, false)     \
  UNSLOTH_ATTENTION_GRADIENTS_PAIR(suffix##_in_order, type, dim, dim_v, mask, true)

// The same by pairs of blocks. Waiting for others would cost those that need not: it is a kernel of
// its own.
#define UNSLOTH_ATTENTION_GRADIENTS_PAIRS(suffix, type, dim, dim_v)                             \
  UNSLOTH_ATTENTION_GRADIENTS(attention_gradients_##suffix##_finish, kFinish, type, dim, dim_v, \
                              Mask::kNone, 128, 0,                                              \
                              (unsloth::finish_rows<unsloth::kPadded<dim>, type>))              \
  UNSLOTH_ATTENTION_GRADIENTS_PAIR_MASK(suffix##_full, type, dim, dim_v, Mask::kNone)           \
  UNSLOTH_ATTENTION_GRADIENTS_PAIR_MASK(suffix##_causal, type, dim, dim_v, Mask::kCausal)       \
  UNSLOTH_ATTENTION_GRADIENTS_PAIR_MASK(suffix##_window, type, dim, dim_v, Mask::kWindow)

// All gradients in one kernel, with sums of dQ in memory.
#define UNSLOTH_ATTENTION_GRADIENTS_TOGETHER(suffix, type, dim, dim_v)               \
  UNSLOTH_ATTENTION_GRADIENTS_MASK(suffix##_full, type, dim, dim_v, Mask::kNone)     \
  UNSLOTH_ATTENTION_GRADIENTS_MASK(suffix##_causal, type, dim, dim_v, Mask::kCausal) \
  UNSLOTH_ATTENTION_GRADIENTS_MASK(suffix##_window, type, dim, dim_v, Mask::kWindow)

#define UNSLOTH_ATTENTION_GRADIENTS_16BIT(kind, name, dim, dim_v)            \
  UNSLOTH_ATTENTION_GRADIENTS_##kind(bf16_##name, __nv_bfloat16, dim, dim_v) \
      UNSLOTH_ATTENTION_GRADIENTS_##kind(f16_##name, __half, dim, dim_v)
