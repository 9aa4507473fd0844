// A few rows of x of 16 bits by weights like them on Hopper, bound by reading these.
//
// One block for each multiprocessor, which takes all of its shared memory: so a block that is
// started early (programmatic dependent launch) comes to a multiprocessor of its own, and fills its
// ring with a constant weight while the kernels before still run. Blocks have by turns tiles of 16
// rows of the weight, or of fewer where blocks would be idle else. Two warps copy these, by turns a
// chunk of a tile to a slot of the ring: 512 neighbours of each row. They never wait for x, but
// once the ring has been full they let little be on its way at a time. Every other chunk is for
// half of the warps that multiply, of which each has 64 neighbours. One warp more adds what they
// have of a tile, and stores it, while they go on.
//
// Of a gated product eight rows of a tile are the gate's and eight are of what it gates. x may pass
// RMSNorm on its way: every block normalises all of it.
//
// It is CUDA C++ for the copies to shared memory, of which CubeCL has none.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/named_barrier.cuh"
#include "common/tma.cuh"
#include "linear/few/arguments.h"
#include "linear/gated.cuh"
#include "linear/norm.cuh"

namespace unsloth {

// Warps that multiply, and those of them that have a chunk: a team, for which one more copies.
// Another one adds.
constexpr uint32_t kWarps = 16, kSteps = 8, kTeams = kWarps / kSteps;
// Threads that multiply, and all.
constexpr uint32_t kMultipliers = 32 * kWarps, kThreads = kMultipliers + 32 * (kTeams + 1);
constexpr uint32_t kSharedBytes = 227 * 1024;
constexpr uint32_t kMostRows = 8;
// Rows of the weight of a tile, at most, and lines of 16 bytes of them that a warp multiplies at a
// time.
constexpr uint32_t kTile = 16, kLines = 8;
// What warps have of a tile, for each row of x: twice, so that those of the next tile have room.
constexpr uint32_t kShares = 2, kShareBytes = kWarps * kTile * sizeof(float);

template <class T>
class Few {
 public:
  __device__ __forceinline__ Few(const LinearFewArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(kAllLanes, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        chunks_((p.steps + p.steps_of_chunk - 1) / p.steps_of_chunk),
        chunk_bytes_(p.steps_of_chunk * kLines * 16),
        tiles_(p.tiles + (blockIdx.x < p.one_more)),
        ring_(shared) {
    uint8_t *rest = shared + p.slots * kTile * p.pitch;
    x_ = reinterpret_cast<uint4 *>(rest);
    rest += p.rows * p.steps * kLines * 16;
    shares_ = reinterpret_cast<float *>(rest);
    rest += kShares * p.rows * kShareBytes;
    full_ = reinterpret_cast<Mbarrier *>(rest);
    empty_ = full_ + p.slots;
    left_ = empty_ + p.slots;
    added_ = left_ + kShares;
  }

  __device__ __forceinline__ void run() {
    if (warp_ < kWarps) {
      multiply_tiles();
    } else if (warp_ < kWarps + kTeams) {
      ask();
    } else {
      add_shares();
    }
  }

 private:
  // Barriers: of those that multiply, and of all. Behind them one for each place of shares: of
  // those that multiply and the one that adds.
  static constexpr int kAmongMultipliers = 1, kReady = 2, kLeft = 3;
  static constexpr int kLeaversAndAdder = kMultipliers + 32;

  // A slot of the ring, and the parity of what is waited for there.
  struct Turn {
    uint32_t slot, parity;

    __device__ __forceinline__ void advance(uint32_t slots) {
      slot += kTeams;
      if (slot >= slots) slot -= slots, parity ^= 1;
    }
  };

  // Where line `line` of a row of x lies in shared memory: the same lines of neighbouring rows in
  // other banks.
  static __device__ __forceinline__ uint32_t line_of(uint32_t row, uint32_t line) {
    return line ^ (row & 1) << 2;
  }

  // Of a tile of the block, among all: those that blocks have at a time are neighbours.
  __device__ __forceinline__ uint32_t index_of(uint32_t tile) const {
    return tile * gridDim.x + blockIdx.x;
  }

  // The output's first column of a tile of the block.
  __device__ __forceinline__ uint32_t column_of(uint32_t tile) const {
    return index_of(tile) * p_.columns_of_tile;
  }

  __device__ __forceinline__ uint32_t columns_of(uint32_t tile) const {
    return min(p_.columns_of_tile, p_.out_features - column_of(tile));
  }

  // The chunk that a tile begins with. If neighbours all began with the first, what is read at a
  // time would be as far apart as rows are, and some channels of memory would have more of it.
  __device__ __forceinline__ uint32_t begin_of(uint32_t tile) const {
    return index_of(tile) % chunks_;
  }

  // What the warps do that copy: each has the chunks and the slots of its team.
  __device__ __forceinline__ void ask() const {
    const uint32_t team = warp_ - kWarps, slot = team + kTeams * lane_;
    if (slot < p_.slots) {
      full_[slot].init(1);
      empty_[slot].init(kSteps);
    }
    fence_mbarrier_init();
    __syncwarp();
    named_barrier_arrive(kReady, kThreads);
    // The first wait for a slot passes at once.
    Turn turn = {team, 1}, landed = {team, 0};
    uint32_t chunk = team, asked = 0;
    for (uint32_t tile = 0; tile < tiles_; tile++) {
      const uint32_t begin = begin_of(tile);
      for (; chunk < chunks_; chunk += kTeams) {
        empty_[turn.slot].wait(turn.parity);
        if (asked >= p_.in_flight) {
          // The ring is filled before x is there. Behind that less is on its way at a time:
          // memory gives more of what it is asked for in order.
          if (asked >= p_.slots / kTeams) full_[landed.slot].wait(landed.parity);
          landed.advance(p_.slots);
        }
        asked++;
        if (lane_ == 0) copy_chunk(turn.slot, tile, place_of(begin, chunk) * chunk_bytes_);
        __syncwarp();
        turn.advance(p_.slots);
      }
      chunk -= chunks_;
    }
  }

  // Where a tile's chunk lies among its neighbours.
  __device__ __forceinline__ uint32_t place_of(uint32_t begin, uint32_t chunk) const {
    const uint32_t place = begin + chunk;
    return place < chunks_ ? place : place - chunks_;
  }

  // Has a tile's rows copied from byte `at` on.
  __device__ __forceinline__ void copy_chunk(uint32_t slot, uint32_t tile, uint32_t at) const {
    const uint32_t bytes = min(chunk_bytes_, p_.lines * 16 - at), columns = columns_of(tile);
    // Of gated products the second half of the rows is another matrix.
    const uint32_t low = min(columns, kTile / 2), high = p_.gated != 0 ? columns : columns - low;
    const uint8_t *from = p_.weight + column_of(tile) * p_.weight_stride + at;
    const uint8_t *other = from + (p_.gated != 0 ? p_.up_offset : kTile / 2 * p_.weight_stride);
    Mbarrier *full = &full_[slot];
    full->arrive_expect((low + high) * bytes);
    uint32_t to = shared_address(ring_ + slot * kTile * p_.pitch);
#pragma unroll
    for (uint32_t row = 0; row < kTile / 2; row++) {
      if (row < low) bulk_load_by_thread(to, from, bytes, full);
      if (row < high) bulk_load_by_thread(to + kTile / 2 * p_.pitch, other, bytes, full);
      to += p_.pitch, from += p_.weight_stride, other += p_.weight_stride;
    }
  }

  __device__ __forceinline__ void multiply_tiles() {
    if (p_.norm_dtype != 0) fetch_gains(p_, p_.lines * 8);
    await_previous_kernel();
    float gains[8];
    if (p_.norm_dtype != 0 && threadIdx.x < p_.lines) load_gains(threadIdx.x, gains);
    load_x();
    if (p_.norm_dtype != 0) normalise(gains);
    // x is there, and so are all barriers.
    named_barrier_sync(kReady, kThreads);
    // The slots of the ring are an even number: each is always for the same warps.
    const uint32_t team = warp_ / kSteps, of_chunk = warp_ % kSteps;
    Turn turn = {team, 0};
    uint32_t chunk = team;
    for (uint32_t tile = 0; tile < tiles_; tile++) {
      const uint32_t begin = begin_of(tile);
      for (; chunk < chunks_; chunk += kTeams) {
        full_[turn.slot].wait(turn.parity);
        const uint32_t step = place_of(begin, chunk) * p_.steps_of_chunk + of_chunk;
        if (of_chunk < p_.steps_of_chunk && step < p_.steps) {
          multiply(ring_ + turn.slot * kTile * p_.pitch + of_chunk * kLines * 16, step);
        }
        __syncwarp();
        if (lane_ == 0) empty_[turn.slot].arrive();
        turn.advance(p_.slots);
      }
      chunk -= chunks_;
      leave(tile);
    }
  }

  // x to shared memory, zeros behind it, and the parts of its sums of squares to where shares will
  // be.
  __device__ __forceinline__ void load_x() const {
    constexpr uint32_t kAtOnce = 4;
    const uint32_t padded = p_.steps * kLines, parts = (p_.lines + 31) / 32;
    for (uint32_t first = 0; first < p_.rows; first += kAtOnce) {
      // All lanes of a warp take part in sums.
      for (uint32_t base = warp_ * 32; base < padded; base += kMultipliers) {
        const uint32_t line = base + lane_;
        uint4 of[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          of[i] = {0, 0, 0, 0};
          if (line < p_.lines && first + i < p_.rows) {
            const uint8_t *x = static_cast<const uint8_t *>(p_.x) + (first + i) * p_.x_stride;
            of[i] = reinterpret_cast<const uint4 *>(x)[line];
          }
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          const uint32_t row = first + i;
          if (row >= p_.rows) break;
          if (line < padded) x_[row * padded + line_of(row, line)] = of[i];
          if (p_.norm_dtype != 0) {
            const float sum = squares_of_part<T>(of[i]);
            if (lane_ == 0 && base < p_.lines) shares_[row * parts + base / 32] = sum;
          }
        }
      }
    }
  }

  // Normalises x in place: a thread the lines that it has stored.
  // `gains` are those of the first.
  __device__ __forceinline__ void normalise(float (&gains)[8]) const {
    const uint32_t padded = p_.steps * kLines, parts = (p_.lines + 31) / 32;
    named_barrier_sync(kAmongMultipliers, kMultipliers);
    for (uint32_t row = 0; row < p_.rows; row++) {
      const float scale = scale_of_row(p_, shares_ + row * parts, parts);
      for (uint32_t line = threadIdx.x; line < p_.lines; line += kMultipliers) {
        if (line != threadIdx.x) load_gains(line, gains);
        uint4 &words = x_[row * padded + line_of(row, line)];
        float of[8];
        Vector<T>::unpack(words, of);
#pragma unroll
        for (int i = 0; i < 8; i++) of[i] = normalised(p_, of[i], gains[i], scale);
        words = Vector<T>::packed(of);
      }
      // Another row's gains are those of the first line again.
      if (p_.lines > kMultipliers && threadIdx.x < p_.lines) load_gains(threadIdx.x, gains);
    }
  }

  __device__ __forceinline__ void load_gains(uint32_t line, float (&gains)[8]) const {
    if (p_.norm_dtype == static_cast<uint32_t>(Float::kF32)) {
      const float4 *from = static_cast<const float4 *>(p_.norm) + 2 * line;
      const float4 low = from[0], high = from[1];
      gains[0] = low.x, gains[1] = low.y, gains[2] = low.z, gains[3] = low.w;
      gains[4] = high.x, gains[5] = high.y, gains[6] = high.z, gains[7] = high.w;
    } else {
      Vector<T>::unpack(static_cast<const uint4 *>(p_.norm)[line], gains);
    }
  }

  // Elements of x and of the weight are multiplied in an order that both have in common: lane t of
  // four has whole lines.
  __device__ __forceinline__ void multiply(const uint8_t *rows, uint32_t step) {
    if (p_.lines - step * kLines >= kLines) {
      multiply<true>(rows, step);
    } else {
      multiply<false>(rows, step);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void multiply(const uint8_t *rows, uint32_t step) {
    const uint32_t g = lane_ / 4, t = lane_ % 4;
    // Columns without a row repeat the last one's.
    const uint32_t row = min(g, p_.rows - 1);
    const uint4 *of_low = reinterpret_cast<const uint4 *>(rows + g * p_.pitch);
    const uint4 *of_high = reinterpret_cast<const uint4 *>(rows + (g + 8) * p_.pitch);
    const uint4 *of_x = x_ + (row * p_.steps + step) * kLines;
#pragma unroll
    for (uint32_t i = 0; i < kLines / 4; i++) {
      const uint32_t line = 4 * i + t;
      uint4 low = of_low[line], high = of_high[line];
      if (!kWhole && step * kLines + line >= p_.lines) low = high = {0, 0, 0, 0};
      const uint4 x = of_x[line_of(row, line)];
      mma<T>({low.x, high.x, low.y, high.y}, {x.x, x.y}, acc_);
      mma<T>({low.z, high.z, low.w, high.w}, {x.z, x.w}, acc_);
    }
  }

  // Puts what a warp has of a tile where it is added to others.
  __device__ __forceinline__ void leave(uint32_t tile) {
    const uint32_t g = lane_ / 4, t = lane_ % 4, place = tile % kShares;
    added_[place].wait(~(tile / kShares) & 1);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = 2 * t + i;
      if (row < p_.rows) {
        float *to = share_of(place, row, warp_) + g;
        to[0] = acc_[i], to[8] = acc_[2 + i];
      }
      acc_[i] = acc_[2 + i] = 0;
    }
    if (2 * t < p_.rows) left_[place].arrive();
  }

  // [place][row of x][warp][column of the tile]
  __device__ __forceinline__ float *share_of(uint32_t place, uint32_t row, uint32_t warp) const {
    return shares_ + ((place * p_.rows + row) * kWarps + warp) * kTile;
  }

  // What the last warp does: adds what others have of a tile, in their order, and stores it. Half
  // of its lanes have every other row of x.
  __device__ __forceinline__ void add_shares() const {
    if (lane_ < kShares) {
      // Every lane that writes or reads shares arrives by itself.
      left_[lane_].init(kWarps * 8 * ((p_.rows + 1) / 2));
      added_[lane_].init(32);
    }
    fence_mbarrier_init();
    __syncwarp();
    named_barrier_arrive(kReady, kThreads);
    // Residuals are what the kernel before has written.
    await_previous_kernel();
    const uint32_t column = lane_ % kTile, half = lane_ / kTile;
    for (uint32_t tile = 0; tile < tiles_; tile++) {
      const uint32_t place = tile % kShares, of_output = column_of(tile) + column;
      const bool stores = column < columns_of(tile);
      OfColumn of_column = {};
      uint32_t others[kMostRows / 2] = {};
      if (stores) load_biases(p_, of_output, of_column);
#pragma unroll
      for (uint32_t i = 0; i < kMostRows / 2; i++) {
        const uint32_t row = 2 * i + half;
        if (stores && row < p_.rows) others[i] = other_of(p_, residual_of(row), of_output);
      }
      left_[place].wait(tile / kShares & 1);
#pragma unroll
      for (uint32_t i = 0; i < kMostRows / 2; i++) {
        if (2 * i >= p_.rows) break;
        const uint32_t row = 2 * i + half;
        float sums[2] = {};
        if (row < p_.rows) {
          const float *shares = share_of(place, row, 0) + column;
          float of[kWarps];
#pragma unroll
          for (uint32_t j = 0; j < kWarps; j++) of[j] = shares[j * kTile];
#pragma unroll
          for (uint32_t j = 0; j < kWarps; j++) sums[j / (kWarps / 2)] += of[j];
        }
        const float sum = sums[0] + sums[1];
        // Of what is gated, eight rows behind its gate.
        const float up = __shfl_xor_sync(kAllLanes, sum, kTile / 2);
        if (!stores || row >= p_.rows) continue;
        of_column.other = others[i];
        store_number(static_cast<uint8_t *>(p_.out) + row * p_.out_stride,
                     static_cast<Float>(p_.dtype), of_output, finished(p_, sum, up, of_column));
      }
      added_[place].arrive();
    }
  }

  __device__ __forceinline__ const uint8_t *residual_of(uint32_t row) const {
    return static_cast<const uint8_t *>(p_.residual) + row * p_.residual_stride;
  }

  const LinearFewArguments &p_;
  // Chunks of a row, and bytes of one; the block's tiles.
  const uint32_t warp_, lane_, chunks_, chunk_bytes_, tiles_;
  uint8_t *const ring_;
  // [row][line]
  uint4 *x_;
  float *shares_;
  // Of slots, and of shares.
  Mbarrier *full_, *empty_, *left_, *added_;
  float acc_[4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it.
#define UNSLOTH_LINEAR_FEW(name, type)                                       \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)         \
      linear_few_##name(const __grid_constant__ LinearFewArguments params) { \
    unsloth::let_next_kernel_start();                                        \
    if (params.constant == 0) unsloth::await_previous_kernel();              \
    extern __shared__ uint4 dynamic[];                                       \
    unsloth::Few<type>(params, reinterpret_cast<uint8_t *>(dynamic)).run();  \
  }                                                                          \
  extern "C" __device__ const LinearFewLaunch linear_few_##name##_launch = { \
      static_cast<int32_t>(unsloth::kDtype<type>),                           \
      unsloth::kMostRows,                                                    \
      unsloth::kTile,                                                        \
      unsloth::kLines * 8,                                                   \
      unsloth::kSteps,                                                       \
      unsloth::kTeams,                                                       \
      unsloth::kShares * unsloth::kShareBytes,                               \
      unsloth::kThreads,                                                     \
      unsloth::kSharedBytes,                                                 \
  };
