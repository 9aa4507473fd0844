// Shared memory: addresses, matrix loads and stores, and the fence between ordinary and
// asynchronous accesses.
#pragma once

#include <cstdint>

namespace unsloth {

// PTX names shared memory by 32-bit window addresses, C++ by generic pointers.
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l%8 of matrix l/8;
// register i holds matrix i, distributed as wgmma operands are (row lane/4, columns 2*(lane%4) and
// the next).
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t *registers) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed: rows 2*(lane%4) and the next of column lane/4.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t address, uint32_t *registers) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// Stores four such matrices: an accumulator can be written out without any shuffle.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1,
                                                uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same, each matrix transposed: the address is that of a column's numbers.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t r0,
                                                           uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// Adds four numbers, 16 bytes aligned, to global memory, in no order that can be told.
__device__ __forceinline__ void add_four(float *to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// TMA and wgmma reach shared memory through the asynchronous proxy, which does not see ordinary
// writes until the writing thread has executed this fence (and a barrier has followed).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The 128-byte swizzle of TMA and wgmma: within each 1024-byte block of eight 128-byte rows, the
// 16-byte unit u of row r lies at unit u ^ (r % 8). Offsets are from a 1024-byte aligned base.
__device__ __forceinline__ uint32_t swizzle_128b(uint32_t offset) {
  return offset ^ ((offset >> 3) & 0x70);
}

// Compares and swaps 16 bytes of global memory, aligned to as many; `old` receives what was there.
__device__ __forceinline__ void atomic_cas_128(void *address, const uint64_t (&compare)[2],
                                               uint64_t low, uint64_t high, uint64_t (&old)[2]) {
  asm volatile(
      "{\n"
      ".reg .b128 c, n, o;\n"
      "mov.b128 c, {%2, %3};\n"
      "mov.b128 n, {%4, %5};\n"
      "atom.relaxed.gpu.global.cas.b128 o, [%6], c, n;\n"
      "mov.b128 {%0, %1}, o;\n"
      "}"
      : "=l"(old[0]), "=l"(old[1])
      : "l"(compare[0]), "l"(compare[1]), "l"(low), "l"(high), "l"(address)
      : "memory");
}

}  // namespace unsloth
