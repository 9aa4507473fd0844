// What becomes of a warp's sums: 16 columns of the output, and rows of x.
#pragma once

#include "common/vector.cuh"
#include "linear/epilogue.cuh"
#include "linear/wide/arguments.h"

namespace unsloth {

// Rows of a warp's sums on their way to be stored: even and odd ones are in different banks.
using Leaving = float[16][20];

template <class Weight, class T>
class Output {
 public:
  __device__ __forceinline__ Output(const LinearWideArguments &p, Leaving &leaving)
      : p_(p), lane_(threadIdx.x % 32), leaving_(leaving) {}

  // A warp's sums of eight rows of x, to be stored by rows, from row `at` of those that leave.
  __device__ __forceinline__ void put_eight(const float *sums, uint32_t at) const {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      leaving_[at + 2 * t + i % 2][g + i / 2 * 8] = sums[i];
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
    finish_eight(row, column, min(p_.out_features - column, 8u), eights);
  }

  // What belongs to the eight columns whose sums the thread stores: behind the products it would be
  // waited for.
  __device__ __forceinline__ void load_factors(uint32_t column) {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) scales_[i] = 1, biases_[i] = 0;
    if (Weight::kHasScales && p_.weight_scale != nullptr) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        scales_[i] = p_.weight_scale[min(column + i, p_.out_features - 1) / p_.rows_of_scale];
      }
    }
    if (p_.bias_dtype != 0) {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        biases_[i] = number_of(p_.bias, p_.bias_dtype, min(column + i, p_.out_features - 1));
      }
    }
  }

 private:
  // Rounds and stores eight neighbours, or as many as there are, once bias, and residual or gate,
  // have their part in them.
  __device__ __forceinline__ void finish_eight(uint32_t row, uint32_t column, uint32_t columns,
                                               float (&eights)[8]) const {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      eights[i] = fmaf(eights[i] * Weight::template kUnit<T>, scales_[i], biases_[i]);
    }
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
    const uint4 packed = Vector<T>::packed(eights);
    if (is_vector) {
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
      Vector<T>::unpack(*reinterpret_cast<const uint4 *>(from + column * 2), others);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        others[i] = i < columns ? number_of(from, static_cast<uint32_t>(kDtype<T>), column + i) : 0;
      }
    }
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
  float scales_[8], biases_[8];
};

}  // namespace unsloth
