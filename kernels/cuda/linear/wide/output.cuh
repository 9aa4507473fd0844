// What becomes of a warp's sums: 16 columns of the output, and rows of x.
#pragma once

#include "common/memory.cuh"
#include "common/vector.cuh"
#include "linear/epilogue.cuh"
#include "linear/wide/arguments.h"
#include "linear/wide/weight.cuh"

namespace unsloth {

// Rows of a warp's sums on their way to be stored: even and odd ones are in different banks.
using Leaving = float[16][20];

// A sum's bits in a float, to be moved, and back.
__device__ __forceinline__ float bits_as_float(float sum) { return sum; }
__device__ __forceinline__ float bits_as_float(int32_t sum) { return __int_as_float(sum); }
template <class Sum>
__device__ __forceinline__ Sum float_as_bits(float bits) {
  if constexpr (std::is_same_v<Sum, float>) {
    return bits;
  } else {
    return __float_as_int(bits);
  }
}

// Four sums as they are moved, and their addition to others.
template <class Sum>
__device__ __forceinline__ float4 as_float4(const Sum *of) {
  return {bits_as_float(of[0]), bits_as_float(of[1]), bits_as_float(of[2]), bits_as_float(of[3])};
}
template <class Sum>
__device__ __forceinline__ void add_four(const float4 &four, Sum *to) {
  to[0] += float_as_bits<Sum>(four.x), to[1] += float_as_bits<Sum>(four.y);
  to[2] += float_as_bits<Sum>(four.z), to[3] += float_as_bits<Sum>(four.w);
}

// What belongs to a tile's rows of x, where these are codes: scales, and sums of the codes.
template <int kRows>
struct OfRows {
  alignas(16) float scale[kRows];
  alignas(16) int32_t sum[kRows];
};

template <class Weight, class T, int kRows>
class Output {
  using Sum = typename Weight::Sum;
  static constexpr int kRowsOfTile = Weight::kOfCodes ? kRows : 1;
  // Whether there are registers for biases until sums are stored.
  static constexpr bool kHoldsBiases = !Weight::kOfCodes || kRows != 64;

 public:
  __device__ __forceinline__ Output(const LinearWideArguments &p, Leaving &leaving,
                                    const OfRows<kRowsOfTile> &of_rows)
      : p_(p), lane_(threadIdx.x % 32), leaving_(leaving), of_rows_(of_rows) {}

  // A warp's sums of eight rows of x, to be stored by rows, from row `at` of those that leave.
  __device__ __forceinline__ void put_eight(const Sum *sums, uint32_t at) const {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      leaving_[at + 2 * t + i % 2][g + i / 2 * 8] = bits_as_float(sums[i]);
    }
  }

  // Stores what was put there, of `rows` rows: two lanes have a row's 16 columns, eight each.
  __device__ __forceinline__ void store_rows(uint32_t rows, uint32_t first_row,
                                             uint32_t column) const {
    __syncwarp();
    const float *from = &leaving_[lane_ / 2][lane_ % 2 * 8];
    const float4 low = *reinterpret_cast<const float4 *>(from);
    const float4 high = *reinterpret_cast<const float4 *>(from + 4);
    __syncwarp();
    const uint32_t row = first_row + lane_ / 2;
    if (lane_ / 2 >= rows || row >= p_.rows || column >= p_.out_features) return;
    float eights[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    scale_eight(row % kRowsOfTile, column, eights);
    finish_eight(row, column, min(p_.out_features - column, 8u), eights);
  }

  // Whether sums are scaled, and packed in 16 bits, before they are put by rows: if nothing but a
  // residual is added, of whole vectors.
  __device__ __forceinline__ bool is_packed() const {
    return kRows > kFewRows && p_.dtype != static_cast<uint32_t>(Float::kF32) && p_.vectors &&
           p_.bias_dtype == 0 &&
           (p_.epilogue == static_cast<uint32_t>(Epilogue::kStore) ||
            (adds() && p_.out_features % 8 == 0));
  }
  __device__ __forceinline__ bool adds() const {
    return p_.epilogue == static_cast<uint32_t>(Epilogue::kAdd);
  }

  // Loads what the lane passes on of thirty-two rows of the residual: eight columns of two rows.
  __device__ __forceinline__ void load_added(uint32_t first_row, uint32_t column,
                                             uint4 (&added)[2]) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = first_row + 16 * half + lane_ / 2;
      if (row >= p_.rows || column >= p_.out_features) continue;
      const uint8_t *from = static_cast<const uint8_t *>(p_.residual) + row * p_.residual_stride;
      added[half] = *reinterpret_cast<const uint4 *>(from + column * 2);
    }
  }

  // Gives each lane what belongs to its sums, in pairs of rows.
  __device__ __forceinline__ void turn_added(const uint4 (&added)[2], uint32_t (&pairs)[8]) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      *reinterpret_cast<uint4 *>(&leaving_[lane_ / 2][8 * half + lane_ % 2 * 4]) = added[half];
    }
    __syncwarp();
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      load_matrix_x4_transposed(shared_address(matrix_of_lane(half)), pairs + 4 * half);
    }
    __syncwarp();
  }

  // A warp's sums of thirty-two rows of x, from `first_row` of the tile on, packed: sixteen beside
  // sixteen.
  __device__ __forceinline__ void put_packed(const Sum *sums, uint32_t first_row,
                                             const uint32_t (&added)[8]) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      uint32_t pairs[4];
#pragma unroll
      for (uint32_t e = 0; e < 2; e++) {
        const uint32_t row = first_row + 16 * half + 8 * e + 2 * (lane_ % 4);
        pack_pairs(sums + 8 * half + 4 * e, row, added + 4 * half + 2 * e, pairs + 2 * e);
      }
      store_matrix_x4_transposed(shared_address(matrix_of_lane(half)), pairs[0], pairs[1], pairs[2],
                                 pairs[3]);
    }
  }

  // Stores what was put there.
  __device__ __forceinline__ void store_packed(uint32_t first_row, uint32_t column) const {
    __syncwarp();
    uint4 packed[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const float *from = &leaving_[lane_ / 2][8 * half + lane_ % 2 * 4];
      packed[half] = *reinterpret_cast<const uint4 *>(from);
    }
    __syncwarp();
    if (column >= p_.out_features) return;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = first_row + 16 * half + lane_ / 2;
      if (row >= p_.rows) return;
      store_eight(row, column, min(p_.out_features - column, 8u), packed[half]);
    }
  }

  // Scales of the eight columns whose sums the thread stores, or of the two whose packed ones it
  // has. They belong to the weight, which may be read before the kernel before has ended. Behind
  // the products they would be waited for.
  __device__ __forceinline__ void load_scales(uint32_t column) {
    if (is_packed()) {
      if (!Weight::kHasScales) return;
      const uint32_t first = column - lane_ % 2 * 8 + lane_ / 4;
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        scales_[i] = p_.weight_scale == nullptr ? 1 : scale_of(first + 8 * i);
      }
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      scales_[i] = Weight::kHasScales && p_.weight_scale != nullptr ? scale_of(column + i) : 1;
    }
  }
  // Biases of these eight. Sums that are packed have none.
  __device__ __forceinline__ void load_biases(uint32_t column) {
    if (!kHoldsBiases) return;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) biases_[i] = 0;
    if (is_packed() || p_.bias_dtype == 0) return;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) biases_[i] = bias_of(column + i);
  }

 private:
  __device__ __forceinline__ float scale_of(uint32_t column) const {
    return p_.weight_scale[min(column, p_.out_features - 1) / p_.rows_of_scale];
  }

  __device__ __forceinline__ float bias_of(uint32_t column) const {
    return number_of(p_.bias, p_.bias_dtype, min(column, p_.out_features - 1));
  }

  // A sum of products of a weight's codes, which are `kMore` more than its weights, with a row's
  // codes, whose sum is `sum_of_row`: the weights' sum of products, times both scales.
  static __device__ __forceinline__ float scaled(int32_t sum, float of_weight, float of_row,
                                                 int32_t sum_of_row) {
    return __fmul_rn(__fmul_rn(of_weight, of_row),
                     static_cast<float>(sum - Weight::kMore * sum_of_row));
  }

  // Matrices of eight rows by eight columns, four of sixteen rows: a lane has the address of a row
  // of one.
  __device__ __forceinline__ const float *matrix_of_lane(uint32_t half) const {
    return &leaving_[lane_ / 16 * 8 + lane_ % 8][8 * half + lane_ / 8 % 2 * 4];
  }

  // Of two rows of x, and of the thread's two columns.
  __device__ __forceinline__ void pack_pairs(const Sum *sums, uint32_t row, const uint32_t *added,
                                             uint32_t *pairs) const {
    if constexpr (Weight::kOfCodes) {
      const float2 of_rows = *reinterpret_cast<const float2 *>(&of_rows_.scale[row]);
      const int2 sums_of_rows = *reinterpret_cast<const int2 *>(&of_rows_.sum[row]);
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        pairs[i] =
            pack_two(scaled(sums[2 * i], scales_[i], of_rows.x, sums_of_rows.x),
                     scaled(sums[2 * i + 1], scales_[i], of_rows.y, sums_of_rows.y), added[i]);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        const float scale = Weight::kHasScales ? scales_[i] : 1;
        pairs[i] =
            pack_two(__fmul_rn(sums[2 * i] * Weight::template kUnit<T>, scale),
                     __fmul_rn(sums[2 * i + 1] * Weight::template kUnit<T>, scale), added[i]);
      }
    }
  }
  __device__ __forceinline__ uint32_t pack_two(float low, float high, uint32_t added) const {
    if (adds()) {
      const float2 others = is_f16() ? unpack<__half>(added) : unpack<__nv_bfloat16>(added);
      low = __fadd_rn(low, others.x), high = __fadd_rn(high, others.y);
    }
    return is_f16() ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
  }

  // Scales eight neighbours, and adds biases. Of codes each step is rounded, as on the CPU.
  __device__ __forceinline__ void scale_eight(uint32_t row_of_tile, uint32_t column,
                                              float (&eights)[8]) const {
    if constexpr (!Weight::kOfCodes) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        eights[i] = fmaf(eights[i] * Weight::template kUnit<T>, scales_[i], biases_[i]);
      }
    } else {
      const float of_row = of_rows_.scale[row_of_tile];
      const int32_t too_much = of_rows_.sum[row_of_tile];
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        eights[i] = scaled(__float_as_int(eights[i]), scales_[i], of_row, too_much);
      }
      // Minus zero stays where there is no bias.
      if (p_.bias_dtype == 0) return;
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        eights[i] = __fadd_rn(eights[i], kHoldsBiases ? biases_[i] : bias_of(column + i));
      }
    }
  }

  // Rounds and stores eight neighbours, or as many as there are, once bias, and residual or gate,
  // have their part in them.
  __device__ __forceinline__ void finish_eight(uint32_t row, uint32_t column, uint32_t columns,
                                               float (&eights)[8]) const {
    const bool is_vector = p_.vectors && columns == 8;
    if (p_.epilogue != static_cast<uint32_t>(Epilogue::kStore)) {
      float others[8];
      load_others(row, column, columns, is_vector, others);
      if (p_.epilogue == static_cast<uint32_t>(Epilogue::kAdd)) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) eights[i] += others[i];
      } else {
        multiply_by_gates(others, eights);
      }
    }
    uint8_t *out = static_cast<uint8_t *>(p_.out) + row * p_.out_stride;
    if (p_.dtype == static_cast<uint32_t>(Float::kF32)) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        if (i < columns) reinterpret_cast<float *>(out)[column + i] = eights[i];
      }
      return;
    }
    const uint4 packed =
        is_f16() ? Vector<__half>::packed(eights) : Vector<__nv_bfloat16>::packed(eights);
    store_eight(row, column, columns, packed);
  }

  // Stores eight neighbours of 16 bits, or as many as there are.
  __device__ __forceinline__ void store_eight(uint32_t row, uint32_t column, uint32_t columns,
                                              const uint4 &packed) const {
    uint8_t *out = static_cast<uint8_t *>(p_.out) + row * p_.out_stride;
    if (p_.vectors && columns == 8) {
      *reinterpret_cast<uint4 *>(out + column * 2) = packed;
      return;
    }
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      if (i < columns) {
        reinterpret_cast<uint16_t *>(out)[column + i] =
            static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      }
    }
  }

  // Residuals or gates, which have the output's dtype.
  __device__ __forceinline__ void load_others(uint32_t row, uint32_t column, uint32_t columns,
                                              bool is_vector, float (&others)[8]) const {
    const uint8_t *from = static_cast<const uint8_t *>(p_.residual) + row * p_.residual_stride;
    if (p_.dtype == static_cast<uint32_t>(Float::kF32)) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        others[i] = i < columns ? reinterpret_cast<const float *>(from)[column + i] : 0;
      }
    } else if (is_vector) {
      const uint4 words = *reinterpret_cast<const uint4 *>(from + column * 2);
      if (is_f16()) {
        Vector<__half>::unpack(words, others);
      } else {
        Vector<__nv_bfloat16>::unpack(words, others);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        others[i] = i < columns ? number_of(from, p_.dtype, column + i) : 0;
      }
    }
  }

  // Of an output of 16 bits: its dtype is that of x, unless x was rounded to codes.
  __device__ __forceinline__ bool is_f16() const {
    if constexpr (Weight::kOfCodes) return p_.dtype == static_cast<uint32_t>(Float::kF16);
    return std::is_same_v<T, __half>;
  }

  // One branch for all eight.
  __device__ __forceinline__ void multiply_by_gates(const float (&gates)[8],
                                                    float (&eights)[8]) const {
    const auto by = [&](Epilogue epilogue) {
      if (p_.epilogue != static_cast<uint32_t>(epilogue)) return;
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        eights[i] *= activate(gates[i], static_cast<uint32_t>(epilogue));
      }
    };
    by(Epilogue::kGateSilu);
    by(Epilogue::kGateGelu);
    by(Epilogue::kGateGeluTanh);
    by(Epilogue::kGateReluSquared);
  }

  const LinearWideArguments &p_;
  const uint32_t lane_;
  Leaving &leaving_;
  const OfRows<kRowsOfTile> &of_rows_;
  // Of the eight columns; of packed sums the first two are of the columns g and g + 8 of the
  // warp's.
  float scales_[8], biases_[8];
};

}  // namespace unsloth
