// Rounding of groups whose threads hold them, to codes of 8 bits by the greatest magnitude: each is
// read once.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/nearest_code.cuh"
#include "common/vector.cuh"
#include "quantize/common.cuh"

namespace unsloth {

// In shared memory, of each warp.
struct OfWarps {
  uint32_t greatest[kWarps];
  int32_t sums[kWarps];
};

// The threads that share a group.
template <class T>
class Holders {
 public:
  static constexpr uint32_t kWidth = Vector<T>::kWidth;

  __device__ __forceinline__ Holders(const Arguments &p, OfWarps &shared)
      : p_(p), shared_(shared) {}

  // The vector of the group that is this thread's `j`th, and whether there is one.
  __device__ __forceinline__ uint32_t index(uint32_t j) const { return thread() + j * threads(); }
  __device__ __forceinline__ bool is_there(uint32_t j) const {
    return index(j) < p_.length / kWidth;
  }

  // Rounds a group, of which this thread has up to `kCount` vectors: `held(j)`, zeros where there
  // are none. Codes go to `out`.
  template <uint32_t kCount, class Vectors>
  __device__ __forceinline__ void round(uint32_t group, uint8_t *out, const Vectors &held) const {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t j = 0; j < kCount; j++) most = Vector<T>::max_magnitudes(held(j), most);
    const ScaleOfCodes by(greatest_of_all(Vector<T>::as_f32(most)));
    int32_t sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < kCount; j++) {
      if (!is_there(j)) break;
      float numbers[kWidth];
      Vector<T>::unpack(held(j), numbers);
      const uint2 words = nearest_codes(by, numbers);
      sum = sum_of_codes(words.x, sum);
      if constexpr (kWidth == 8) {
        sum = sum_of_codes(words.y, sum);
        reinterpret_cast<uint2 *>(out)[index(j)] = words;
      } else {
        reinterpret_cast<uint32_t *>(out)[index(j)] = words.x;
      }
    }
    for (uint32_t i = p_.length + thread(); i < p_.padded; i += threads()) out[i] = 0;
    sum = sum_of_all(sum);
    if (thread() != 0) return;
    const uint64_t at = static_cast<uint64_t>(p_.first_row) * p_.groups + group;
    p_.scale[at] = by.scale;
    if (p_.sum != nullptr) p_.sum[at] = sum;
  }

 private:
  // Of the group; powers of two.
  __device__ __forceinline__ uint32_t warps() const { return p_.warps; }
  __device__ __forceinline__ uint32_t threads() const { return p_.warps * 32; }
  __device__ __forceinline__ uint32_t thread() const { return threadIdx.x & (threads() - 1); }
  __device__ __forceinline__ uint32_t first_warp() const {
    return threadIdx.x / 32 & ~(warps() - 1);
  }

  // The greatest that they have.
  __device__ __forceinline__ uint32_t greatest_of_all(uint32_t most) const {
    most = __reduce_max_sync(kAll, most);
    if (warps() == 1) return most;
    // All have read those of the group before, or they would not have met for its sums.
    meet(shared_.greatest, most);
    return __reduce_max_sync(kAll, shared_.greatest[first_warp() + (threadIdx.x & (warps() - 1))]);
  }

  // What they have all together, in the group's first warp.
  __device__ __forceinline__ int32_t sum_of_all(int32_t sum) const {
    sum = __reduce_add_sync(kAll, sum);
    if (warps() == 1) return sum;
    // The first warp has read those of the group before, or it would not have met for the greatest.
    meet(shared_.sums, sum);
    if (thread() >= 32) return 0;
    return __reduce_add_sync(kAll, thread() < warps() ? shared_.sums[first_warp() + thread()] : 0);
  }

  // Each warp leaves what it has; then the warps of the group wait for each other.
  template <class N>
  __device__ __forceinline__ void meet(N (&of_warps)[kWarps], N own) const {
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    // Barriers by constant names: a name in a register takes all that there are.
    if (first_warp() < 4) {
      first_warp() == 0 ? meet<0>() : meet<1>();
    } else {
      first_warp() == 4 ? meet<2>() : meet<3>();
    }
  }
  template <int kBarrier>
  __device__ __forceinline__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads()) : "memory");
  }

  const Arguments &p_;
  OfWarps &shared_;
};

// A group whose threads have up to `kCount` vectors each, in registers.
template <class T, uint32_t kCount>
__device__ __forceinline__ void round_held(const Holders<T> &holders, uint32_t group,
                                           const Place<T> &place) {
  const uint4 *vectors = reinterpret_cast<const uint4 *>(place.x);
  // Few rows are bound by what comes behind the wait. All that is known before is, and what follows
  // is fetched meanwhile, one instruction behind the other.
  await_previous_kernel();
  uint4 held[kCount];
#pragma unroll
  for (uint32_t j = 0; j < kCount; j++) {
    held[j] = holders.is_there(j) ? vectors[holders.index(j)] : uint4{0, 0, 0, 0};
  }
  holders.template round<kCount>(group, place.out, [&](uint32_t j) { return held[j]; });
}

// Each thread's only group. Of short ones threads go without the steps for vectors that are not
// there.
template <class T>
__device__ __forceinline__ void round_held(const Arguments &p, uint4 *dynamic) {
  uint32_t group = group_of(p);
  if (group >= p.num_rows * p.groups) return;
  const Holders<T> holders(p, *reinterpret_cast<OfWarps *>(dynamic));
  Place<T> place(p, group);
  // The compiler would move what these are made of behind the wait.
  asm volatile("" : "+l"(place.x), "+l"(place.out), "+r"(group));
  const uint32_t vectors = p.length / Vector<T>::kWidth, threads = p.warps * 32;
  if (vectors <= threads) {
    round_held<T, 1>(holders, group, place);
  } else if (vectors <= 2 * threads) {
    round_held<T, 2>(holders, group, place);
  } else if (vectors <= 4 * threads) {
    round_held<T, 4>(holders, group, place);
  } else {
    round_held<T, kQuantizeHeld>(holders, group, place);
  }
}

}  // namespace unsloth
