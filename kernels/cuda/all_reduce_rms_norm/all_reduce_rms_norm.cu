// Few rows are added up over the ranks of a group, and normalised: out = rms_norm(residual + sum).
//
// A block has a row. It writes its rank's row to slots of its own in the memory of every other
// rank, and adds up what they have written to its own, in the order of ranks, so that all of them
// get the same bits. A slot is a line of 16 bytes: two words of the row, each beside the number of
// the call, and 8 bytes are written as one. So whoever reads a word knows whether it has come, and
// nobody waits for a fence: what NCCL calls LL.
//
// Calls take the two halves of the slots by turns. A rank that writes to a half again has seen what
// the others wrote in the call between, which they began when they had read that half.
#include "common/block_sum.cuh"
#include "common/dependent_launch.cuh"
#include "common/marked.cuh"
#include "common/vector.cuh"
#include "contract.h"

#include "all_reduce_rms_norm/arguments.h"

namespace unsloth {

using Arguments = AllReduceRmsNormArguments;

// Looks at a line before the host is asked whether the group was aborted.
constexpr uint32_t kLooks = 1 << 12;

// What a line has, without the numbers of the call.
template <class T>
struct Words {
  static constexpr uint32_t kWidth = 8 / sizeof(T);

  static __device__ __forceinline__ void unpack(uint2 words, float (&to)[kWidth]) {
    if constexpr (kWidth == 2) {
      to[0] = __uint_as_float(words.x), to[1] = __uint_as_float(words.y);
    } else {
      const float2 low = unsloth::unpack<T>(words.x), high = unsloth::unpack<T>(words.y);
      to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    }
  }

  static __device__ __forceinline__ uint2 packed(const float (&from)[kWidth]) {
    if constexpr (kWidth == 2) {
      return {__float_as_uint(from[0]), __float_as_uint(from[1])};
    } else {
      return {pack<T>(from[0], from[1]), pack<T>(from[2], from[3])};
    }
  }

  static __device__ __forceinline__ uint2 load(const void *from, uint64_t line, bool aligned) {
    if (aligned) return static_cast<const uint2 *>(from)[line];
    if constexpr (kWidth == 2) {
      const uint32_t *numbers = static_cast<const uint32_t *>(from) + line * kWidth;
      return {numbers[0], numbers[1]};
    } else {
      const uint16_t *numbers = static_cast<const uint16_t *>(from) + line * kWidth;
      return {numbers[0] | static_cast<uint32_t>(numbers[1]) << 16,
              numbers[2] | static_cast<uint32_t>(numbers[3]) << 16};
    }
  }

  static __device__ __forceinline__ void store(void *to, uint64_t line, uint2 words, bool aligned) {
    if (aligned) {
      static_cast<uint2 *>(to)[line] = words;
    } else if constexpr (kWidth == 2) {
      uint32_t *numbers = static_cast<uint32_t *>(to) + line * kWidth;
      numbers[0] = words.x, numbers[1] = words.y;
    } else {
      uint16_t *numbers = static_cast<uint16_t *>(to) + line * kWidth;
      numbers[0] = static_cast<uint16_t>(words.x),
      numbers[1] = static_cast<uint16_t>(words.x >> 16);
      numbers[2] = static_cast<uint16_t>(words.y),
      numbers[3] = static_cast<uint16_t>(words.y >> 16);
    }
  }
};

// Line `line` of some slots.
__device__ __forceinline__ void *line_at(void *slots, uint32_t line) {
  return static_cast<uint4 *>(slots) + line;
}

__device__ __forceinline__ bool read_line(const Arguments &p, uint32_t line, uint32_t call,
                                          uint2 &words) {
  return read_marked(line_at(p.own_slots, line), call, words);
}

__device__ __forceinline__ float number_at(const void *from, uint32_t i, Float dtype) {
  if (dtype == Float::kF32) return static_cast<const float *>(from)[i];
  if (dtype == Float::kF16) return __half2float(static_cast<const __half *>(from)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16 *>(from)[i]);
}

// How many take part, and what they have in registers. A line for each thread is fastest
// (LADDER.md).
template <uint32_t most_ranks, uint32_t threads, uint32_t lines>
struct Form {
  static constexpr uint32_t kRanks = most_ranks, kThreads = threads, kWarps = threads / 32;
  // Of a thread, and those of them that it asks all ranks for at once.
  static constexpr uint32_t kLines = lines, kAtOnce = most_ranks > 2 ? 1 : lines;
};

template <class T, class Form>
__device__ __forceinline__ void all_reduce_rms_norm(const Arguments &p, float *of_warp) {
  constexpr uint32_t kWidth = Words<T>::kWidth, kRanks = Form::kRanks, kLines = Form::kLines;
  void *const slots[] = {p.slots_0, p.slots_1, p.slots_2, p.slots_3,
                         p.slots_4, p.slots_5, p.slots_6, p.slots_7};
  static_assert(sizeof(slots) / sizeof(void *) == kRankSumRanks, "an argument for each rank");
  const uint32_t row = blockIdx.x;
  const uint64_t first = static_cast<uint64_t>(row) * p.row_lines;
  const bool aligned = p.aligned != 0;
  const uint32_t call = p.calls[row] + 1;
  const auto line_of = [](uint32_t i) { return i * Form::kThreads + threadIdx.x; };
  // Where a rank's row lies among the slots.
  const auto slot = [&](uint32_t rank) {
    return (((call & 1) * p.ranks + rank) * kRankSumRows + row) * kRankSumLines;
  };

  uint2 x[kLines];
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    x[i] = {0, 0};
    if (line_of(i) < p.row_lines) x[i] = Words<T>::load(p.x, first + line_of(i), aligned);
  }
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    if (line_of(i) >= p.row_lines) continue;
#pragma unroll
    for (uint32_t to = 0; to < kRanks; to++) {
      if (to >= p.ranks || to == p.rank) continue;
      write_marked(line_at(slots[to], slot(p.rank) + line_of(i)), x[i], call);
    }
  }

  // What else a thread needs is on its way meanwhile.
  uint2 residual[kLines];
  float gains[kLines][kWidth];
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    residual[i] = {0, 0};
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) gains[i][j] = 1;
    const uint32_t line = line_of(i);
    if (line >= p.row_lines) continue;
    if (p.residual != nullptr) residual[i] = Words<T>::load(p.residual, first + line, aligned);
    if (p.weight == nullptr) continue;
    if (static_cast<Float>(p.weight_dtype) != kDtype<T>) {
#pragma unroll
      for (uint32_t j = 0; j < kWidth; j++) {
        gains[i][j] = number_at(p.weight, line * kWidth + j, static_cast<Float>(p.weight_dtype));
      }
    } else {
      Words<T>::unpack(Words<T>::load(p.weight, line, aligned), gains[i]);
    }
  }

  float sums[kLines][kWidth];
  float squares = 0;
#pragma unroll
  for (uint32_t start = 0; start < kLines; start += Form::kAtOnce) {
    uint2 words[Form::kAtOnce][kRanks];
    bool there;
    uint32_t looks = 0;
    // All are asked for together, until all are there.
    do {
      there = true;
#pragma unroll
      for (uint32_t k = 0; k < Form::kAtOnce; k++) {
        const uint32_t line = line_of(start + k);
#pragma unroll
        for (uint32_t from = 0; from < kRanks; from++) {
          words[k][from] = x[start + k];
          if (line >= p.row_lines || from >= p.ranks || from == p.rank) continue;
          there &= read_line(p, slot(from) + line, call, words[k][from]);
        }
      }
    } while (!there && (++looks % kLooks != 0 || read_of_host(p.aborted) == 0));
#pragma unroll
    for (uint32_t k = 0; k < Form::kAtOnce; k++) {
      const uint32_t i = start + k;
#pragma unroll
      for (uint32_t j = 0; j < kWidth; j++) sums[i][j] = 0;
#pragma unroll
      for (uint32_t from = 0; from < kRanks; from++) {
        if (from >= p.ranks) continue;
        float of_rank[kWidth];
        Words<T>::unpack(words[k][from], of_rank);
#pragma unroll
        for (uint32_t j = 0; j < kWidth; j++) sums[i][j] += of_rank[j];
      }
      float before[kWidth];
      Words<T>::unpack(residual[i], before);
#pragma unroll
      for (uint32_t j = 0; j < kWidth; j++) {
        sums[i][j] += before[j];
        squares += sums[i][j] * sums[i][j];
      }
    }
  }
  const float mean =
      block_sum<Form::kWarps>(squares, of_warp) / static_cast<float>(p.row_lines * kWidth);
  const float scale = rsqrtf(mean + p.epsilon);
  // All of the block have read it.
  if (threadIdx.x == 0) p.calls[row] = call;
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) {
    const uint32_t line = line_of(i);
    if (line >= p.row_lines) continue;
    if (p.residual_out != nullptr) {
      Words<T>::store(p.residual_out, first + line, Words<T>::packed(sums[i]), aligned);
    }
    float out[kWidth];
#pragma unroll
    for (uint32_t j = 0; j < kWidth; j++) {
      out[j] = sums[i][j] * scale * (gains[i][j] + p.weight_offset);
    }
    Words<T>::store(p.out, first + line, Words<T>::packed(out), aligned);
  }
}

}  // namespace unsloth

#define UNSLOTH_ALL_REDUCE_RMS_NORM(name, type, ...)                                         \
  extern "C" __global__ void __launch_bounds__(unsloth::Form<__VA_ARGS__>::kThreads, 1)      \
      all_reduce_rms_norm_##name(const __grid_constant__ AllReduceRmsNormArguments params) { \
    unsloth::let_next_kernel_start();                                                        \
    extern __shared__ float of_warp[];                                                       \
    unsloth::await_previous_kernel();                                                        \
    unsloth::all_reduce_rms_norm<type, unsloth::Form<__VA_ARGS__>>(params, of_warp);         \
  }                                                                                          \
  extern "C" __device__ const AllReduceRmsNormLaunch all_reduce_rms_norm_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                                           \
      unsloth::Form<__VA_ARGS__>::kRanks,                                                    \
      unsloth::Form<__VA_ARGS__>::kThreads * unsloth::Form<__VA_ARGS__>::kLines,             \
      unsloth::Form<__VA_ARGS__>::kThreads,                                                  \
      unsloth::Form<__VA_ARGS__>::kWarps * sizeof(float),                                    \
  };

// Rows of 8 KiB, and of 16 KiB.
#define UNSLOTH_ALL_REDUCE_RMS_NORM_OF(name, type)               \
  UNSLOTH_ALL_REDUCE_RMS_NORM(name##_two, type, 2, 1024, 1)      \
  UNSLOTH_ALL_REDUCE_RMS_NORM(name##_two_long, type, 2, 1024, 2) \
  UNSLOTH_ALL_REDUCE_RMS_NORM(name##_any, type, 8, 1024, 1)      \
  UNSLOTH_ALL_REDUCE_RMS_NORM(name##_any_long, type, 8, 512, 4)

UNSLOTH_ALL_REDUCE_RMS_NORM_OF(f32, float)
UNSLOTH_ALL_REDUCE_RMS_NORM_OF(f16, __half)
UNSLOTH_ALL_REDUCE_RMS_NORM_OF(bf16, __nv_bfloat16)
