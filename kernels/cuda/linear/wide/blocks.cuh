// Weights in blocks as left-hand sides of wgmma, in x's dtype: codes, which are exact in it, times
// scales rounded to it. Arithmetic in pairs is what leaves time for products: by f32 the numbers
// are rounded once, and a step takes a tenth longer.
#pragma once

#include "common/blocks.cuh"
#include "common/math.cuh"
#include "linear/blocks/numbers.cuh"
#include "linear/wide/weight.cuh"

namespace unsloth {

// `kStep`: weights of a row that are copied at a time, whole blocks of `kBytes` together. Rows are
// `kPitch` apart in shared memory, so that words of eight of them lie in different banks; what is
// behind a row's blocks is there too, and not looked at.
template <Blocks kBlocks>
class InBlocks {
  using F = Format<kBlocks>;
  template <class T>
  struct Scaled;
  // What a lane keeps of a row of Q6_K: loads of two bytes are what its steps would wait for.
  struct KeptOfQ6K {
    float scale;
    uint32_t low[4], high[2];
  };

 public:
  static constexpr uint32_t kCode = static_cast<uint32_t>(kBlocks);
  static constexpr int kStep = 256;
  static constexpr int kBytes = kStep / F::kLength * F::kBytes;
  static constexpr int kPitch = kBlocks == Blocks::kQ4_1   ? 176
                                : kBlocks == Blocks::kQ5_1 ? 208
                                : kBlocks == Blocks::kQ6K  ? 240
                                                           : kBytes;
  static_assert(kPitch % 16 == 0 && kPitch >= kBytes + kBytes % 16 / 2 * 2, "whole lines");
  static constexpr bool kHasOffsets =
      kHasScalesOfScales<kBlocks> || kBlocks == Blocks::kQ4_1 || kBlocks == Blocks::kQ5_1;
  static constexpr bool kHasScales = false;
  using Sum = float;
  static constexpr bool kOfCodes = false;
  static constexpr int kBoxes = 1;
  template <class T>
  static constexpr float kUnit = 1;

  // A lane's two rows of a step, eight apart, from `row` on.
  template <class T>
  class Lane {
   public:
    __device__ __forceinline__ Lane(const uint8_t *row, uint32_t t) : t_(t) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        rows_[h] = row + h * 8 * kPitch;
        if constexpr (kHasScalesOfScales<kBlocks>) factors_[h] = Scaled<T>(rows_[h]);
        if constexpr (kBlocks == Blocks::kQ6K) kept_[h].scale = half_of(Block{rows_[h]}.half(208));
      }
    }

    // Of the half step `half`, which the compiler knows, as left-hand sides: row `h` of the two.
    // All are asked for in their order.
    __device__ __forceinline__ void widen(int half, int h, uint32_t (&to)[kLeft]) {
      uint32_t four_scales = 0;
      if constexpr (kBlocks == Blocks::kQ6K) four_scales = Block{rows_[h]}(192 + 4 * half);
      uint32_t scales[2], offsets[2];
      if constexpr (kHasScalesOfScales<kBlocks>) factors_[h].of(half, scales, offsets);
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        const int first = half * kHalf + i * 16, in_block = first % F::kLength;
        const Block block = {rows_[h] + first / F::kLength * F::kBytes};
        const uint8_t *of_lane = block.bytes + 2 * t_;
        const auto load = [&](int at) {
          if constexpr (kBlocks == Blocks::kQ6K) {
            // Low bits, then high ones, of 128 weights: the second half step has those of the
            // first.
            uint32_t &bits = at < 128 ? kept_[h].low[at / 16 % 4] : kept_[h].high[at / 16 % 2];
            if (half % 2 == 0 && (at < 128 || i < 2)) bits = four_of_sixteen(of_lane + at);
            return bits;
          } else {
            return four_of_sixteen(of_lane + at);
          }
        };
        uint32_t codes = quad_of_codes<kBlocks>(load, block, in_block / 4, 0);
        if constexpr (kHasFifthBits<kBlocks>) {
          const uint32_t from = block(kFifthBits<kBlocks>) >> in_block >> 2 * t_;
          codes |= fifth_bits((from & 3) | (from >> 6 & 12), 0);
        }
        uint32_t pairs[2];
        numbers_of<kBlocks, T>(codes, pairs);
        uint32_t scale, offset;
        if constexpr (kHasScalesOfScales<kBlocks>) {
          scale = scales[i / 2], offset = offsets[i / 2];
        } else if constexpr (kBlocks == Blocks::kQ6K) {
          const float of_scale = static_cast<int8_t>(four_scales >> 8 * i);
          scale = pack<T>(kept_[h].scale * of_scale, kept_[h].scale * of_scale);
        } else {
          const Factors factors = block.factors(in_block / F::kGroup);
          scale = pack<T>(factors.scale, factors.scale);
          offset = pack<T>(factors.offset, factors.offset);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          pairs[j] =
              kHasOffsets ? multiply_add<T>(pairs[j], scale, offset) : multiply<T>(pairs[j], scale);
        }
        to[4 * i + h] = pairs[0], to[4 * i + 2 + h] = pairs[1];
      }
    }

   private:
    const uint32_t t_;
    const uint8_t *rows_[2];
    Scaled<T> factors_[2];
    KeptOfQ6K kept_[2];
  };

 private:
  // A block in shared memory.
  struct Block {
    const uint8_t *bytes;

    __device__ __forceinline__ uint32_t byte(int at) const { return bytes[at]; }
    __device__ __forceinline__ uint32_t half(int at) const {
      return *reinterpret_cast<const uint16_t *>(bytes + at);
    }
    __device__ __forceinline__ uint32_t operator()(int at) const {
      if (F::kAlignment == 4) return *reinterpret_cast<const uint32_t *>(bytes + at);
      return half(at) | half(at + 2) << 16;
    }

    __device__ __forceinline__ Factors factors(int group) const {
      const auto half = [&](int at) { return this->half(at); };
      const auto byte = [&](int at) { return this->byte(at); };
      return factors_of<kBlocks>(half, byte, group);
    }
  };

  // The scales and offsets of a block of Q4_K or Q5_K, which are products of their own: of pairs,
  // as codes are.
  template <class T>
  struct Scaled {
    uint32_t scale, offset, scales[2], offsets[2];

    Scaled() = default;
    __device__ __forceinline__ explicit Scaled(const uint8_t *block) {
      const ScalesOfScales all(Block{block});
      scale = pack<T>(all.scale, all.scale);
      offset = pack<T>(all.offset, all.offset);
#pragma unroll
      for (int i = 0; i < 2; i++) scales[i] = all.scales[i], offsets[i] = all.offsets[i];
    }

    // Of the two groups of a half step, each as a pair.
    __device__ __forceinline__ void of(int half, uint32_t (&to)[2],
                                       uint32_t (&offsets_to)[2]) const {
      part(scales[half / 2], half % 2, scale, to);
      part(offsets[half / 2], half % 2, offset, offsets_to);
    }

    static __device__ __forceinline__ void part(uint32_t bytes, int which, uint32_t by,
                                                uint32_t (&to)[2]) {
      uint32_t pairs[2];
      numbers_of<kBlocks, T>(bytes, pairs);
      const uint32_t both = multiply<T>(pairs[which], by);
      to[0] = __byte_perm(both, 0, 0x1010), to[1] = __byte_perm(both, 0, 0x3232);
    }
  };
};

}  // namespace unsloth
