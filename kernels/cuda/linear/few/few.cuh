// A few rows of x of 16 bits on Hopper, bound by reading the weight: one like x (floats.cuh), or in
// blocks (blocks.cuh).
//
// One block for each multiprocessor, which takes all of its shared memory: so a block that is
// started early (programmatic dependent launch) comes to a multiprocessor of its own, and fills its
// ring with a constant weight while the kernels before still run. Blocks have by turns tiles of 16
// rows of the weight, or of fewer where blocks would be idle else. Two warps copy these, by turns a
// chunk of a tile to a slot of the ring: 512 neighbours of each row, or 2048 in blocks. They never
// wait for x, but once the ring has been full they let little be on its way at a time. Every other
// chunk is for half of the warps that multiply, of which each has a step of it. Two warps more, by
// turns, add what they have of a tile, and store it, while they go on.
//
// Rows in blocks that are no whole lines of 16 bytes are copied a tile at a time, as they lie. Rows
// of x for which shared memory has no room are parted among the blocks of a cluster, as those of
// the weight are: of every tile one of these adds what the others have.
//
// Of a gated product eight rows of a tile are the gate's and eight are of what it gates. x may pass
// RMSNorm on its way: every block normalises all of it.
//
// It is CUDA C++ for the copies to shared memory, of which CubeCL has none.
#pragma once

#include "common/cluster.cuh"
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
// Two more add.
constexpr uint32_t kWarps = 16, kSteps = 8, kTeams = kWarps / kSteps, kAdders = 2;
// Threads that multiply, and all.
constexpr uint32_t kMultipliers = 32 * kWarps, kThreads = kMultipliers + 32 * (kTeams + kAdders);
constexpr uint32_t kSharedBytes = 227 * 1024;
constexpr uint32_t kMostRows = 8;
// Rows of the weight of a tile, at most.
constexpr uint32_t kTile = 16;
// What another block of a cluster has of a tile.
constexpr uint32_t kPartialBytes = 32 * sizeof(float4);
// What warps have of a tile, for each row of x: of each warp that adds those of one tile.
constexpr uint32_t kShareBytes = kWarps * kTile * sizeof(float);

// `Weight` says how steps of a tile are multiplied, and how x lies for that.
template <class T, class Weight>
class Few {
 public:
  __device__ __forceinline__ Few(const LinearFewArguments &p, uint8_t *shared)
      : p_(p),
        warp_(__shfl_sync(kAllLanes, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32),
        chunks_((p.steps + p.steps_of_chunk - 1) / p.steps_of_chunk),
        chunk_bytes_(p.steps_of_chunk * Weight::step_bytes(p)),
        parts_log2_(kParts ? 31 - __clz(p.parts) : 0),
        part_(blockIdx.x & (1 << parts_log2_) - 1),
        cluster_(blockIdx.x >> parts_log2_),
        padded_(p.steps * Weight::step_lines(p)),
        first_line_(part_ * padded_),
        lines_(min(p.lines - first_line_, padded_)),
        tiles_(p.tiles + (cluster_ < p.one_more)),
        ring_(shared) {
    uint8_t *rest = shared + p.slots * kTile * p.pitch;
    x_ = reinterpret_cast<uint4 *>(rest);
    rest += p.rows * padded_ * 16;
    sums_ = reinterpret_cast<float4 *>(rest);
    if (Weight::kHasSums) rest += padded_ * sizeof(float4);
    shares_ = reinterpret_cast<float *>(rest);
    rest += kAdders * p.rows * kShareBytes;
    partials_ = reinterpret_cast<float4 *>(rest);
    if (parts() != 1) rest += most_own_tiles() * p.parts * kPartialBytes;
    full_ = reinterpret_cast<Mbarrier *>(rest);
    empty_ = full_ + p.slots;
    added_ = empty_ + p.slots;
    come_ = added_ + kAdders;
  }

  __device__ __forceinline__ void run() {
    // A warp that adds says so once its barriers are there.
    if (parts() != 1 && warp_ < kWarps + kTeams) cluster_arrive();
    if (warp_ < kWarps) {
      multiply_tiles();
    } else if (warp_ < kWarps + kTeams) {
      ask();
    } else {
      add_shares();
      return;
    }
    if (parts() != 1) cluster_wait();
  }

 private:
  static constexpr bool kParts = Weight::kParts;
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

  __device__ __forceinline__ uint32_t parts() const { return kParts ? p_.parts : 1; }

  // Tiles of the cluster that a block adds, at most: every so many as there are blocks.
  __device__ __forceinline__ uint32_t most_own_tiles() const {
    return (p_.tiles + 1 + p_.parts - 1) / p_.parts;
  }

  // Of a tile of the block, among all: those that blocks have at a time are neighbours.
  __device__ __forceinline__ uint32_t index_of(uint32_t tile) const {
    return tile * (gridDim.x >> parts_log2_) + cluster_;
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

  // Has a tile's rows copied from byte `at` of the block's part on.
  __device__ __forceinline__ void copy_chunk(uint32_t slot, uint32_t tile, uint32_t at) const {
    const uint32_t columns = columns_of(tile);
    // Of gated products the second half of the rows is another matrix.
    const uint32_t low = min(columns, kTile / 2), high = p_.gated != 0 ? columns : columns - low;
    const uint8_t *from = p_.weight + column_of(tile) * p_.weight_stride;
    const uint8_t *other = from + (p_.gated != 0 ? p_.up_offset : kTile / 2 * p_.weight_stride);
    Mbarrier *full = &full_[slot];
    uint32_t to = shared_address(ring_ + slot * kTile * p_.pitch);
    if (Weight::kTiles && p_.whole_tiles != 0) {
      full->arrive_expect((low + high) * p_.pitch);
      bulk_load_by_thread(to, from, low * p_.pitch, full);
      if (high != 0) {
        bulk_load_by_thread(to + kTile / 2 * p_.pitch, other, high * p_.pitch, full);
      }
      return;
    }
    const uint32_t all = Weight::bytes_of_lines(lines_);
    if (kParts && at >= all) {
      // Of the last part, which is shorter.
      full->arrive_expect(0);
      return;
    }
    const uint32_t bytes = min(chunk_bytes_, all - at);
    if (kParts) at += Weight::bytes_of_lines(first_line_);
    from += at, other += at;
    full->arrive_expect((low + high) * bytes);
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
    if (p_.norm_dtype != 0 && threadIdx.x < lines_) load_gains(threadIdx.x, gains);
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
          multiply(ring_ + turn.slot * kTile * p_.pitch + of_chunk * Weight::step_bytes(p_), step);
        }
        __syncwarp();
        if (lane_ == 0) empty_[turn.slot].arrive();
        turn.advance(p_.slots);
      }
      chunk -= chunks_;
      leave(tile);
    }
  }

  // x to shared memory, zeros behind it, and what is summed of it: parts of the squares of rows to
  // where shares will be. A warp has 32 lines of a row at a time, of which all lanes take part.
  __device__ __forceinline__ void load_x() const {
    // That are asked for before any is looked at: of as many rows as there are, or some more, and
    // of several places in these.
    constexpr uint32_t kAtOnce = 8;
    static_assert(kMostRows <= kAtOnce);
    const uint32_t rows_log2 = 32 - __clz(p_.rows - 1), of_row = (padded_ + 31) / 32;
    const uint32_t places = kAtOnce >> rows_log2;
    for (uint32_t first = warp_; first < of_row; first += places * kWarps) {
      uint4 of[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        const uint32_t row = i & (1 << rows_log2) - 1;
        const uint32_t line = (first + (i >> rows_log2) * kWarps) * 32 + lane_;
        of[i] = {0, 0, 0, 0};
        if (row < p_.rows && line < lines_) {
          const uint8_t *x = static_cast<const uint8_t *>(p_.x) + row * p_.x_stride;
          of[i] = reinterpret_cast<const uint4 *>(x)[first_line_ + line];
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        const uint32_t row = i & (1 << rows_log2) - 1;
        const uint32_t part = first + (i >> rows_log2) * kWarps;
        if (row < p_.rows && part * 32 + lane_ < padded_) {
          Weight::store(x_ + row * padded_ + part * 32, row, lane_, of[i]);
        }
      }
      // All sums side by side, also of what is not there.
      float sums[kAtOnce];
      if (p_.norm_dtype != 0) {
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) sums[i] = squares_of_lane<T>(of[i]);
        add_lanes<32>(sums);
      } else if (Weight::kHasSums) {
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) sums[i] = sum_of_line(of[i]);
        add_lanes<4>(sums);
      } else {
        continue;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        const uint32_t row = i & (1 << rows_log2) - 1;
        const uint32_t part = first + (i >> rows_log2) * kWarps;
        if (row >= p_.rows || part >= of_row) continue;
        if (p_.norm_dtype == 0) {
          keep_sum(row, part * 32 + lane_, sums[i]);
        } else if (lane_ == 0) {
          shares_[row * of_row + part] = sums[i];
        }
      }
    }
  }

  // Adds what so many neighbouring lanes have, by halves.
  template <uint32_t kLanes, uint32_t kCount>
  static __device__ __forceinline__ void add_lanes(float (&sums)[kCount]) {
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kCount; i++) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step);
    }
  }

  // Normalises x in place: a thread the lines that it has stored. `gains` are those of the first.
  __device__ __forceinline__ void normalise(float (&gains)[8]) const {
    constexpr uint32_t kAtOnce = 4;
    const uint32_t parts = (lines_ + 31) / 32, of_row = (padded_ + 31) / 32;
    // Behind the parts of all rows.
    float *scales = shares_ + p_.rows * of_row, first_scale = 0;
    named_barrier_sync(kAmongMultipliers, kMultipliers);
    if (p_.rows == 1) {
      // Every warp adds it up: a barrier takes longer.
      first_scale = scale_of_row<true>(p_, shares_, parts);
    } else {
      if (warp_ < p_.rows) {
        const float scale = scale_of_row(p_, shares_ + warp_ * of_row, parts);
        if (lane_ == 0) scales[warp_] = scale;
      }
      named_barrier_sync(kAmongMultipliers, kMultipliers);
    }
#pragma unroll 1
    for (uint32_t base = warp_ * 32; base < lines_; base += kMultipliers) {
      const uint32_t line = base + lane_;
      if (line != threadIdx.x && line < lines_) load_gains(line, gains);
#pragma unroll 1
      for (uint32_t first = 0; first < p_.rows; first += kAtOnce) {
        float sums[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          const uint32_t row = first + i;
          uint4 words = {0, 0, 0, 0};
          if (row < p_.rows && line < lines_) {
            uint4 *of_part = x_ + row * padded_ + base;
            words = Weight::load(of_part, row, lane_);
            const float scale = p_.rows == 1 ? first_scale : scales[row];
            float of[8];
            Vector<T>::unpack(words, of);
#pragma unroll
            for (int j = 0; j < 8; j++) of[j] = normalised(p_, of[j], gains[j], scale);
            words = Vector<T>::packed(of);
            Weight::store(of_part, row, lane_, words);
          }
          sums[i] = sum_of_line(words);
        }
        if (!Weight::kHasSums) continue;
        add_lanes<4>(sums);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; i++) {
          if (first + i < p_.rows) keep_sum(first + i, line, sums[i]);
        }
      }
    }
  }

  static __device__ __forceinline__ float sum_of_line(const uint4 &words) {
    float of[8];
    Vector<T>::unpack(words, of);
    return (of[0] + of[1] + (of[2] + of[3])) + (of[4] + of[5] + (of[6] + of[7]));
  }

  // Keeps what a weight needs of the sum of 32 neighbours of x, of which four lanes have a line
  // each, as lanes have the columns of sums: twice those of two rows.
  __device__ __forceinline__ void keep_sum(uint32_t row, uint32_t line, float sum) const {
    if (!Weight::kHasSums || line % 4 != 0 || line >= padded_) return;
    float *to = reinterpret_cast<float *>(sums_ + line + row / 2) + row % 2;
    to[0] = to[2] = Weight::kSumFactor * sum;
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

  // A step of a tile.
  __device__ __forceinline__ void multiply(const uint8_t *rows, uint32_t step) {
    // Columns without a row repeat the last one's.
    const uint32_t row = min(lane_ / 4, p_.rows - 1);
    Weight::multiply(p_, rows, step * Weight::step_lines(p_), lines_, row, x_ + row * padded_,
                     sums_, acc_);
  }

  // Puts what a warp has of a tile where it is added to others.
  __device__ __forceinline__ void leave(uint32_t tile) {
    const uint32_t g = lane_ / 4, t = lane_ % 4, place = tile % kAdders;
    added_[place].wait(~(tile / kAdders) & 1);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = 2 * t + i;
      if (row < p_.rows) {
        *share_of(place, row, g, warp_) = acc_[i];
        *share_of(place, row, g + 8, warp_) = acc_[2 + i];
      }
      acc_[i] = acc_[2 + i] = 0;
    }
    named_barrier_arrive(kLeft + place, kLeaversAndAdder);
  }

  // [place][row of x][column of the tile][warp]: fours of warps change places by columns, and warps
  // of a four by rows, so that what a warp writes, and what one reads, lies in different banks.
  __device__ __forceinline__ float *share_of(uint32_t place, uint32_t row, uint32_t column,
                                             uint32_t warp) const {
    return fours_of(place, row, column) + (warp ^ column / 2 % 4 * 4 ^ row / 2 % 4);
  }
  __device__ __forceinline__ float *fours_of(uint32_t place, uint32_t row, uint32_t column) const {
    return shares_ + ((place * p_.rows + row) * kTile + column) * kWarps;
  }

  // The sum of what all warps have, alike for every row: in pairs, and pairs of these.
  __device__ __forceinline__ float sum_of_shares(uint32_t place, uint32_t row,
                                                 uint32_t column) const {
    float of[kWarps / 4];
#pragma unroll
    for (uint32_t i = 0; i < kWarps / 4; i++) {
      const float4 shares =
          reinterpret_cast<const float4 *>(fours_of(place, row, column))[i ^ column / 2 % 4];
      of[i] = (shares.x + shares.y) + (shares.z + shares.w);
    }
    return (of[0] + of[1]) + (of[2] + of[3]);
  }

  // What the last warps do: each adds what others have of every other tile, and stores it. Half of
  // its lanes have every other row of x.
  __device__ __forceinline__ void add_shares() const {
    const uint32_t place = warp_ - kWarps - kTeams;
    if (lane_ == 0) added_[place].init(1);
    if (parts() != 1) {
      for (uint32_t i = lane_ + 32 * place; i < most_own_tiles(); i += 32 * kAdders) {
        come_[i].init(1);
      }
    }
    fence_mbarrier_init();
    __syncwarp();
    if (parts() != 1) cluster_arrive();
    named_barrier_arrive(kReady, kThreads);
    // The barriers of the others are there.
    if (parts() != 1) cluster_wait();
    // Residuals are what the kernel before has written.
    await_previous_kernel();
    const uint32_t column = lane_ % kTile, half = lane_ / kTile;
    for (uint32_t tile = place; tile < tiles_; tile += kAdders) {
      const uint32_t of_output = column_of(tile) + column;
      const bool adds = parts() == 1 || tile % p_.parts == part_;
      const bool stores = adds && column < columns_of(tile);
      OfColumn of_column = {};
      uint32_t others[kMostRows / 2] = {};
      if (stores) load_biases(p_, of_output, of_column);
#pragma unroll
      for (uint32_t i = 0; i < kMostRows / 2; i++) {
        const uint32_t row = 2 * i + half;
        if (stores && row < p_.rows) others[i] = other_of(p_, residual_of(row), of_output);
      }
      named_barrier_sync(kLeft + place, kLeaversAndAdder);
      float sums[kMostRows / 2] = {};
#pragma unroll
      for (uint32_t i = 0; i < kMostRows / 2; i++) {
        const uint32_t row = 2 * i + half;
        if (row < p_.rows) sums[i] = sum_of_shares(place, row, column);
      }
      __syncwarp();
      if (lane_ == 0) added_[place].arrive();
      if constexpr (kParts) {
        if (parts() != 1) {
          if (!adds) {
            send(tile, sums);
            continue;
          }
          add_partials(tile, sums);
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kMostRows / 2; i++) {
        if (2 * i >= p_.rows) break;
        const uint32_t row = 2 * i + half;
        // Of what is gated, eight rows behind its gate.
        const float up = __shfl_xor_sync(kAllLanes, sums[i], kTile / 2);
        if (!stores || row >= p_.rows) continue;
        of_column.other = others[i];
        store_number(static_cast<uint8_t *>(p_.out) + row * p_.out_stride,
                     static_cast<Float>(p_.dtype), of_output, finished(p_, sums[i], up, of_column));
      }
    }
  }

  // What part `part` has of a tile that the block adds, of this lane.
  __device__ __forceinline__ float4 *partial_of(uint32_t tile, uint32_t part) const {
    return partials_ + (tile / p_.parts * p_.parts + part) * 32 + lane_;
  }

  // Sends what the block has of a tile to the one that adds it.
  __device__ __forceinline__ void send(uint32_t tile, const float (&sums)[kMostRows / 2]) const {
    const uint32_t to = tile % p_.parts;
    store_async({sums[0], sums[1], sums[2], sums[3]}, peer_address(partial_of(tile, part_), to),
                peer_address(&come_[tile / p_.parts], to));
  }

  // Adds up what all parts have of a tile, in their order.
  __device__ __forceinline__ void add_partials(uint32_t tile, float (&sums)[kMostRows / 2]) const {
    Mbarrier &come = come_[tile / p_.parts];
    if (lane_ == 0) come.arrive_expect((p_.parts - 1) * kPartialBytes);
    come.wait(0);
    float total[kMostRows / 2] = {};
    for (uint32_t part = 0; part < p_.parts; part++) {
      float4 four = {sums[0], sums[1], sums[2], sums[3]};
      if (part != part_) four = *partial_of(tile, part);
      total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
    }
#pragma unroll
    for (uint32_t i = 0; i < kMostRows / 2; i++) sums[i] = total[i];
  }

  __device__ __forceinline__ const uint8_t *residual_of(uint32_t row) const {
    return static_cast<const uint8_t *>(p_.residual) + row * p_.residual_stride;
  }

  const LinearFewArguments &p_;
  // Chunks of a row, and bytes of one; the block's part of a row, the cluster among all.
  const uint32_t warp_, lane_, chunks_, chunk_bytes_, parts_log2_, part_, cluster_;
  // Of a row of x, lines of 16 bytes of the block's part: with zeros behind them, before them, and
  // themselves. The cluster's tiles.
  const uint32_t padded_, first_line_, lines_, tiles_;
  uint8_t *const ring_;
  // [row][line]
  uint4 *x_;
  // [32 neighbours][two rows]
  float4 *sums_;
  float *shares_;
  float4 *partials_;
  // Of slots, of places of shares, and of what the cluster's other blocks send.
  Mbarrier *full_, *empty_, *added_, *come_;
  float acc_[4] = {};
};

}  // namespace unsloth

// Instantiates a kernel, and beside it what the host must know of it. The weight may have commas.
#define UNSLOTH_LINEAR_FEW(name, type, ...)                                      \
  extern "C" __global__ void __launch_bounds__(unsloth::kThreads, 1)             \
      linear_few_##name(const __grid_constant__ LinearFewArguments params) {     \
    unsloth::let_next_kernel_start();                                            \
    if (params.constant == 0) unsloth::await_previous_kernel();                  \
    extern __shared__ uint4 dynamic[];                                           \
    uint8_t *bytes = reinterpret_cast<uint8_t *>(dynamic);                       \
    unsloth::Few<type, unsloth::__VA_ARGS__>(params, bytes).run();               \
  }                                                                              \
  extern "C" __device__ const LinearFewLaunch linear_few_##name##_launch = {     \
      static_cast<int32_t>(unsloth::kDtype<type>),                               \
      unsloth::__VA_ARGS__::kDtype,                                              \
      unsloth::kMostRows,                                                        \
      unsloth::__VA_ARGS__::kParts,                                              \
      unsloth::kTile,                                                            \
      unsloth::__VA_ARGS__::kStep,                                               \
      unsloth::__VA_ARGS__::kStepBytes,                                          \
      unsloth::kSteps,                                                           \
      unsloth::kTeams,                                                           \
      unsloth::__VA_ARGS__::kHasSums ? unsloth::__VA_ARGS__::kStep / 8 * 16 : 0, \
      unsloth::kAdders * unsloth::kShareBytes,                                   \
      unsloth::kPartialBytes,                                                    \
      unsloth::kThreads,                                                         \
      unsloth::kSharedBytes,                                                     \
  };

// By weights in blocks.
#define UNSLOTH_LINEAR_FEW_BLOCKS(name, blocks)                                                    \
  UNSLOTH_LINEAR_FEW(name##_bf16, __nv_bfloat16, InBlocks<unsloth::Blocks::blocks, __nv_bfloat16>) \
  UNSLOTH_LINEAR_FEW(name##_f16, __half, InBlocks<unsloth::Blocks::blocks, __half>)
