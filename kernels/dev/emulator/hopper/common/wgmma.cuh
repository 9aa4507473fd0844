// wgmma, on the host. A warp of the four computes its 16 rows, from shared memory and registers as
// they are when it waits for the group (or, with early copies, when it closes it).
#pragma once

#include "memory.cuh"

namespace unsloth {

inline void wgmma_fence() {}

template <int N>
void hold(float (&)[N]) {
  asm volatile("" ::: "memory");
}

template <int N>
void hold(uint32_t (&)[N]) {
  asm volatile("" ::: "memory");
}

constexpr uint64_t kDescriptorSwizzle128 = uint64_t{1} << 62;

inline uint64_t descriptor_k_major(uint32_t address) {
  return kDescriptorSwizzle128 | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3FFFF) >> 4);
}

inline uint64_t descriptor_mn_major(uint32_t address, int rows) {
  return kDescriptorSwizzle128 | (uint64_t{1024 >> 4} << 32) |
         (static_cast<uint64_t>(rows * 128 >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

inline uint64_t descriptor_of_eights(uint32_t address) {
  return (uint64_t{128 >> 4} << 32) | ((address & 0x3FFFF) >> 4);
}

// An operand in shared memory: element (k, i) of the reduced dimension and of the other.
template <class T>
struct Operand {
  uint32_t start, leading, stride;
  bool swizzled, transposed;

  Operand(uint64_t descriptor, bool transpose)
      : start((descriptor & 0x3FFF) << 4),
        leading((descriptor >> 16 & 0x3FFF) << 4),
        stride((descriptor >> 32 & 0x3FFF) << 4),
        swizzled(descriptor >> 62 == 1),
        transposed(transpose) {}

  float at(int k, int i) const {
    const uint32_t offset = transposed
                                ? i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                : i / 8 * stride + i % 8 * 128 + k * 2;
    const uint32_t address =
        swizzled ? swizzle_128b(start + offset)
                 : start + k / 8 * leading + i / 8 * stride + i % 8 * 16 + k % 8 * 2;
    T element;
    memcpy(&element, machine::block->shared_pointer(address), sizeof(T));
    return element;
  }
};

// D[16 x N] of one warp += A[16 x 16] B[16 x N].
template <class T, int N, bool kRegistersA, int kTransposeA, int kTransposeB>
__attribute__((optimize("O3"))) void warp_product(machine::Thread *const *lanes, size_t index) {
  float a[16][16], b[16][N], d[16][N];
  const machine::Product &first = lanes[0]->products[index];
  const int row = lanes[0]->rank / machine::kWarp % 4 * 16;
  const Operand<T> of_b(first.b_tile, kTransposeB);
  for (int k = 0; k < 16; k++) {
    for (int i = 0; i < N; i++) b[k][i] = of_b.at(k, i);
    if (kRegistersA) continue;
    const Operand<T> of_a(first.a_tile, kTransposeA);
    for (int i = 0; i < 16; i++) a[i][k] = of_a.at(k, row + i);
  }
  for (unsigned lane = 0; lane < machine::kWarp; lane++) {
    const machine::Product &product = lanes[lane]->products[index];
    const int g = lane / 4, t = lane % 4;
    if (product.run != first.run) machine::block->fail("threads of a warp that multiply apart");
    for (int word = 0; kRegistersA && word < 4; word++) {
      for (int k = 0; k < 2; k++) {
        a[g + word % 2 * 8][word / 2 * 8 + 2 * t + k] = machine::number_at<T>(product.a[word], k);
      }
    }
    for (int j = 0; j < N / 2; j++) {
      d[g + j / 2 % 2 * 8][j / 4 * 8 + 2 * t + j % 2] = product.accumulate ? product.d[j] : 0;
    }
  }
  for (int i = 0; i < 16; i++) {
    float sum[N] = {};
    for (int k = 0; k < 16; k++) {
      for (int j = 0; j < N; j++) sum[j] += a[i][k] * b[k][j];
    }
    for (int j = 0; j < N; j++) d[i][j] += sum[j];
  }
  for (unsigned lane = 0; lane < machine::kWarp; lane++) {
    float *to = lanes[lane]->products[index].d;
    for (int j = 0; j < N / 2; j++) {
      to[j] = d[lane / 4 + j / 2 % 2 * 8][j / 4 * 8 + 2 * (lane % 4) + j % 2];
    }
  }
}

struct Waiting {
  machine::Thread *thread;
  uint32_t groups;
};

inline void run_products(const Waiting *given, machine::Nothing *) {
  machine::Thread *lanes[machine::kWarp];
  for (unsigned i = 0; i < machine::kWarp; i++) {
    lanes[i] = given[i].thread;
    if (lanes[i]->products.size() != lanes[0]->products.size()) {
      machine::block->fail("threads of a warp that multiply apart");
    }
  }
  const std::vector<machine::Product> &products = lanes[0]->products;
  size_t done = 0;
  while (done < products.size() && products[done].group < given[0].groups) {
    products[done].run(lanes, done);
    done++;
  }
  for (machine::Thread *lane : lanes) {
    lane->products.erase(lane->products.begin(), lane->products.begin() + done);
  }
}

// Waits until the first `groups` groups of the thread are done.
inline void wait_groups(uint32_t groups) {
  machine::Thread &self = machine::block->self();
  machine::together<Waiting, machine::Nothing, run_products>({&self, groups});
}

inline void wgmma_commit() {
  machine::Thread &self = machine::block->self();
  self.groups++;
  if (machine::block->launch().early_copies) wait_groups(self.groups);
}

template <int kPending>
void wgmma_wait() {
  const uint32_t groups = machine::block->self().groups;
  wait_groups(groups > kPending ? groups - kPending : 0);
}

template <class T, int N>
struct Wgmma {
  template <int kTransposeB, int kTransposeA = 0>
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    machine::Thread &self = machine::block->self();
    self.products.push_back({warp_product<T, N, false, kTransposeA, kTransposeB>, d, nullptr, a, b,
                             accumulate, self.groups});
  }
  template <int kTransposeB>
  static void rs(float (&d)[N / 2], const uint32_t *a, uint64_t b, int accumulate) {
    machine::Thread &self = machine::block->self();
    self.products.push_back(
        {warp_product<T, N, true, 0, kTransposeB>, d, a, 0, b, accumulate, self.groups});
  }
};

}  // namespace unsloth
