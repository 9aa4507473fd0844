// Tensor cores of every architecture, on the host.
#pragma once

#include "device.h"

namespace unsloth {

template <class T>
void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&d)[4]) {
  machine::mma<T>(a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3], d[0], d[1], d[2],
                  d[3]);
}

inline void mma(const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t (&d)[4]) {
  const machine::Bytes given = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const auto sums =
      machine::together<machine::Bytes, machine::Integers, machine::multiply_bytes>(given);
  for (int i = 0; i < 4; i++) d[i] += sums.of[i];
}

}  // namespace unsloth
