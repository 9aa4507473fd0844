// The warps that compute. Each has its own keys of every tile, and its own softmax over them; they
// come together once a piece of work is done (epilogue.cuh).
//
// The query rows of all heads that share a key head are the 16 rows of a fragment. Lane 4 g + t has
// rows g and g + 8 of scores and sums.
//
// Codes become f16, four from the word that a lane has of a matrix of pairs. Those of a key are
// neighbours, so of 16 dimensions lane t has 4 t to 4 t + 3, and Q is in that order too; those of
// two values change places first, and so the products of even dimensions are apart from those of
// odd ones. Each row of Q is scaled by a power of two, that bf16's range fit: what its greatest
// component leaves below f16's range is 2^-40 of it.
#pragma once

#include <type_traits>

#include "attention/forward/softmax.cuh"
#include "common/claims.cuh"
#include "common/mma.cuh"
#include "epilogue.cuh"

namespace unsloth {

// mma into four numbers of a longer array.
template <class T, int N>
__device__ __forceinline__ void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         float (&d)[N], int at) {
  const uint32_t b[2] = {b0, b1};
  float sums[4] = {d[at], d[at + 1], d[at + 2], d[at + 3]};
  mma<T>(a, b, sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[at + i] = sums[i];
}

template <DecodeConfig C, class T>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const AttentionDecodingArguments &p, Shared<C, T> &shared)
      : p_(p),
        shared_(shared),
        lane_(threadIdx.x % 32),
        head_(uniform(threadIdx.x / 32 / warps_of_head(C))),
        key_(uniform(threadIdx.x / 32 % warps_of_head(C) * kSlices * kSlice)) {
    const int box = p.kv_box_rows;
    chunk_ = box * chunk_bytes(C);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const int key = key_ + i * kSlice;
      rows_at_[i] = (key / box * C.heads + head_) * kChunks * box + key % box;
    }
  }

  __device__ __forceinline__ void run() {
    Ring<kItems> slot;
    for (;; slot.advance()) {
      shared_.item_full[slot.stage].wait(slot.parity);
      const Item item = shared_.item[slot.stage];
      if (item.rows < 0) break;
      if constexpr (C.codes) {
        load_q_beside_codes(shared_.q[slot.stage][head_], item);
      } else {
        load_q(shared_.q[slot.stage][head_], item.rows);
      }
      __syncwarp();
      if (lane_ == 0) shared_.item_empty[slot.stage].arrive();
      // Long before it is claimed from: that takes a while.
      if (threadIdx.x == 0) begin_joins(p_, item);
      const Limits limits = limits_of(item);
      rows_.max[0] = rows_.max[1] = -INFINITY;
      rows_.sum[0] = rows_.sum[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) o_[i] = 0.0f;
#pragma unroll 1
      for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
        const int key = tile * C.tile;
        if (key < limits.clear_begin || key + C.tile > limits.clear_end) {
          step<true>(key, limits);
        } else {
          step<false>(key, limits);
        }
      }
      if constexpr (C.codes) {
        const float scale = scale_of(p_.v_scale, p_.v_scale_head, item);
#pragma unroll
        for (int i = 0; i < kSums; ++i) o_[i] *= scale;
      }
      finish(p_, shared_, item, rows_, o_);
    }
  }

 private:
  static constexpr int kSlices = slices(C);
  static constexpr int kChunks = chunks(C);                // of a row
  static constexpr int kLoads = row_bytes(C) / 32;         // of rows' two units of 16 bytes
  static constexpr int kSums = C.head_dim / 2;             // a lane's part of O
  static constexpr int kUnits = C.head_dim / 16;           // of the products' inner dimension
  using Product = std::conditional_t<C.codes, __half, T>;  // what is multiplied

  // What the lane's rows see, from the first key to past the last; the same of all rows, and what
  // every row sees.
  struct Limits {
    int low[2], high[2];
    int first, end;
    int clear_begin, clear_end;
  };

  __device__ __forceinline__ Limits limits_of(const Item &item) const {
    Limits l;
    const int shift = item.k - item.q;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows that are not there see what the last one does.
      const int row = min(lane_ / 4 + 8 * i, item.rows - 1);
      const int position = row / p_.group + shift;
      l.low[i] = max(item.first, position - p_.window_left);
      l.high[i] = min(item.k, position + p_.window_right + 1);
    }
    l.first = item.first;
    l.end = item.k;
    l.clear_begin = max(0, item.k - 1 - p_.window_left);
    l.clear_end = min(item.k, shift + p_.window_right + 1);
    return l;
  }

  // Rows that have no query are multiplied too, as zeros: what lies there may be anything.
  __device__ __forceinline__ void load_q(const T (&q)[kRows][q_pitch(C)], int rows) {
    const uint32_t from = shared_address(&q[lane_ % 16][lane_ / 16 * 8]);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      load_matrix_x4(from + i * 32, q_[i]);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (lane_ / 4 + m % 2 * 8 >= rows) q_[i][m] = 0;
      }
    }
  }

  __device__ __forceinline__ float scale_of(const float *scales, int distance,
                                            const Item &item) const {
    return scales == nullptr ? 1.0f : scales[(item.head + head_) * distance];
  }

  // Two pairs of a row, of those that the lane has of a unit; zeros if it has no query.
  __device__ __forceinline__ uint2 pairs_at(const T (&q)[kRows][q_pitch(C)], int row, int unit,
                                            int rows) const {
    if (row >= rows) return {0, 0};
    return *reinterpret_cast<const uint2 *>(&q[row][unit * 16 + lane_ % 4 * 4]);
  }

  // In f16, scaled. What takes that back, and K's own scale, are the factors of scores.
  __device__ __forceinline__ void load_q_beside_codes(const T (&q)[kRows][q_pitch(C)],
                                                      const Item &item) {
    const float scale = scale_of(p_.k_scale, p_.k_scale_head, item);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ / 4 + 8 * i;
      uint32_t greatest = 0;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint2 both = pairs_at(q, row, u, item.rows);
        const float2 low = unpack<T>(both.x), high = unpack<T>(both.y);
        for (float x : {low.x, low.y, high.x, high.y}) {
          greatest = max(greatest, __float_as_uint(x) & 0x7fffffff);
        }
      }
      greatest = max(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
      greatest = max(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
      // From the least whose factor is a number; the greatest is that of infinity. The row comes to
      // lie below 2^15.
      const uint32_t exponent = max(greatest >> 23, 15u);
      const float factor = __uint_as_float((268 - exponent) << 23);
      factor_[i] = __uint_as_float((exponent - 14) << 23) * scale;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint2 both = pairs_at(q, row, u, item.rows);
        const float2 low = unpack<T>(both.x), high = unpack<T>(both.y);
        q_[u][i] = pack<__half>(low.x * factor, low.y * factor);
        q_[u][i + 2] = pack<__half>(high.x * factor, high.y * factor);
      }
    }
  }

  // The address of a unit of 16 bytes of a row of a tile. Swizzles spread the same unit of eight
  // rows over all banks.
  __device__ __forceinline__ uint32_t at(uint32_t tile, int row, int unit) const {
    constexpr int kUnitsOfChunk = chunk_bytes(C) / 16, kRowsOfLine = 8 / kUnitsOfChunk;
    const int place = (unit % kUnitsOfChunk) ^ (row / kRowsOfLine % kUnitsOfChunk);
    return tile + unit / kUnitsOfChunk * chunk_ + row * chunk_bytes(C) + place * 16;
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ == 0) shared_.empty[at_.stage].arrive();
    at_.advance();
  }

  template <bool kEdge>
  __device__ __forceinline__ void step(int key, const Limits &limits) {
    float s[kSlices * 8];
    score(s);
    const int first = key + key_;  // of the warp's
    if (p_.softcap_scale > 0.0f) cap(s);
    if constexpr (kEdge) hide(s, first, limits);
    float alpha[2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      grows = raise_reference(s, i, rows_, p_.scale_log2, alpha) || grows;
      rows_.sum[i] *= alpha[i];
      exponentiate_row(s, i, rows_, p_.scale_log2);
    }
    if (__any_sync(0xffffffff, grows)) rescale_rows(o_, alpha);
    add_values<kEdge>(s, first, limits);
  }

  // Q K^T of 16 keys, by two units of 16 bytes.
  __device__ __forceinline__ void multiply_keys(const uint32_t (&k)[4], float (&s)[kSlices * 8],
                                                int slice, int u) {
    if constexpr (C.codes) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint32_t pairs[2];
        halves_of_e4m3(k[m], pairs);
        multiply<__half>(q_[2 * u + m % 2], pairs[0], pairs[1], s, 8 * slice + m / 2 * 4);
      }
    } else {
      multiply<T>(q_[u], k[0], k[1], s, 8 * slice);
      multiply<T>(q_[u], k[2], k[3], s, 8 * slice + 4);
    }
  }

  // Q K^T. Two fragments of eight keys for each slice.
  __device__ __forceinline__ void score(float (&s)[kSlices * 8]) {
#pragma unroll
    for (int i = 0; i < kSlices * 8; ++i) s[i] = 0.0f;
    shared_.full[at_.stage].wait(at_.parity);
    const uint32_t keys = shared_address(shared_.ring[at_.stage]);
    const int row = lane_ / 16 * 8 + lane_ % 8;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        uint32_t k[4];
        load_matrix_x4(at(keys, rows_at_[i] + row, 2 * u + lane_ / 8 % 2), k);
        multiply_keys(k, s, i, u);
      }
    }
    release();
    if constexpr (C.codes) {
#pragma unroll
      for (int i = 0; i < kSlices * 8; ++i) s[i] *= factor_[i / 2 % 2];
    }
  }

  // Soft cap, of which the cap itself is part of scale_log2. tanh x = 1 - 2 / (1 + e^2x): the one
  // instruction for it is less exact than the scores are.
  __device__ __forceinline__ void cap(float (&s)[kSlices * 8]) const {
    const float factor = 2.0f * kLog2E * p_.softcap_scale;
#pragma unroll
    for (int i = 0; i < kSlices * 8; ++i) {
      s[i] = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(s[i] * factor));
    }
  }

  __device__ __forceinline__ void hide(float (&s)[kSlices * 8], int first,
                                       const Limits &limits) const {
#pragma unroll
    for (int j = 0; j < kSlices * 8; ++j) {
      const int key = first + j / 4 * 8 + lane_ % 4 * 2 + j % 2, i = j / 2 % 2;
      if (key < limits.low[i] || key >= limits.high[i]) s[j] = -INFINITY;
    }
  }

  // P V of two units of 16 bytes of 16 values: v[0] and v[2] have the first eight.
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[4], const uint32_t (&v)[4],
                                                  int j) {
    if constexpr (C.codes) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        uint32_t first[2], last[2];
        halves_of_e4m3(__byte_perm(v[2 * unit], 0, 0x3120), first);
        halves_of_e4m3(__byte_perm(v[2 * unit + 1], 0, 0x3120), last);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          multiply<__half>(p, first[odd], last[odd], o_, 16 * j + 8 * unit + 4 * odd);
        }
      }
    } else {
      multiply<T>(p, v[0], v[1], o_, 8 * j);
      multiply<T>(p, v[2], v[3], o_, 8 * j + 4);
    }
  }

  // O += P V. What lies in memory where no key is may be anything, and nothing times that is not
  // nothing: at the edges such values are made zero.
  template <bool kEdge>
  __device__ __forceinline__ void add_values(const float (&s)[kSlices * 8], int first,
                                             const Limits &limits) {
    shared_.full[at_.stage].wait(at_.parity);
    const uint32_t values = shared_address(shared_.ring[at_.stage]);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      uint32_t p[4], mask[2];
#pragma unroll
      for (int j = 0; j < 4; ++j) p[j] = pack<Product>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = first + i * kSlice + h * 8 + lane_ % 4 * 2;
        const auto is_there = [&](int x) { return x >= limits.first && x < limits.end; };
        mask[h] = (is_there(key) ? 0xffffu : 0) | (is_there(key + 1) ? 0xffff0000u : 0);
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        uint32_t v[4];
        load_matrix_x4_transposed(at(values, rows_at_[i] + lane_ % 16, 2 * j + lane_ / 16), v);
        if constexpr (kEdge) {
#pragma unroll
          for (int m = 0; m < 4; ++m) v[m] &= mask[m % 2];
        }
        multiply_values(p, v, j);
      }
    }
    release();
  }

  const AttentionDecodingArguments &p_;
  Shared<C, T> &shared_;
  const int lane_;
  const int head_, key_;  // of the warp: which head, and the first key of a tile
  int rows_at_[kSlices];  // where its slices are in the first chunk of their box
  int chunk_;             // bytes of a box's chunk
  Ring<C.entries> at_;
  uint32_t q_[kUnits][4];
  float factor_[2];  // of the scores of codes
  SoftmaxRows rows_;
  float o_[kSums];
};

}  // namespace unsloth
