// Tensor cores of every architecture since sm_80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace unsloth {

// D = A B + D, of 16x16 by 16x8 numbers of 16 bits. Lane 4 g + t has of A rows g (a[0], a[2]) and g
// + 8 (a[1], a[3]), of B column g, of D rows g and g + 8 and columns 2 t and 2 t + 1.
template <class T>
__device__ __forceinline__ void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&d)[4]);

template <>
__device__ __forceinline__ void mma<__half>(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                            float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                   float (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of 16x32 by 32x8 numbers of 8 bits with a sign, summed as integers. Lane 4 g + t has of
// A rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 4 t to 4 t + 3 and, of a[2] and a[3], 16
// more; of B such rows of column g; of D as above.
__device__ __forceinline__ void mma(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    int32_t (&d)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same, D = A B + D, where those of A have no sign.
__device__ __forceinline__ void mma_unsigned(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             int32_t (&d)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// And of 16x16 by 16x8: of A rows g and g + 8, of B column g, from each four numbers from 4 t on.
__device__ __forceinline__ void mma_unsigned(const uint32_t (&a)[2], uint32_t b, int32_t (&d)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace unsloth
