// What threads of a launch that rounds share, and where their groups lie.
#pragma once

#include "common/rows.cuh"
#include "quantize/arguments.h"

namespace unsloth {

using Arguments = QuantizeArguments;

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kAll = ~0u;

// Groups of a block.
__device__ __forceinline__ uint32_t groups_of_block(const Arguments &p) {
  return kWarps >> (31 - __clz(p.warps));
}

// Of threads that share a group, their number in the launch: the group's, if each has one.
__device__ __forceinline__ uint32_t group_of(const Arguments &p) {
  return blockIdx.x * groups_of_block(p) + (threadIdx.x / 32 >> (31 - __clz(p.warps)));
}

template <class T>
__device__ __forceinline__ const T *start_of(const Arguments &p, uint32_t row) {
  const Strides strides = {p.x_0, p.x_1, p.x_2};
  return reinterpret_cast<const T *>(static_cast<const uint8_t *>(p.x) +
                                     row_start(row, strides, p));
}

// Where a group and its codes lie.
template <class T>
struct Place {
  const T *x;
  // Codes of a byte; of two bits.
  uint8_t *out, *out_of_quarters;

  __device__ __forceinline__ Place(const Arguments &p, uint32_t group) {
    const uint32_t row = p.groups == 1 ? group : group / p.groups;
    const uint32_t first = (group - row * p.groups) * p.length;
    const Strides strides = {p.out_0, p.out_1, p.out_2};
    x = start_of<T>(p, row) + first;
    uint8_t *of_row = p.out + row_start(row, strides, p);
    out = of_row + first;
    out_of_quarters = of_row + first / 4;
  }
};

}  // namespace unsloth
