// Rows of weights in blocks, decoded: those that ids name, or all in their order. Blocks are read
// from where they lie in their file's bytes, which may be any address.
//
// It is CUDA C++ for what it shares with the products (common/blocks.cuh): bytes that are read two
// or one at a time as their address allows.
#pragma once

#include "blocks/arguments.h"
#include "common/blocks.cuh"
#include "common/dependent_launch.cuh"
#include "common/rows.cuh"
#include "common/vector.cuh"

namespace unsloth {

constexpr int kThreads = 128;
// Weights of a thread: neighbours of one group.
constexpr int kEach = 8;

// A block in global memory.
struct Block {
  const uint8_t *bytes;
  bool even;

  __device__ __forceinline__ uint32_t byte(int at) const { return bytes[at]; }

  __device__ __forceinline__ uint32_t half(int at) const {
    if (even) return *reinterpret_cast<const uint16_t *>(bytes + at);
    return byte(at) | byte(at + 1) << 8;
  }

  __device__ __forceinline__ uint32_t operator()(int at) const {
    return half(at) | half(at + 2) << 16;
  }
};

// Weights `first` and those behind it.
template <Blocks kBlocks>
__device__ __forceinline__ void decode(const Block &block, uint32_t first, float (&to)[kEach]) {
  using F = Format<kBlocks>;
  const uint32_t group = first / F::kGroup;
  Factors factors;
  if constexpr (kHasScalesOfScales<kBlocks>) {
    factors = ScalesOfScales(block).of(group);
  } else {
    const auto half = [&](int at) { return block.half(at); };
    const auto byte = [&](int at) { return block.byte(at); };
    factors = factors_of<kBlocks>(half, byte, group);
  }
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const uint32_t quad = (first + i) / 4, lane = quad % 4;
    const auto load = [&](int at) { return block(at + 4 * lane); };
    uint32_t codes = quad_of_codes<kBlocks>(load, block, quad - lane, lane);
    if constexpr (kHasFifthBits<kBlocks>) codes |= fifth_bits(block(kFifthBits<kBlocks>), quad);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int code = static_cast<int>(codes >> 8 * j & 255) - F::kZero;
      to[i + j] = fmaf(factors.scale, static_cast<float>(code), factors.offset);
    }
  }
}

template <class T>
__device__ __forceinline__ void store(const float (&from)[kEach], T *to, bool vectors) {
  constexpr int kWidth = Vector<T>::kWidth;
#pragma unroll
  for (int i = 0; i < kEach; i += kWidth) {
    float part[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; j++) part[j] = from[i + j];
    const uint4 packed = Vector<T>::packed(part);
    if (vectors) {
      *reinterpret_cast<uint4 *>(to + i) = packed;
    } else {
      const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        if constexpr (sizeof(T) == 4) {
          to[i + j] = from[i + j];
        } else {
          const uint32_t word = words[j / 2] >> j % 2 * 16;
          *reinterpret_cast<uint16_t *>(to + i + j) = static_cast<uint16_t>(word);
        }
      }
    }
  }
}

// Grid: rows, each of `blocks_per_row`.
template <class T, Blocks kBlocks>
__device__ __forceinline__ void rows(const BlocksRowsArguments &p) {
  using F = Format<kBlocks>;
  const uint32_t row = divide(blockIdx.x, p.blocks_per_row_multiplier, p.blocks_per_row_shift);
  const uint32_t eight = (blockIdx.x - row * p.blocks_per_row) * kThreads + threadIdx.x;
  if (eight >= p.length) return;
  uint64_t id = row;
  if (p.ids != nullptr) {
    const uint8_t *at =
        static_cast<const uint8_t *>(p.ids) + row_start(row, {p.ids_0, p.ids_1, p.ids_2}, p);
    // A negative id is a great one without its sign.
    id = p.wide_ids ? *reinterpret_cast<const int64_t *>(at)
                    : static_cast<int64_t>(*reinterpret_cast<const int32_t *>(at));
  }
  // Of the vocabulary, but not of the table: what changes nothing that it is added to.
  const float other = __uint_as_float(id < p.vocab ? 0x80000000 : 0x7fc00000);
  float weights[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) weights[i] = other;
  // A great one where the id is before the first row.
  const uint64_t of_table = id - p.begin;
  if (of_table < p.rows) {
    const uint64_t first = static_cast<uint64_t>(eight) * kEach;
    const uint8_t *bytes = p.table + of_table * p.table_stride + first / F::kLength * F::kBytes;
    const Block block = {bytes, p.even != 0};
    decode<kBlocks>(block, static_cast<uint32_t>(first % F::kLength), weights);
  }
  uint8_t *to = static_cast<uint8_t *>(p.out) + row_start(row, {p.out_0, p.out_1, p.out_2}, p);
  store<T>(weights, reinterpret_cast<T *>(to) + static_cast<uint64_t>(eight) * kEach,
           p.vectors != 0);
}

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_BLOCKS_ROWS(name, type, blocks)                                \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads)              \
      blocks_rows_##name(const __grid_constant__ BlocksRowsArguments params) { \
    unsloth::let_next_kernel_start();                                          \
    unsloth::await_previous_kernel();                                          \
    unsloth::rows<type, unsloth::Blocks::blocks>(params);                      \
  }                                                                            \
  extern "C" __device__ const BlocksRowsLaunch blocks_rows_##name##_launch = { \
      static_cast<int32_t>(unsloth::Blocks::blocks),                           \
      static_cast<int32_t>(unsloth::kDtype<type>),                             \
      unsloth::kThreads * unsloth::kEach,                                      \
      unsloth::kThreads,                                                       \
      0,                                                                       \
  };

// For each dtype of what is decoded.
#define UNSLOTH_BLOCKS_ROWS_OF(name, blocks)               \
  UNSLOTH_BLOCKS_ROWS(decode_##name##_f32, float, blocks)  \
  UNSLOTH_BLOCKS_ROWS(decode_##name##_f16, __half, blocks) \
  UNSLOTH_BLOCKS_ROWS(decode_##name##_bf16, __nv_bfloat16, blocks)
