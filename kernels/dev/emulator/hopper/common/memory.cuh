// Shared memory, on the host.
#pragma once

#include "device.h"

namespace unsloth {

inline uint32_t shared_address(const void *pointer) {
  return machine::block->shared_address(pointer);
}

inline void load_matrix_x4(uint32_t address, uint32_t *registers) {
  machine::ldmatrix<false>(registers[0], registers[1], registers[2], registers[3],
                           machine::block->shared_pointer(address));
}

inline void load_matrix_x4_transposed(uint32_t address, uint32_t *registers) {
  machine::ldmatrix<true>(registers[0], registers[1], registers[2], registers[3],
                          machine::block->shared_pointer(address));
}

struct Stored {
  char *row;
  uint32_t of[4];
};

// As ldmatrix, the other way.
inline void store_matrices(const Stored *given, machine::Nothing *) {
  for (unsigned i = 0; i < machine::kWarp; i++) {
    for (unsigned m = 0; m < 4; m++) {
      memcpy(given[8 * m + i / 4].row + 4 * (i % 4), &given[i].of[m], 4);
    }
  }
}

inline void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const Stored given = {machine::block->shared_pointer(address), {r0, r1, r2, r3}};
  machine::together<Stored, machine::Nothing, store_matrices>(given);
}

inline void store_matrices_transposed(const Stored *given, machine::Nothing *) {
  for (unsigned i = 0; i < machine::kWarp; i++) {
    for (unsigned m = 0; m < 4; m++) {
      for (unsigned k = 0; k < 2; k++) {
        const uint16_t element = given[i].of[m] >> 16 * k;
        memcpy(given[8 * m + 2 * (i % 4) + k].row + 2 * (i / 4), &element, 2);
      }
    }
  }
}

inline void store_matrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                       uint32_t r3) {
  const Stored given = {machine::block->shared_pointer(address), {r0, r1, r2, r3}};
  machine::together<Stored, machine::Nothing, store_matrices_transposed>(given);
}

inline void add_four(float *to, float a, float b, float c, float d) {
  if (uintptr_t(to) % 16 != 0) machine::block->fail("a misaligned addition");
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}

inline void fence_async_proxy() {}

inline uint32_t swizzle_128b(uint32_t offset) { return offset ^ ((offset >> 3) & 0x70); }

inline void atomic_cas_128(void *address, const uint64_t (&compare)[2], uint64_t low, uint64_t high,
                           uint64_t (&old)[2]) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t wanted[2] = {low, high};
  memcpy(old, address, 16);
  if (old[0] == compare[0] && old[1] == compare[1]) memcpy(address, wanted, 16);
}

}  // namespace unsloth
