// Rounding to codes of 8 or 2 bits, with a scale for each group of a row or for all.
//
// A warp or a block takes a group: it reads it for the scale, and again, from the cache, for the
// codes; or it holds it (held.cuh), or many in turn (in_turn.cuh). Where all share a scale, the
// rows' shares of it are written to the workspace first, and a block makes the scale of them.
//
// The results are the bits that the CPU gives: magnitudes are added in the order that the operation
// documents, in f32 within pieces and in f64 between them, and quotients are rounded as IEEE has
// it. It is CUDA C++ for that and for the bytes of codes: CubeCL's `round` takes halves away from
// zero.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/e4m3.cuh"
#include "common/vector.cuh"
#include "quantize/common.cuh"
#include "quantize/in_turn.cuh"

namespace unsloth {

// Neighbours whose magnitudes are added in f32.
constexpr uint32_t kPiece = 4096;
// Codes of a block of the ternary dtype, and its bytes.
constexpr uint32_t kBlock = 128;
constexpr uint32_t kBlockBytes = kBlock / 4;

// Shared memory: what warps have; what is on its way besides; what as many rows found as there are
// threads.
constexpr int32_t kWarpsBytes = sizeof(OfWarps);
constexpr int32_t kInTurnBytes = sizeof(InTurnShared);
constexpr int32_t kRowsBytes = kThreads * sizeof(float2);

// The greatest number that has a code.
template <QuantizeCodes kCodes>
constexpr float kGreatest = kCodes == QuantizeCodes::kTernary ? 1
                            : kCodes == QuantizeCodes::kE4m3  ? 448
                                                              : 127;

// Magnitudes above some threshold.
struct Magnitudes {
  double sum;
  uint64_t count;

  __device__ __forceinline__ float mean() const {
    return count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
  }
};

// What codes follow from.
struct Scale {
  float scale, threshold;
};

__device__ __forceinline__ bool is_rule(uint32_t rule, Rule of) {
  return rule == static_cast<uint32_t>(of);
}

// The scale of `kThreshold`, given the mean of all and what is above the threshold.
__device__ __forceinline__ float scale_above(float mean, const Magnitudes &above) {
  return isfinite(mean) ? above.mean() : mean;
}

__device__ __forceinline__ int32_t sum_of_warp(int32_t x) { return __reduce_add_sync(kAll, x); }

// A group, and the threads that share it.
template <class T>
class Group {
 public:
  __device__ __forceinline__ Group(const T *x, uint32_t length, bool vectors, uint32_t warps,
                                   uint32_t *shared)
      : x_(x),
        length_(length),
        vectors_(vectors),
        warps_(warps),
        warp_(warps == 1 ? 0 : threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        shared_(shared) {}

  __device__ __forceinline__ bool is_first() const { return warp_ == 0 && lane_ == 0; }

  // The bits of the greatest magnitude, in whose order the numbers are; NaN is above all.
  __device__ __forceinline__ uint32_t greatest() const {
    constexpr uint32_t kWidth = Vector<T>::kWidth;
    uint32_t most = 0;
    if (vectors_) {
      const uint4 *vectors = reinterpret_cast<const uint4 *>(x_);
#pragma unroll 4
      for (uint32_t i = thread(); i < length_ / kWidth; i += threads()) {
        most = Vector<T>::max_magnitudes(vectors[i], most);
      }
      most = Vector<T>::as_f32(most);
    } else {
      for (uint32_t i = thread(); i < length_; i += threads()) {
        most = max(most, magnitude(number(i)));
      }
    }
    return greatest_of_all(most);
  }

  // The sum and the number of the magnitudes above `least`.
  __device__ __forceinline__ Magnitudes magnitudes(float least) const {
    Magnitudes found = {0, 0};
    for (uint32_t first = 0; first < length_; first += min(warps_ * kPiece, length_ - first)) {
      const uint32_t start = first + min(warp_ * kPiece, length_ - first);
      const uint32_t len = min(kPiece, length_ - start);
      float sum = 0;
      int32_t count = 0;
#pragma unroll 8
      for (uint32_t i = lane_; i < len; i += 32) {
        const float x = fabsf(number(start + i));
        const bool taken = x > least || isnan(x);  // NaN shows in the sum
        sum += taken ? x : 0.0f;
        count += taken;
      }
#pragma unroll
      for (uint32_t by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(kAll, sum, by);
      found.count += sum_of_warp(count);
      if (warps_ == 1) {
        found.sum += static_cast<double>(sum);
        continue;
      }
      put(__float_as_uint(sum));
      for (uint32_t w = 0; w < kWarps && w * kPiece < length_ - first; w++) {
        found.sum += static_cast<double>(__uint_as_float(shared_[w]));
      }
      __syncthreads();
    }
    if (least < 0) {
      found.count = length_;
    } else if (warps_ > 1) {
      // A row has fewer elements than 32 bits count.
      found.count = total(static_cast<int32_t>(found.count));
    }
    return found;
  }

  __device__ __forceinline__ Scale scale(uint32_t rule, float most) const {
    if (is_rule(rule, Rule::kAbsMax)) return {__uint_as_float(greatest()) / most, 0};
    const float mean = magnitudes(-1).mean();
    const float threshold = 0.7f * mean;
    if (is_rule(rule, Rule::kAbsMean)) return {mean, threshold};
    return {scale_above(mean, magnitudes(threshold)), threshold};
  }

  // Writes the codes, and of those of 8 bits zeros up to `padded`; gives the sum of integers.
  template <QuantizeCodes kCodes>
  __device__ __forceinline__ int32_t encode(const Scale &scale, uint32_t rule, uint8_t *out,
                                            uint32_t padded) const {
    constexpr float kMost = kGreatest<kCodes>;
    const auto code = [&](float x) -> int32_t {
      if (!isfinite(scale.scale) || scale.scale == 0) return 0;
      if (kCodes == QuantizeCodes::kE4m3) return static_cast<int32_t>(to_e4m3(x / scale.scale));
      if (is_rule(rule, Rule::kThreshold)) return (x > scale.threshold) - (x < -scale.threshold);
      return static_cast<int32_t>(fminf(fmaxf(rintf(x / scale.scale), -kMost), kMost));
    };
    int32_t sum = 0;
    if constexpr (kCodes == QuantizeCodes::kTernary) {
      // A lane has a byte, whose codes lie 32 apart.
      const uint32_t first = warp_ * kBlock, step = warps_ * kBlock;
      for (uint32_t start = first; start < length_; start += step) {
        uint32_t byte = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
          const int32_t of = code(number(start + i * kBlockBytes + lane_));
          sum += of;
          byte |= static_cast<uint32_t>(of + 1) << 2 * i;
        }
        out[start / 4 + lane_] = static_cast<uint8_t>(byte);
      }
    } else if (vectors_) {
      constexpr uint32_t kWidth = Vector<T>::kWidth;
      const uint4 *vectors = reinterpret_cast<const uint4 *>(x_);
      uint32_t *words = reinterpret_cast<uint32_t *>(out);
#pragma unroll 4
      for (uint32_t i = thread(); i < length_ / kWidth; i += threads()) {
        float numbers[kWidth];
        Vector<T>::unpack(vectors[i], numbers);
#pragma unroll
        for (uint32_t w = 0; w < kWidth / 4; w++) {
          uint32_t word = 0;
#pragma unroll
          for (uint32_t j = 0; j < 4; j++) {
            const int32_t of = code(numbers[4 * w + j]);
            sum += of;
            word |= (static_cast<uint32_t>(of) & 255) << 8 * j;
          }
          words[i * (kWidth / 4) + w] = word;
        }
      }
    } else {
      for (uint32_t i = thread(); i < length_; i += threads()) {
        const int32_t of = code(number(i));
        sum += of;
        out[i] = static_cast<uint8_t>(of);
      }
    }
    if constexpr (kCodes != QuantizeCodes::kTernary) {
      for (uint32_t i = length_ + thread(); i < padded; i += threads()) out[i] = 0;
    }
    sum = sum_of_warp(sum);
    return warps_ == 1 ? sum : total(sum);
  }

 private:
  // The greatest that the group's threads have.
  __device__ __forceinline__ uint32_t greatest_of_all(uint32_t most) const {
    most = static_cast<uint32_t>(__reduce_max_sync(kAll, static_cast<int>(most)));
    if (warps_ == 1) return most;
    put(most);
    most = static_cast<uint32_t>(
        __reduce_max_sync(kAll, static_cast<int>(lane_ < kWarps ? shared_[lane_] : 0)));
    __syncthreads();
    return most;
  }

  __device__ __forceinline__ uint32_t thread() const { return warp_ * 32 + lane_; }
  __device__ __forceinline__ uint32_t threads() const { return warps_ * 32; }
  __device__ __forceinline__ float number(uint32_t i) const { return static_cast<float>(x_[i]); }
  static __device__ __forceinline__ uint32_t magnitude(float x) {
    return __float_as_uint(x) & 0x7fffffff;
  }

  // Gives each warp's value to all; they meet again before the next.
  __device__ __forceinline__ void put(uint32_t value) const {
    if (lane_ == 0) shared_[warp_] = value;
    __syncthreads();
  }

  // The sum over the block's warps.
  __device__ __forceinline__ int32_t total(int32_t of_warp) const {
    put(static_cast<uint32_t>(of_warp));
    const int32_t sum =
        __reduce_add_sync(kAll, lane_ < kWarps ? static_cast<int>(shared_[lane_]) : 0);
    __syncthreads();
    return sum;
  }

  const T *const x_;
  const uint32_t length_;
  const bool vectors_;
  const uint32_t warps_, warp_, lane_;
  // A word for each warp.
  uint32_t *const shared_;
};

// Codes, sums, and the scales unless all share one. Grid: groups.
template <class T, QuantizeCodes kCodes>
__device__ __forceinline__ void codes(const Arguments &p, uint4 *dynamic) {
  if constexpr (kCodes == QuantizeCodes::kI8) {
    if (p.held) return round_held<T>(p, dynamic);
  }
  await_previous_kernel();
  uint32_t *shared = reinterpret_cast<uint32_t *>(dynamic);
  const uint32_t index = group_of(p);
  if (index >= p.num_rows * p.groups) return;
  const Place<T> place(p, index);
  const Group<T> group(place.x, p.length, p.vectors != 0, p.warps, shared);
  const bool own = p.shared == nullptr;
  const Scale scale =
      own ? group.scale(p.rule, kGreatest<kCodes>) : Scale{p.shared->x, p.shared->y};
  uint8_t *out = kCodes == QuantizeCodes::kTernary ? place.out_of_quarters : place.out;
  const int32_t sum = group.template encode<kCodes>(scale, p.rule, out, p.padded);
  if (!group.is_first()) return;
  const uint64_t at = static_cast<uint64_t>(p.first_row) * p.groups + index;
  if (own) p.scale[at] = scale.scale;
  if (p.sum != nullptr) p.sum[at] = sum;
}

// What each row adds to the scale of all: its greatest magnitude; or the sum of magnitudes and the
// bits of their number. Grid: rows.
template <class T>
__device__ __forceinline__ void row_statistics(const Arguments &p, uint4 *dynamic) {
  uint32_t *shared = reinterpret_cast<uint32_t *>(dynamic);
  const uint32_t row = group_of(p);
  if (row >= p.num_rows) return;
  const T *x = start_of<T>(p, row);
  const Group<T> group(x, p.length, p.vectors != 0, p.warps, shared);
  float2 found = {0, 0};
  if (is_rule(p.rule, Rule::kAbsMax)) {
    found.x = __uint_as_float(group.greatest());
  } else {
    const Magnitudes of_row = group.magnitudes(p.second ? p.shared->y : -1);
    found = {static_cast<float>(of_row.sum), __uint_as_float(static_cast<uint32_t>(of_row.count))};
  }
  if (group.is_first()) p.rows_found[p.first_row + row] = found;
}

// The scale that all share, of what their rows gave. One block.
__device__ __forceinline__ void scale_of_all(const Arguments &p, uint4 *dynamic, float most) {
  float2 *rows = reinterpret_cast<float2 *>(dynamic);
  uint32_t greatest = 0;
  Magnitudes all = {0, 0};
  for (uint32_t first = 0; first < p.num_rows; first += min(kThreads, p.num_rows - first)) {
    const uint32_t count = min(kThreads, p.num_rows - first);
    if (threadIdx.x < count) rows[threadIdx.x] = p.rows_found[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < count; i++) {
        greatest = max(greatest, __float_as_uint(rows[i].x));
        all.sum += static_cast<double>(rows[i].x);
        all.count += __float_as_uint(rows[i].y);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  Scale scale = {__uint_as_float(greatest) / most, 0};
  if (!is_rule(p.rule, Rule::kAbsMax)) {
    if (p.second) {
      scale = {scale_above(p.shared->x, all), p.shared->y};
    } else {
      all.count = p.num_elements;
      const float mean = all.mean();
      scale = {mean, 0.7f * mean};
    }
  }
  *p.shared = {scale.scale, scale.threshold};
  *p.scale = scale.scale;
}

}  // namespace unsloth

// What the host must know of a kernel.
#define UNSLOTH_QUANTIZE_LAUNCH(name, kind, dtype, codes_of, bytes)       \
  extern "C" __device__ const QuantizeLaunch quantize_##name##_launch = { \
      static_cast<int32_t>(unsloth::QuantizeKind::kind),                  \
      dtype,                                                              \
      static_cast<int32_t>(unsloth::QuantizeCodes::codes_of),             \
      unsloth::kThreads,                                                  \
      bytes,                                                              \
  };

// Instantiates a kernel.
#define UNSLOTH_QUANTIZE(name, kind, dtype, codes_of, bytes, ...)         \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 4)      \
      quantize_##name(const __grid_constant__ QuantizeArguments params) { \
    unsloth::let_next_kernel_start();                                     \
    unsloth::await_previous_kernel();                                     \
    extern __shared__ uint4 dynamic[];                                    \
    unsloth::__VA_ARGS__;                                                 \
  }                                                                       \
  UNSLOTH_QUANTIZE_LAUNCH(name, kind, dtype, codes_of, bytes)

// Those of codes wait in what they call.
#define UNSLOTH_QUANTIZE_CODES(name, type, codes_of)                                           \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 4)                           \
      quantize_##name(const __grid_constant__ QuantizeArguments params) {                      \
    unsloth::let_next_kernel_start();                                                          \
    extern __shared__ uint4 dynamic[];                                                         \
    unsloth::codes<type, unsloth::QuantizeCodes::codes_of>(params, dynamic);                   \
  }                                                                                            \
  UNSLOTH_QUANTIZE_LAUNCH(name, kCodes, static_cast<int32_t>(unsloth::kDtype<type>), codes_of, \
                          unsloth::kWarpsBytes)
#define UNSLOTH_QUANTIZE_IN_TURN(name, type)                                               \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 6)                       \
      quantize_##name(const __grid_constant__ QuantizeArguments params) {                  \
    unsloth::let_next_kernel_start();                                                      \
    extern __shared__ uint4 dynamic[];                                                     \
    unsloth::round_in_turn<type>(params, dynamic);                                         \
  }                                                                                        \
  UNSLOTH_QUANTIZE_LAUNCH(name, kInTurn, static_cast<int32_t>(unsloth::kDtype<type>), kI8, \
                          unsloth::kInTurnBytes)

// For each dtype of x.
#define UNSLOTH_QUANTIZE_OF(name, type)                                                  \
  UNSLOTH_QUANTIZE_CODES(codes_##name, type, kI8)                                        \
  UNSLOTH_QUANTIZE_CODES(ternary_##name, type, kTernary)                                 \
  UNSLOTH_QUANTIZE_CODES(e4m3_##name, type, kE4m3)                                       \
  UNSLOTH_QUANTIZE_IN_TURN(in_turn_##name, type)                                         \
  UNSLOTH_QUANTIZE(rows_##name, kRows, static_cast<int32_t>(unsloth::kDtype<type>), kI8, \
                   unsloth::kWarpsBytes, row_statistics<type>(params, dynamic))

// The scale of all, by the greatest code.
#define UNSLOTH_QUANTIZE_SCALE(name, codes_of)        \
  UNSLOTH_QUANTIZE(                                   \
      name, kScale, 0, codes_of, unsloth::kRowsBytes, \
      scale_of_all(params, dynamic, unsloth::kGreatest<unsloth::QuantizeCodes::codes_of>))
