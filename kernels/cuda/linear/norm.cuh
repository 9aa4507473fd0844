// RMSNorm of rows of x on their way to a product, with the bits of the kernels that store it: a
// row's squares are summed in the order of `kernels/src/norm/share.rs`.
#pragma once

#include "common/async_copy.cuh"
#include "common/vector.cuh"

namespace unsloth {

// 32 vectors of 16 bytes of a row, one of each lane, are a part of it; of this many at most.
constexpr uint32_t kMostParts = 128;

constexpr uint32_t kAllLanes = 0xffffffff;

// By halves, on every lane.
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// The sum of a lane's squares.
template <class T>
__device__ __forceinline__ float squares_of_lane(const uint4 &words) {
  float of[Vector<T>::kWidth];
  Vector<T>::unpack(words, of);
  float sum = of[0] * of[0];
#pragma unroll
  for (int i = 1; i < Vector<T>::kWidth; i++) sum = fmaf(of[i], of[i], sum);
  return sum;
}

// The sum of the squares of a part. Lanes behind the row have zeros.
template <class T>
__device__ __forceinline__ float squares_of_part(const uint4 &words) {
  return sum_of_lanes(squares_of_lane<T>(words));
}

// The sum of all parts of a row, on every lane. `kAligned`: they begin at a multiple of 16 bytes.
template <bool kAligned = false>
__device__ __forceinline__ float sum_of_parts(const float *parts, uint32_t count) {
  if (kAligned && count == 16) {
    const float4 *fours = reinterpret_cast<const float4 *>(parts);
    const float4 a = fours[0], b = fours[1], c = fours[2], d = fours[3];
    return ((a.x + b.x + c.x + d.x) + (a.y + b.y + c.y + d.y)) +
           ((a.z + b.z + c.z + d.z) + (a.w + b.w + c.w + d.w));
  }
  if (count > 16) {
    const uint32_t lane = threadIdx.x % 32;
    float sum = 0;
    for (uint32_t part = lane; part < count; part += 32) sum += parts[part];
    return sum_of_lanes(sum);
  }
  float totals[4] = {};
#pragma unroll
  for (uint32_t part = 0; part < 16; part++) {
    if (part < count) totals[part % 4] += parts[part];
  }
  return (totals[0] + totals[1]) + (totals[2] + totals[3]);
}

// Has gains fetched to the second cache, by all threads of a block: nothing else has read them
// since the layer before. Nothing waits for that, and what is written meanwhile is written there.
template <class Arguments>
__device__ __forceinline__ void fetch_gains(const Arguments &p, uint32_t elements) {
  constexpr uint32_t kLine = 128;
  const uint32_t bytes = elements * (p.norm_dtype == static_cast<uint32_t>(Float::kF32) ? 4 : 2);
  for (uint32_t at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine) {
    fetch_line(static_cast<const uint8_t *>(p.norm) + at);
  }
}

// What a row is multiplied by beside its gains. The arguments are those of a product with a norm.
template <bool kAligned = false, class Arguments>
__device__ __forceinline__ float scale_of_row(const Arguments &p, const float *parts,
                                              uint32_t count) {
  return rsqrtf(fmaf(sum_of_parts<kAligned>(parts, count), p.norm_inverse_length, p.norm_epsilon));
}

// A number of a row, which is to be rounded to the row's dtype.
template <class Arguments>
__device__ __forceinline__ float normalised(const Arguments &p, float x, float gain, float scale) {
  return x * ((gain + p.norm_offset) * scale);
}

}  // namespace unsloth
