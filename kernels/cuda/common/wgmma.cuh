// wgmma: the warpgroup matrix multiply of sm_90a, D[64 x N] += A[64 x 16] * B[16 x N].
//
// All four warps of a warpgroup issue it together; it runs asynchronously. B comes from shared
// memory, A from shared memory (`ss`) or registers (`rs`), D stays in registers:
//   lane l of warp w holds d[4j + 2i + c] = D[16w + l/4 + 8i][8j + 2(l%4) + c],  i, c in {0, 1}.
// An A fragment of k-step s is laid out so that packing d[8s..8s+7] of an earlier D in pairs gives
// it: P = softmax(S) needs no data movement between the two products of attention.
//
// Order of use: `wgmma_fence` once the registers and shared memory are ready, the multiplies,
// `wgmma_commit`, and `wgmma_wait<n>` until at most the n newest groups are pending. Until then D
// and register A may not be touched; `hold` on the arrays tells the compiler so, because it takes
// the inline assembly to be synchronous.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "jitter.cuh"

namespace unsloth {

__device__ __forceinline__ void wgmma_fence() {
  rejoin();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins values to their registers at this point of the program: no use moves across it.
template <int N>
__device__ __forceinline__ void hold(uint32_t (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(int32_t (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Shared-memory operand descriptors for tiles written by TMA with the 128-byte swizzle: columns in
// chunks of 64 16-bit elements, each chunk a run of 128-byte rows, the tile 1024-byte aligned.
//
// Fields: address >> 4 in bits 0-13, leading offset >> 4 in 16-29, stride offset >> 4 in 32-45, and
// the swizzle (1 = 128 bytes) in 62-63. The stride offset goes from one group of eight rows to the
// next. The leading offset matters only when the operand runs across chunks along its M or N.
constexpr uint64_t kDescriptorSwizzle128 = uint64_t{1} << 62;

// The reduced dimension runs along the row (Q and K in Q K^T). A k-step of 16 advances 32 bytes.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
  return kDescriptorSwizzle128 | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3FFFF) >> 4);
}

// The reduced dimension runs down the rows (V in P V), of which the tile has `rows`. A k-step of 16
// advances 16 rows, 2048 bytes.
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, int rows) {
  return kDescriptorSwizzle128 | (uint64_t{1024 >> 4} << 32) |
         (static_cast<uint64_t>(rows * 128 >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// Rows of eight 16-bit elements, one behind the other, for the first half of a k-step of 16. The
// other half is the same again, which nothing but zeros may be multiplied with.
__device__ __forceinline__ uint64_t descriptor_of_eights(uint32_t address) {
  return (uint64_t{128 >> 4} << 32) | ((address & 0x3FFFF) >> 4);
}

// One instruction shape: `Wgmma<T, N>::ss` and `::rs`. `accumulate` false starts D from zero.
// Operands that are transposed are those whose reduced dimension runs down the rows.
template <class T, int N>
struct Wgmma;

// Operand lists for up to 128 accumulators, in eights.
#define UNSLOTH_D8(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define UNSLOTH_D16 UNSLOTH_D8(0), UNSLOTH_D8(8)
#define UNSLOTH_D24 UNSLOTH_D16, UNSLOTH_D8(16)
#define UNSLOTH_D32 UNSLOTH_D24, UNSLOTH_D8(24)
#define UNSLOTH_D40 UNSLOTH_D32, UNSLOTH_D8(32)
#define UNSLOTH_D48 UNSLOTH_D40, UNSLOTH_D8(40)
#define UNSLOTH_D56 UNSLOTH_D48, UNSLOTH_D8(48)
#define UNSLOTH_D64 UNSLOTH_D56, UNSLOTH_D8(56)
#define UNSLOTH_D72 UNSLOTH_D64, UNSLOTH_D8(64)
#define UNSLOTH_D80 UNSLOTH_D72, UNSLOTH_D8(72)
#define UNSLOTH_D88 UNSLOTH_D80, UNSLOTH_D8(80)
#define UNSLOTH_D96 UNSLOTH_D88, UNSLOTH_D8(88)
#define UNSLOTH_D104 UNSLOTH_D96, UNSLOTH_D8(96)
#define UNSLOTH_D112 UNSLOTH_D104, UNSLOTH_D8(104)
#define UNSLOTH_D120 UNSLOTH_D112, UNSLOTH_D8(112)
#define UNSLOTH_D128 UNSLOTH_D120, UNSLOTH_D8(120)

#define UNSLOTH_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define UNSLOTH_R24                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20," \
  " %21, %22, %23"
#define UNSLOTH_R32 UNSLOTH_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define UNSLOTH_R40 UNSLOTH_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define UNSLOTH_R48 UNSLOTH_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define UNSLOTH_R56 UNSLOTH_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define UNSLOTH_R64 UNSLOTH_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define UNSLOTH_R72 UNSLOTH_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define UNSLOTH_R80 UNSLOTH_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define UNSLOTH_R88 UNSLOTH_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define UNSLOTH_R96 UNSLOTH_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define UNSLOTH_R104 UNSLOTH_R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define UNSLOTH_R112 UNSLOTH_R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define UNSLOTH_R120 UNSLOTH_R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define UNSLOTH_R128 UNSLOTH_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// `n` columns, `regs` = n / 2 accumulators per thread; x0 to x6 number the operands after them.
#define UNSLOTH_WGMMA_TYPE(type, ptx, n, regs, x0, x1, x2, x3, x4, x5, x6)                       \
  template <>                                                                                    \
  struct Wgmma<type, n> {                                                                        \
    template <int kTransposeB, int kTransposeA = 0>                                              \
    static __device__ __forceinline__ void ss(float (&d)[regs], uint64_t a, uint64_t b,          \
                                              int accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx           \
                   " {" UNSLOTH_R##regs "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x3 ", %" #x4 ";\n}" \
                   : UNSLOTH_D##regs                                                             \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));       \
    }                                                                                            \
    template <int kTransposeB>                                                                   \
    static __device__ __forceinline__ void rs(float (&d)[regs], const uint32_t *a, uint64_t b,   \
                                              int accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx           \
                   " {" UNSLOTH_R##regs "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4     \
                                        ", p, 1, 1, %" #x6 ";\n}"                                \
                   : UNSLOTH_D##regs                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),        \
                     "n"(kTransposeB));                                                          \
    }                                                                                            \
  };

#define UNSLOTH_WGMMA(...)                               \
  UNSLOTH_WGMMA_TYPE(__nv_bfloat16, "bf16", __VA_ARGS__) \
  UNSLOTH_WGMMA_TYPE(__half, "f16", __VA_ARGS__)

UNSLOTH_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
UNSLOTH_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
UNSLOTH_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
UNSLOTH_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
UNSLOTH_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
UNSLOTH_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
UNSLOTH_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
UNSLOTH_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
UNSLOTH_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
UNSLOTH_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
UNSLOTH_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
UNSLOTH_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
UNSLOTH_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
UNSLOTH_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
UNSLOTH_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef UNSLOTH_WGMMA
#undef UNSLOTH_WGMMA_TYPE

// Operand lists of integers, of which a product takes 32 of a row: as many bytes as of 16-bit
// numbers.
#define UNSLOTH_I8(i)                                                                         \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
#define UNSLOTH_I16 UNSLOTH_I8(0), UNSLOTH_I8(8)
#define UNSLOTH_I32 UNSLOTH_I16, UNSLOTH_I8(16), UNSLOTH_I8(24)
#define UNSLOTH_I64 UNSLOTH_I32, UNSLOTH_I8(32), UNSLOTH_I8(40), UNSLOTH_I8(48), UNSLOTH_I8(56)
#define UNSLOTH_I128                                                                           \
  UNSLOTH_I64, UNSLOTH_I8(64), UNSLOTH_I8(72), UNSLOTH_I8(80), UNSLOTH_I8(88), UNSLOTH_I8(96), \
      UNSLOTH_I8(104), UNSLOTH_I8(112), UNSLOTH_I8(120)

#define UNSLOTH_WGMMA(n, regs, x0, x1, x2, x3, x4, x5)                                           \
  template <>                                                                                    \
  struct Wgmma<int8_t, n> {                                                                      \
    /* Integers have no transposes. */                                                           \
    template <int kTransposeB>                                                                   \
    static __device__ __forceinline__ void rs(int32_t (&d)[regs], const uint32_t *a, uint64_t b, \
                                              int accumulate) {                                  \
      static_assert(kTransposeB == 0);                                                           \
      asm volatile(                                                                              \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n  \
          "k32.s32.s8.s8"                                                                        \
          " {" UNSLOTH_R##regs "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4 ", p;\n}"    \
          : UNSLOTH_I##regs                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                \
    }                                                                                            \
  };

UNSLOTH_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
UNSLOTH_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
UNSLOTH_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
UNSLOTH_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

#undef UNSLOTH_WGMMA

}  // namespace unsloth
