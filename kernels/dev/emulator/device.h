// The words of CUDA C++ that the kernels' text uses, on the host.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>

#include "machine.h"

#define __device__
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __forceinline__ inline
#define __noinline__

#define threadIdx (machine::block->self().index)
#define blockIdx (machine::block->index())
#define blockDim (machine::block->launch().block)
#define gridDim (machine::block->launch().grid)
constexpr unsigned warpSize = machine::kWarp;

// Numbers of 16 bits: computed with as f32, rounded to the nearest, ties to even.
struct __half {
  uint16_t bits;
  __half() = default;
  template <class T>
  explicit __half(T value) : bits(_cvtss_sh(static_cast<float>(value), 0)) {}
  operator float() const { return _cvtsh_ss(bits); }
};

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  template <class T>
  explicit __nv_bfloat16(T value) {
    const float number = static_cast<float>(value);
    uint32_t word;
    memcpy(&word, &number, 4);
    bits = number != number ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float number;
    memcpy(&number, &word, 4);
    return number;
  }
};

struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return fmin(T(a), T(b));
  return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return fmax(T(a), T(b));
  return T(a) > T(b) ? T(a) : T(b);
}

inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
// As CUDA says of it: nothing is left of a quotient by more than 2^126.
inline float __fdividef(float a, float b) {
  return fabsf(b) > 0x1p126f ? (isfinite(b) ? (isinf(a) ? NAN : 0.0f * a) : a / b) : a / b;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }

// Not part of a sum that follows.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
// The low word of two that are shifted to the right.
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return (uint64_t(high) << 32 | low) >> (by & 31);
}
// Four of the bytes of two words, which the digits of `which` name.
// The greater of each half.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}

inline uint32_t __byte_perm(uint32_t first, uint32_t second, uint32_t which) {
  const uint64_t both = uint64_t(second) << 32 | first;
  uint32_t bytes = 0;
  for (unsigned i = 0; i < 4; i++) bytes |= (both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return bytes;
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint32_t __float_as_uint(float x) {
  uint32_t word;
  memcpy(&word, &x, sizeof(word));
  return word;
}

inline float __uint_as_float(uint32_t word) {
  float x;
  memcpy(&x, &word, sizeof(x));
  return x;
}
inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  x.bits = bits;
  return x;
}
inline float __half2float(__half x) { return x; }
// Two codes of 8-bit floats, by the definition of e4m3, as two halves.
inline uint32_t __e4m3x2_to_f16x2(uint32_t codes) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; i++) {
    const uint32_t code = codes >> 8 * i & 0x7f, sign = codes >> 8 * i & 0x80;
    const float number = code == 0x7f ? NAN
                         : code < 8   ? ldexpf(code, -9)
                                      : ldexpf(8 + code % 8, static_cast<int>(code / 8) - 10);
    halves |= uint32_t(__half(sign != 0 ? -number : number).bits) << 16 * i;
  }
  return halves;
}
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
// Loads and stores that the cache is told of.
template <class T>
T __ldcs(const T *from) {
  if (uintptr_t(from) % sizeof(T) != 0) machine::block->fail("a misaligned load");
  return *from;
}
template <class T>
T __ldcg(const T *from) {
  return __ldcs(from);
}
template <class T>
void __stcs(T *to, const T &value) {
  if (uintptr_t(to) % sizeof(T) != 0) machine::block->fail("a misaligned store");
  *to = value;
}
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class T>
T atomicExch(T *to, T value) {
  return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicAdd(T *to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicCAS(T *to, T expected, T value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void __syncthreads() { machine::block->sync(); }

namespace machine {

// The bits of a number. Arithmetic of CUDA gives one NaN alone, that of the host keeps its
// operand's.
template <class Bits, class T>
Bits bits(const T &number) {
  static_assert(sizeof(Bits) == sizeof(T), "all of its bits");
  if constexpr (std::is_same_v<T, float>) {
    if (number != number) return 0x7fffffff;
  }
  Bits bits;
  memcpy(&bits, &number, sizeof(bits));
  return bits;
}

struct Nothing {};
inline void meet(const Nothing *, Nothing *) {}

template <class T>
struct Shuffled {
  T value;
  uint32_t lane;
};
template <class T>
void shuffle(const Shuffled<T> *given, T *taken) {
  for (unsigned i = 0; i < kWarp; i++) taken[i] = given[given[i].lane % kWarp].value;
}

inline void any(const int *given, int *taken) {
  std::fill(taken, taken + kWarp, std::any_of(given, given + kWarp, [](int is) { return is; }));
}

inline void ballot(const int *given, uint32_t *taken) {
  uint32_t votes = 0;
  for (unsigned i = 0; i < kWarp; i++) votes |= uint32_t(given[i] != 0) << i;
  std::fill(taken, taken + kWarp, votes);
}

inline void greatest(const int *given, int *taken) {
  std::fill(taken, taken + kWarp, *std::max_element(given, given + kWarp));
}
inline void least(const int *given, int *taken) {
  std::fill(taken, taken + kWarp, *std::min_element(given, given + kWarp));
}
inline void sum(const int *given, int *taken) {
  std::fill(taken, taken + kWarp, std::accumulate(given, given + kWarp, 0));
}

// PTX ISA, "Matrix load instruction: ldmatrix": eight threads give the rows of each of four
// matrices of 8 x 8 numbers of 16 bits. Thread i gets those at row i / 4, columns 2 (i % 4) and the
// next; or, if they are transposed, at these rows of column i / 4.
struct Four {
  uint32_t of[4];
};
template <bool transposed>
void load_matrices(const void *const *rows, Four *taken) {
  for (unsigned i = 0; i < kWarp; i++) {
    for (unsigned m = 0; m < 4; m++) {
      uint16_t pair[2];
      for (unsigned k = 0; k < 2; k++) {
        unsigned row = i / 4, column = 2 * (i % 4) + k;
        if (transposed) std::swap(row, column);
        memcpy(&pair[k], static_cast<const uint16_t *>(rows[8 * m + row]) + column, 2);
      }
      memcpy(&taken[i].of[m], pair, 4);
    }
  }
}

// PTX ISA, "Matrix fragments for mma.m16n8k16" (16 bits) and "for mma.m16n8k8" (tf32): with g = i /
// 4 and t = i % 4, thread i holds of A rows g and g + 8, of B column g, of C columns 2t and 2t + 1;
// of the inner dimension one word at t and one half of it on.
struct Fragments {
  uint32_t a[4], b[2];
  float c[4];
};
struct Sums {
  float of[4];
};
template <class T>
float number_at(uint32_t word, unsigned k) {
  if constexpr (std::is_same_v<T, float>) {
    word &= ~0x1fffu;  // what tf32 has not
    float number;
    memcpy(&number, &word, 4);
    return number;
  } else {
    T number;
    number.bits = word >> 16 * k;
    return number;
  }
}
template <class T>
void multiply(const Fragments *given, Sums *taken) {
  constexpr unsigned numbers = 4 / sizeof(T);
  float a[16][8 * numbers], b[8][8 * numbers];
  for (unsigned i = 0; i < kWarp; i++) {
    const unsigned g = i / 4, t = i % 4;
    for (unsigned word = 0; word < 4; word++) {
      for (unsigned k = 0; k < numbers; k++) {
        const unsigned inner = word / 2 * 4 * numbers + numbers * t + k;
        a[g + word % 2 * 8][inner] = number_at<T>(given[i].a[word], k);
        if (word % 2 == 0) b[g][inner] = number_at<T>(given[i].b[word / 2], k);
      }
    }
  }
  for (unsigned i = 0; i < kWarp; i++) {
    for (unsigned n = 0; n < 4; n++) {
      const unsigned row = i / 4 + n / 2 * 8, column = 2 * (i % 4) + n % 2;
      float sum = 0;
      for (unsigned k = 0; k < 8 * numbers; k++) sum += a[row][k] * b[column][k];
      taken[i].of[n] = given[i].c[n] + sum;
    }
  }
}

// PTX ISA, "Matrix fragments for mma.m16n8k32" of 8 bits: as above, a word being four numbers;
// those of the left-hand side may have no sign.
struct Bytes {
  uint32_t a[4], b[2];
};
struct Integers {
  int32_t of[4];
};
template <class Left>
void multiply_bytes(const Bytes *given, Integers *taken) {
  Left a[16][32];
  int8_t b[8][32];
  for (unsigned i = 0; i < kWarp; i++) {
    const unsigned g = i / 4, t = i % 4;
    for (unsigned word = 0; word < 4; word++) {
      const unsigned inner = word / 2 * 16 + 4 * t;
      memcpy(&a[g + word % 2 * 8][inner], &given[i].a[word], 4);
      if (word % 2 == 0) memcpy(&b[g][inner], &given[i].b[word / 2], 4);
    }
  }
  for (unsigned i = 0; i < kWarp; i++) {
    for (unsigned n = 0; n < 4; n++) {
      const unsigned row = i / 4 + n / 2 * 8, column = 2 * (i % 4) + n % 2;
      int32_t sum = 0;
      for (unsigned k = 0; k < 32; k++) sum += a[row][k] * b[column][k];
      taken[i].of[n] = sum;
    }
  }
}

template <bool transposed>
void ldmatrix(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, const void *row) {
  const Four four = together<const void *, Four, load_matrices<transposed>>(row);
  r0 = four.of[0], r1 = four.of[1], r2 = four.of[2], r3 = four.of[3];
}

template <class T>
void mma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0,
         float c1, float c2, float c3, float &d0, float &d1, float &d2, float &d3) {
  const Fragments given = {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
  const Sums sums = together<Fragments, Sums, multiply<T>>(given);
  d0 = sums.of[0], d1 = sums.of[1], d2 = sums.of[2], d3 = sums.of[3];
}

}  // namespace machine

// CubeCL's wrappers of PTX, in whose place these stand.
#define __ldmatrix_m8n8___half_4x machine::ldmatrix<false>
#define __ldmatrix_m8n8___half_4x_trans machine::ldmatrix<true>
#define __ldmatrix_m8n8___nv_bfloat16_4x machine::ldmatrix<false>
#define __ldmatrix_m8n8___nv_bfloat16_4x_trans machine::ldmatrix<true>
#define __mma_m16n8k16___half___half_float machine::mma<__half>
#define __mma_m16n8k16___nv_bfloat16___nv_bfloat16_float machine::mma<__nv_bfloat16>
#define __mma_m16n8k8_float_float_float machine::mma<float>

template <class T>
T __shfl_sync(uint32_t, T value, uint32_t lane) {
  return machine::together<machine::Shuffled<T>, T, machine::shuffle<T>>({value, lane});
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, uint32_t bits) {
  return __shfl_sync(mask, value, machine::block->self().rank % machine::kWarp ^ bits);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t by) {
  const uint32_t lane = machine::block->self().rank % machine::kWarp;
  return __shfl_sync(mask, value, lane < by ? lane : lane - by);
}
inline uint32_t __ballot_sync(uint32_t, int is) {
  return machine::together<int, uint32_t, machine::ballot>(is);
}
inline int __reduce_max_sync(uint32_t, int x) {
  return machine::together<int, int, machine::greatest>(x);
}
inline int __reduce_min_sync(uint32_t, int x) {
  return machine::together<int, int, machine::least>(x);
}
inline int __reduce_add_sync(uint32_t, int x) {
  return machine::together<int, int, machine::sum>(x);
}
inline int __any_sync(uint32_t, int is) { return machine::together<int, int, machine::any>(is); }
inline void __syncwarp(uint32_t = ~0u) {
  machine::together<machine::Nothing, machine::Nothing, machine::meet>({});
}

template <size_t bytes>
void __cp_async_shared_global(const void *from, void *to, int32_t filled = bytes) {
  if (uintptr_t(from) % bytes != 0 || uintptr_t(to) % bytes != 0) {
    machine::block->fail("a misaligned copy into shared memory");
  }
  machine::block->copy({to, from, bytes, unsigned(filled)});
}

namespace cuda {
enum thread_scope { thread_scope_block };
template <thread_scope>
class barrier {
 public:
  struct arrival_token {};
  arrival_token arrive() {
    machine::block->arrive(state);
    return {};
  }
  void wait_parity(uint32_t parity) { machine::block->wait(state, parity); }
  machine::Barrier state;
};
template <thread_scope scope>
void init(barrier<scope> *barrier, uint32_t expected) {
  barrier->state = {0, expected, expected, 0};
}
}  // namespace cuda

inline void __cp_async_arrive(cuda::barrier<cuda::thread_scope_block> &barrier) {
  machine::block->copies_arrive(barrier.state);
}

namespace cooperative_groups {
struct thread_block {};
inline thread_block this_thread_block() { return {}; }
}  // namespace cooperative_groups
