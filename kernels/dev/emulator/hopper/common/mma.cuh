// Tensor cores of every architecture, on the host.
#pragma once

#include "device.h"

namespace unsloth {

template <class T>
void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&d)[4]) {
  machine::mma<T>(a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3], d[0], d[1], d[2],
                  d[3]);
}

template <class Left>
void add_bytes(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&d)[4]) {
  const machine::Bytes given = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const auto sums =
      machine::together<machine::Bytes, machine::Integers, machine::multiply_bytes<Left>>(given);
  for (int i = 0; i < 4; i++) d[i] += sums.of[i];
}

inline void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&d)[4]) {
  add_bytes<int8_t>(a, b, d);
}

inline void mma_unsigned(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&d)[4]) {
  add_bytes<uint8_t>(a, b, d);
}

// As the first half of those.
inline void mma_unsigned(const uint32_t (&a)[2], uint32_t b, int32_t (&d)[4]) {
  add_bytes<uint8_t>({a[0], a[1], 0, 0}, {b, 0}, d);
}

}  // namespace unsloth
