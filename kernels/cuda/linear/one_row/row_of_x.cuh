// The row of x, which may pass RMSNorm on its way, as integers: digits of 16 bits, and a scale for
// each 32 neighbours.
#pragma once

#include "common/named_barrier.cuh"
#include "common/vector.cuh"
#include "linear/blocks/digits.cuh"
#include "linear/norm.cuh"
#include "linear/one_row/arguments.h"
#include "linear/one_row/sizes.cuh"

namespace unsloth {

template <Blocks kBlocks, class T>
class RowOfX {
  using D = Digits<kBlocks>;

 public:
  using Scale = typename D::Scale;
  // Of 32 neighbours.
  static constexpr uint32_t kBytes = 64 + sizeof(Scale);

  // In shared memory from `shared` on, of so many steps; `squares`: room for sums of the parts of
  // a row that is normalised.
  __device__ __forceinline__ RowOfX(const LinearOneRowArguments &p, uint32_t warp, uint32_t steps,
                                    uint8_t *shared, float *squares)
      : p_(p),
        warp_(warp),
        lane_(threadIdx.x % 32),
        steps_(steps),
        numbers_(reinterpret_cast<uint32_t *>(shared)),
        scales_(reinterpret_cast<Scale *>(shared + steps * kUnits * 64)),
        squares_(squares) {}

  // The digits of a unit's 32 neighbours, or of those behind it: `column` is of two for each unit,
  // the upper digits and the lower ones. Of lane t of four: its four of the first 16, and of the
  // others.
  __device__ __forceinline__ uint2 digits(uint32_t unit, uint32_t column, uint32_t t) const {
    return reinterpret_cast<const uint2 *>(numbers_)[(unit * 2 + column) * 4 + t];
  }

  __device__ __forceinline__ const Scale &scale(uint32_t unit) const { return scales_[unit]; }

  // Before the kernel before has ended: loads the gains that a thread needs first, if they are
  // constant, and has others fetched.
  __device__ __forceinline__ void begin(uint4 (&gains)[2]) const {
    if (p_.norm_dtype == 0) return;
    if (p_.norm_constant != 0) {
      load_gains(first_gains(), gains);
    } else {
      fetch_gains(p_, p_.units * 32);
    }
  }

  // Makes integers of x. A lane has eight neighbours at a time, so that four have 32.
  // `gains`: as `begin` leaves them.
  __device__ __forceinline__ void round(uint4 (&gains)[2]) const {
    const uint32_t vectors = p_.units * 4;
    const uint4 *x = static_cast<const uint4 *>(p_.x);
    const auto load = [&](uint32_t at) { return at < vectors ? x[at] : uint4{}; };
    uint32_t at = threadIdx.x;
    // What is asked for before any is looked at.
    uint4 words[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; i++) words[i] = load(at + i * kMultipliers);
    float scale = 1;
    if (p_.norm_dtype != 0) {
      if (p_.norm_constant == 0) load_gains(first_gains(), gains);
      uint4 of_part = words[0];
#pragma unroll 1
      for (uint32_t part = warp_; part < steps_; part += kWarps) {
        if (part != warp_) of_part = load(part * 32 + lane_);
        const float sum = squares_of_part<T>(of_part);
        if (lane_ == 0) squares_[part] = sum;
      }
      named_barrier_sync(kAmongMultipliers, kMultipliers);
      scale = scale_of_row<true>(p_, squares_, steps_);
    }
    // All lanes of a warp have some, or none has: those behind the row have zeros.
    const uint32_t end = steps_ * 32;
    if (p_.norm_dtype == 0) {
      // Longer ones are rounded without moving words from register to register.
#pragma unroll 1
      while (at < end) {
#pragma unroll
        for (uint32_t i = 0; i < kAhead; i++) {
          round_vector(words[i], at);
          at += kMultipliers;
          if (at >= end) return;
        }
#pragma unroll
        for (uint32_t i = 0; i < kAhead; i++) words[i] = load(at + i * kMultipliers);
      }
      return;
    }
#pragma unroll 1
    for (; at < end; at += kMultipliers) {
      if (at < vectors) {
        if (at >= kMultipliers) load_gains(at, gains);
        normalise(gains, scale, words[0]);
      }
      round_vector(words[0], at);
#pragma unroll
      for (uint32_t i = 0; i + 1 < kAhead; i++) words[i] = words[i + 1];
      words[kAhead - 1] = load(at + kAhead * kMultipliers);
    }
  }

 private:
  // Vectors of x that a lane asks for at a time.
  static constexpr uint32_t kAhead = 4;

  // Of which a thread has gains first; there are others behind a short row.
  __device__ __forceinline__ uint32_t first_gains() const {
    return min(threadIdx.x, p_.units * 4 - 1);
  }

  // Of eight neighbours, as they are stored.
  __device__ __forceinline__ void load_gains(uint32_t at, uint4 (&gains)[2]) const {
    const uint4 *norm = static_cast<const uint4 *>(p_.norm);
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      gains[0] = norm[2 * at], gains[1] = norm[2 * at + 1];
    } else {
      gains[0] = norm[at];
    }
  }

  // Rounded to the dtype of x, as they would be stored.
  __device__ __forceinline__ void normalise(const uint4 (&words)[2], float scale, uint4 &x) const {
    float gains[8], eight[8];
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      const uint4 &a = words[0], &b = words[1];
      const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; i++) gains[i] = __uint_as_float(bits[i]);
    } else {
      Vector<T>::unpack(words[0], gains);
    }
    Vector<T>::unpack(x, eight);
#pragma unroll
    for (int i = 0; i < 8; i++) eight[i] = normalised(p_, eight[i], gains[i], scale);
    x = Vector<T>::packed(eight);
  }

  // By the four lanes of 32 neighbours. Digits lie as lanes read them, a word for four neighbours:
  // [32 neighbours][digit][four of 16][16 of them].
  __device__ __forceinline__ void round_vector(const uint4 &words, uint32_t at) const {
    // As bits, two at a time.
    constexpr uint32_t kSignless = 0x7fff7fff;
    uint32_t pair = __vmaxu2(__vmaxu2(words.x & kSignless, words.y & kSignless),
                             __vmaxu2(words.z & kSignless, words.w & kSignless));
    pair = __vmaxu2(pair, __shfl_xor_sync(kAllLanes, pair, 1));
    pair = __vmaxu2(pair, __shfl_xor_sync(kAllLanes, pair, 2));
    const Rounding rounding(__float_as_uint(unpack<T>(max(pair & 0xffff, pair >> 16)).x));
    float x[8];
    Vector<T>::unpack(words, x);
    const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
    uint2 upper, lower;
    int32_t sum = rounding.round(low, upper.x, lower.x);
    sum += rounding.round(high, upper.y, lower.y);
    uint32_t *to = numbers_ + at / 4 * 16 + at % 2 * 4 + at % 4 / 2;
    to[0] = upper.x, to[2] = upper.y, to[8] = lower.x, to[10] = lower.y;
    int32_t others = 0;
    if constexpr (D::kSumFactor != 0) {
      // Of halves of the 32.
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      others = __shfl_xor_sync(kAllLanes, sum, 2);
    }
    if (at % 4 != 0) return;
    const float unit = D::kSumFactor * rounding.scale();
    if constexpr (D::kHalves) {
      scales_[at / 4] = {rounding.scale(), {unit * sum, unit * others}, 0};
    } else {
      scales_[at / 4] = {rounding.scale(), unit * (sum + others)};
    }
  }

  const LinearOneRowArguments &p_;
  const uint32_t warp_, lane_, steps_;
  // As `digits` has them; of each 32 neighbours; of parts.
  uint32_t *const numbers_;
  Scale *const scales_;
  float *const squares_;
};

}  // namespace unsloth
