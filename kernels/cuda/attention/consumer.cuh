// The consumers: warpgroups that compute O = softmax(Q K^T) V for 64 rows each.
//
// Two loops over key blocks n, last to first:
//
// attend (one score tile): Q K^T of block n and P V of block n+1 are issued together; the softmax of
// block n runs while P V of n+1 is still in flight. Where `take_turns`, warpgroups issue in rotation,
// so that one's softmax also hides under the other's products.
//
// attend_ahead (two score tiles): Q K^T of block n-1 is issued before the softmax of block n, so the
// tensor cores always have work queued. Costs a second set of score registers; for small head dims,
// where the softmax is the longer half.
#pragma once

#include "../common/named_barrier.cuh"
#include "../common/wgmma.cuh"
#include "epilogue.cuh"
#include "mask.cuh"
#include "params.h"
#include "shared.cuh"
#include "softmax.cuh"

namespace unsloth {

template <TileConfig C, class T, Mask kMask, bool kSoftcap>
struct Consumer {
  static constexpr int kS = C.block_n / 2;      // accumulators of a score tile, per thread
  static constexpr int kO = C.head_dim_v / 2;   // of the output
  static constexpr int kStepsQk = C.head_dim / 16;
  static constexpr int kStepsPv = C.block_n / 16;

  const AttentionForwardParams &p;
  Shared<C, T> &shared;
  const int wg;
  Ring<C.stages> k_ring, v_ring;
  uint32_t q_parity = 0;

  __device__ __forceinline__ Consumer(const AttentionForwardParams &params, Shared<C, T> &memory,
                                      int warpgroup)
      : p(params), shared(memory), wg(warpgroup) {}

  // One lane per warp arrives, once the whole warp is past the instruction before.
  __device__ __forceinline__ void release(Mbarrier &barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  __device__ __forceinline__ void wait_turn() {
    if (C.take_turns) named_barrier_sync(kBarrierTurn + wg, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if (C.take_turns) {
      named_barrier_arrive(kBarrierTurn + (wg + 1 == C.warpgroups ? 0 : wg + 1), 256);
    }
  }

  // S = Q K^T for the K block at the ring's position.
  __device__ __forceinline__ void multiply_qk(float (&s)[kS]) {
    const uint64_t q = descriptor_k_major(shared_address(shared.q[wg]));
    const uint64_t k = descriptor_k_major(shared_address(shared.k[k_ring.stage]));
    hold(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsQk; ++i) {
      Wgmma<T, C.block_n>::template ss<0>(
          s, q + (i / 4 * (kRowsPerWarpgroup * 128) + i % 4 * 32) / 16,
          k + (i / 4 * (C.block_n * 128) + i % 4 * 32) / 16, i != 0);
    }
    wgmma_commit();
  }

  // O += P V for the V block at the ring's position.
  __device__ __forceinline__ void multiply_pv(float (&o)[kO], const uint32_t (&probabilities)[kS / 2]) {
    const uint64_t v =
        descriptor_mn_major(shared_address(shared.v[v_ring.stage]), C.block_n);
    hold(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsPv; ++i) {
      Wgmma<T, C.head_dim_v>::template rs<1>(o, probabilities + 4 * i, v + i * (16 * 128) / 16, 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_k() { shared.k_full[k_ring.stage].wait(k_ring.parity); }
  __device__ __forceinline__ void wait_v() { shared.v_full[v_ring.stage].wait(v_ring.parity); }
  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }

  // P in T, which is the A operand of P V as it stands.
  __device__ __forceinline__ void convert(const float (&s)[kS], uint32_t (&probabilities)[kS / 2]) {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) probabilities[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // Rows of V past the end of a sequence hold whatever lies behind it, and 0 * NaN is NaN. (Past the
  // end of a whole tensor TMA writes zeros.) All consumers take part, once per tile.
  __device__ __forceinline__ void clear_tail(const Tile &tile) {
    if (p.cu_seqlens_k == nullptr && p.seqlens_k == nullptr && p.block_table == nullptr) return;
    const int rows = tile.seqlen_k - (tile.n_max - 1) * C.block_n;
    if (rows >= C.block_n) return;
    wait_v();
    uint4 *v = reinterpret_cast<uint4 *>(shared.v[v_ring.stage]);
    // Whole 128-byte rows, so the swizzle within them does not matter.
    for (int i = threadIdx.x - 128; i < (C.block_n - rows) * 8; i += 128 * C.warpgroups) {
#pragma unroll
      for (int c = 0; c < chunks(C.head_dim_v); ++c) {
        v[(c * C.block_n + rows) * 8 + i] = {0, 0, 0, 0};
      }
    }
    fence_async_proxy();
    named_barrier_sync(kBarrierConsumers, 128 * C.warpgroups);
  }

  struct BlockMask {
    RowLimits limits;
    int right_from, left_below;  // blocks n >= right_from and n < left_below need masking
  };

  __device__ __forceinline__ BlockMask block_mask(const Tile &tile) {
    const int row = 64 * wg + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
    const int position[2] = {packed_row(p, tile, block_m(C), row).position,
                             packed_row(p, tile, block_m(C), row + 8).position};
    BlockMask m;
    m.limits = row_limits<kMask>(position, 2 * (threadIdx.x % 4), tile.seqlen_q, tile.seqlen_k,
                                 p.window_left, p.window_right);
    // Uniform over the warpgroup: its first row sees the fewest keys on the right, its last row the
    // fewest on the left.
    const int rows = kRowsPerWarpgroup >> p.pack_log2;
    const int first = (tile.row_block * C.warpgroups + wg) * rows + tile.seqlen_k - tile.seqlen_q;
    int whole = tile.seqlen_k;  // keys that every row sees, as far as the right side goes
    if (kMask == Mask::kCausal) whole = min(whole, first + 1);
    if (kMask == Mask::kWindow) whole = min(whole, first + p.window_right + 1);
    m.right_from = whole <= 0 ? 0 : whole / C.block_n;
    m.left_below = 0;
    if (kMask == Mask::kWindow) {
      const int left = first + rows - 1 - p.window_left;
      m.left_below = left <= 0 ? 0 : ceil_div(left, C.block_n);
    }
    return m;
  }

  __device__ __forceinline__ void cap_and_mask(float (&s)[kS], const BlockMask &m, int n) {
    if (kSoftcap) soft_cap(s, p.softcap_scale);
    if (n >= m.right_from || (kMask == Mask::kWindow && n < m.left_below)) {
      apply_mask<kMask>(s, m.limits, n * C.block_n);
    }
  }

  __device__ __forceinline__ void attend(const Tile &tile, float (&o)[kO], SoftmaxRows &rows) {
    const BlockMask mask = block_mask(tile);
    float s[kS];
    uint32_t probabilities[kS / 2];
    int n = tile.n_max - 1;
    wait_k();
    multiply_qk(s);
    wgmma_wait<0>();
    hold(s);
    release_k();
    cap_and_mask(s, mask, n);
    softmax_first(s, rows, p.scale_log2);
    convert(s, probabilities);
    clear_tail(tile);

    for (--n; n >= tile.n_min; --n) {
      wait_k();
      wait_turn();
      multiply_qk(s);
      wait_v();
      multiply_pv(o, probabilities);
      pass_turn();
      wgmma_wait<1>();
      hold(s);
      release_k();
      cap_and_mask(s, mask, n);
      float alpha[2];
      const bool rescale = softmax_next(s, rows, p.scale_log2, alpha);
      wgmma_wait<0>();
      hold(o);
      release_v();
      convert(s, probabilities);
      if (rescale) rescale_rows(o, alpha);
    }
    if (C.own_output) release(shared.q_empty[wg]);
    wait_v();
    multiply_pv(o, probabilities);
    wgmma_wait<0>();
    hold(o);
    release_v();
  }

  // A step of attend_ahead. Pending on entry: Q K^T of block n into `s`, P V of n+1.
  template <bool kMore>
  __device__ __forceinline__ void step_ahead(const Tile &tile, int n, const BlockMask &mask,
                                             float (&s)[kS], float (&next)[kS],
                                             uint32_t (&probabilities)[kS / 2], float (&o)[kO],
                                             SoftmaxRows &rows) {
    if (kMore) {
      wait_k();
      multiply_qk(next);
      k_ring.advance();
      wgmma_wait<2>();
    } else {
      wgmma_wait<1>();
    }
    hold(s);
    release(shared.k_empty[k_done.stage]);
    k_done.advance();
    cap_and_mask(s, mask, n);
    float alpha[2];
    const bool rescale = softmax_next(s, rows, p.scale_log2, alpha);
    if (kMore) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(o);
    if (n + 1 < tile.n_max) release_v();
    convert(s, probabilities);
    if (rescale) rescale_rows(o, alpha);
    if (n + 1 == tile.n_max) clear_tail(tile);
    wait_v();
    multiply_pv(o, probabilities);
  }

  __device__ __forceinline__ void attend_ahead(const Tile &tile, float (&o)[kO], SoftmaxRows &rows) {
    const BlockMask mask = block_mask(tile);
    float even[kS], odd[kS];
    uint32_t probabilities[kS / 2];
    rows.max[0] = rows.max[1] = -INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
    int n = tile.n_max - 1;
    wait_k();
    multiply_qk(even);
    k_ring.advance();
    wgmma_commit();  // an empty group, where later steps have P V
    while (true) {
      if (n == tile.n_min) {
        step_ahead<false>(tile, n, mask, even, odd, probabilities, o, rows);
        break;
      }
      step_ahead<true>(tile, n, mask, even, odd, probabilities, o, rows);
      if (--n == tile.n_min) {
        step_ahead<false>(tile, n, mask, odd, even, probabilities, o, rows);
        break;
      }
      step_ahead<true>(tile, n, mask, odd, even, probabilities, o, rows);
      --n;
    }
    if (C.own_output) release(shared.q_empty[wg]);
    wgmma_wait<0>();
    hold(o);
    release_v();
  }

  __device__ __forceinline__ void run() {
    if (C.take_turns && wg == C.warpgroups - 1) named_barrier_arrive(kBarrierTurn, 256);
    const bool leader = threadIdx.x % 128 == 0;
    Ring<2> tile_ring;
    for (;;) {
      shared.tile_full[tile_ring.stage].wait(tile_ring.parity);
      const Tile tile = shared.tile[tile_ring.stage];
      release(shared.tile_empty[tile_ring.stage]);
      tile_ring.advance();
      if (tile.row_block < 0) break;

      const int row = kRowsPerWarpgroup * wg + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
      float o[kO];
      SoftmaxRows rows;
#pragma unroll
      for (int i = 0; i < kO; ++i) o[i] = 0.0f;
      hold(o);  // or ptxas keeps a second copy of O for tiles of one block
      if (tile.n_max <= tile.n_min) {
        rows.max[0] = rows.max[1] = -INFINITY;
        rows.sum[0] = rows.sum[1] = 0.0f;
        finish_rows<C>(p, tile, row, rows, o);
        copy_output<C, T>(p, tile, kRowsPerWarpgroup * wg, nullptr);
        continue;
      }

      shared.q_full[wg].wait(q_parity);
      q_parity ^= 1;
      if constexpr (C.scores == 2) {
        attend_ahead(tile, o, rows);
      } else {
        attend(tile, o, rows);
      }

      finish_rows<C>(p, tile, row, rows, o);
      T *staging = shared.output(wg);
      // The last tile's store has had this whole tile to read; Q's readers are the four warps.
      if (C.own_output && leader) tma_store_wait_read();
      named_barrier_sync(kBarrierWarpgroup + wg, 128);
      store_output<C>(p, tile, wg, o, staging);
      if (!C.own_output && leader) {
        tma_store_wait_read();
        shared.q_empty[wg].arrive();
      }
    }
    if (leader) tma_store_wait_read();  // shared memory must outlive its readers
  }

 private:
  Ring<C.stages> k_done;  // attend_ahead releases K a step after it waits for the next
};

}  // namespace unsloth
