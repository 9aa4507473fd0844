// The consumers: warpgroups that compute O = softmax(Q K^T) V for 64 rows each.
#pragma once

#include "attention/forward/arguments.h"
#include "common/memory.cuh"
#include "common/named_barrier.cuh"
#include "common/trace.cuh"
#include "common/wgmma.cuh"
#include "epilogue.cuh"
#include "mask.cuh"
#include "shared.cuh"
#include "softmax.cuh"

namespace unsloth {

template <TileConfig C, class T, Mask kMask, bool kSoftcap>
struct Consumer {
  static constexpr int kS = C.block_n / 2;     // accumulators of a score tile, per thread
  static constexpr int kO = C.head_dim_v / 2;  // of the output
  static constexpr int kStepsQk = C.head_dim / 16;
  static constexpr int kStepsPv = C.block_n / 16;
  static constexpr bool kHalves = kMask == Mask::kCausal && C.block_n == 128;
  static constexpr int kQ = C.q_registers ? 4 * kStepsQk : 1;

  const AttentionForwardArguments &p;
  Shared<C, T> &shared;
  const int wg;
  const int row;  // the first of the thread's two rows in the tile; the other is 8 further down
  Ring<C.stages> k_ring, v_ring;
  Ring<2> slots;
  Trace trace;
  Ring<C.q_stages> q_ring;
  int q_stored = -1;  // the stage of Q that the last tile's O is in, until that is freed

  __device__ __forceinline__ Consumer(const AttentionForwardArguments &params, Shared<C, T> &memory,
                                      int warpgroup)
      : p(params),
        shared(memory),
        wg(warpgroup),
        row(kRowsPerWarpgroup * warpgroup + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

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

  // S = Q K^T for the K block at the ring's position, or as many of its first keys as S has
  // columns.
  template <int N>
  __device__ __forceinline__ void multiply_qk(float (&s)[N], const uint32_t (&q)[kQ]) {
    const uint64_t k = descriptor_k_major(shared_address(shared.k[k_ring.stage]));
    hold(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsQk; ++i) {
      const uint64_t k_step = k + (i / 4 * (C.block_n * 128) + i % 4 * 32) / 16;
      if constexpr (C.q_registers) {
        Wgmma<T, 2 * N>::template rs<0>(s, q + 4 * i, k_step, i != 0);
      } else {
        const uint64_t q_tile = descriptor_k_major(shared_address(shared.q[q_ring.stage][wg]));
        Wgmma<T, 2 * N>::template ss<0>(
            s, q_tile + (i / 4 * (kRowsPerWarpgroup * 128) + i % 4 * 32) / 16, k_step, i != 0);
      }
    }
    wgmma_commit();
  }

  // O += P V for the V block at the ring's position.
  __device__ __forceinline__ void multiply_pv(float (&o)[kO],
                                              const uint32_t (&probabilities)[kS / 2]) {
    const uint64_t v = descriptor_mn_major(shared_address(shared.v[v_ring.stage]), C.block_n);
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

  // The compiler keeps loop state, and with it the operand descriptors, in uniform registers only
  // as long as it can tell that the whole warp takes the same path.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

  // What steers the warp in a tile.
  struct Course {
    int n_min, n_max;            // as in Tile, empty at the end
    int right_from, left_below;  // blocks n >= right_from and n < left_below need masking
    bool end;
    bool half;  // the first block's later half is masked for the whole warpgroup
  };

  // Waits for the next tile, in the ring's next slot.
  __device__ __forceinline__ Course next_tile() {
    shared.tile_full[slots.stage].wait(slots.parity);
    const Tile &tile = shared.tile[slots.stage];
    const int row_block = uniform(tile.row_block);
    const int seqlen_k = uniform(tile.seqlen_k);
    Course c;
    c.n_min = uniform(tile.n_min);
    c.n_max = uniform(tile.n_max);
    c.end = row_block < 0;
    // The warpgroup's first row sees the fewest keys on the right, its last row the fewest on the
    // left.
    const int rows = kRowsPerWarpgroup >> p.pack_log2;
    const int first = (row_block * C.warpgroups + wg) * rows + seqlen_k - uniform(tile.seqlen_q);
    int whole = seqlen_k;  // keys that every row sees, as far as the right side goes
    if (kMask == Mask::kCausal) whole = min(whole, first + 1);
    if (kMask == Mask::kWindow) whole = min(whole, first + p.window_right + 1);
    c.right_from = whole <= 0 ? 0 : whole / C.block_n;
    c.half = kHalves && first + rows <= (c.n_max - 1) * C.block_n + C.block_n / 2;
    c.left_below = 0;
    if (kMask == Mask::kWindow) {
      const int left = first + rows - 1 - p.window_left;
      c.left_below = left <= 0 ? 0 : ceil_div(left, C.block_n);
    }
    return c;
  }

  // Rows of V past the end of a sequence hold whatever lies behind it, and 0 * NaN is NaN. (Past
  // the end of a whole tensor TMA writes zeros.) All consumers take part, once per tile.
  __device__ __forceinline__ void clear_tail(const Tile &tile, const Course &course) {
    if (p.cu_seqlens_k == nullptr && p.seqlens_k == nullptr && p.block_table == nullptr) return;
    const int rows = uniform(tile.seqlen_k) - (course.n_max - 1) * C.block_n;
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

  template <int N>
  __device__ __forceinline__ void cap_and_mask(float (&s)[N], const Tile &tile, const Course &c,
                                               int n) {
    if (kSoftcap) soft_cap(s, p.softcap_scale);
    if (n >= c.right_from || (kMask == Mask::kWindow && n < c.left_below)) {
      const int position[2] = {packed_row(p, tile, block_m(C), row).position,
                               packed_row(p, tile, block_m(C), row + 8).position};
      const RowLimits limits =
          row_limits<kMask>(position, n * C.block_n + 2 * (threadIdx.x % 4), tile.seqlen_q,
                            tile.seqlen_k, p.window_left, p.window_right);
      apply_mask<kMask>(s, limits);
    }
  }

  __device__ __forceinline__ void write_empty(const Tile &tile) {
    const SoftmaxRows rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    float factor[2];
    finish_rows<C>(p, tile, row, rows, factor);
    copy_output<C, T>(p, tile, kRowsPerWarpgroup * wg, nullptr);
  }

  __device__ __forceinline__ void wait_q(uint32_t (&q)[kQ]) {
    shared.q_full[q_ring.stage][wg].wait(q_ring.parity);
    if constexpr (C.q_registers) {
      const int lane = threadIdx.x % 32;
      const int r = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < kStepsQk; ++i) {
        load_matrix_x4(shared_address(shared.q[q_ring.stage][wg]) +
                           i / 4 * (kRowsPerWarpgroup * 128) +
                           swizzle_128b(r * 128 + i % 4 * 32 + lane / 16 * 16),
                       q + 4 * i);
      }
    }
  }

  // Once O has been read from where a tile's Q was, the next Q may come. The thread that stored O
  // waits for that: at once if it is the only place for Q, else in the next tile.
  __device__ __forceinline__ void free_q() {
    if (q_stored < 0) return;
    if (threadIdx.x % 128 == 0) {
      tma_store_wait_read();
      shared.q_empty[q_stored][wg].arrive();
    }
    q_stored = -1;
  }

  // A tile's first block: its scores have no P V to go with.
  template <int N>
  __device__ __forceinline__ void begin(float (&s)[N], const uint32_t (&q)[kQ], float (&o)[kO],
                                        SoftmaxRows &rows, const Tile &tile, const Course &course) {
    multiply_qk(s, q);
    clear_output(o);
    wgmma_wait<0>();
    trace(13);
    hold(s);
    release_k();
    free_q();
    cap_and_mask(s, tile, course, course.n_max - 1);
    softmax_first(s, rows, p.scale_log2);
  }

  // Each step issues Q K^T of a block together with P V of the block before, and the softmax of the
  // one runs while the other is in flight.
  __device__ __forceinline__ void attend(const Course &course) {
    const Tile &tile = shared.tile[slots.stage];
    float s[kS], o[kO];
    uint32_t probabilities[kS / 2], q[kQ];
    SoftmaxRows rows;
    wait_q(q);
    trace(12);
    k_ring.stage = uniform(k_ring.stage);
    k_ring.parity = uniform(k_ring.parity);
    v_ring.stage = uniform(v_ring.stage);
    v_ring.parity = uniform(v_ring.parity);
    wait_k();
    trace(18);
    if (kHalves && course.half) {
      float first[kHalves ? kS / 2 : kS];
      begin(first, q, o, rows, tile, course);
#pragma unroll
      for (int i = 0; i < kS / 2; ++i) {
        probabilities[i] = i < kS / 4 ? pack<T>(first[2 * i], first[2 * i + 1]) : 0;
      }
    } else {
      begin(s, q, o, rows, tile, course);
      convert(s, probabilities);
    }
    clear_tail(tile, course);

    for (int n = course.n_max - 2; n >= course.n_min; --n) {
      issue(s, q, o, probabilities);
      wgmma_wait<1>();
      trace(6);
      hold(s);
      if (!C.early_exp) release_k();
      cap_and_mask(s, tile, course, n);
      float alpha[2];
      const bool rescale = softmax_step(s, rows, alpha);
      wgmma_wait<0>();
      trace(7);
      hold(o);
      release_v();
      convert(s, probabilities);
      if (rescale) rescale_rows(o, alpha);
    }
    trace(10);

    wait_v();
    multiply_pv(o, probabilities);
    float factor[2];
    finish_rows<C>(p, tile, row, rows, factor);
    wgmma_wait<0>();
    trace(14);
    hold(o);
    release_v();
    rescale_rows(o, factor);
    trace(15);
    T *staging = shared.q[q_ring.stage][wg];
    named_barrier_sync(kBarrierWarpgroup + wg, 128);  // the four warps are done with Q
    store_output<C>(p, tile, wg, o, staging);
    q_stored = q_ring.stage;
    q_ring.advance();
    if (C.q_stages == 1) free_q();
    trace(16);
  }

  __device__ __forceinline__ void run() {
    if (C.take_turns && wg == C.warpgroups - 1) named_barrier_arrive(kBarrierTurn, 256);
    for (;; slots.advance()) {
      const Course course = next_tile();
      if (course.end) break;
      trace(17);
      if (course.n_max > course.n_min) {
        attend(course);
      } else {
        write_empty(shared.tile[slots.stage]);
      }
      release(shared.tile_empty[slots.stage]);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory must outlive its readers
  }

  __device__ __forceinline__ void issue(float (&s)[kS], const uint32_t (&q)[kQ], float (&o)[kO],
                                        const uint32_t (&probabilities)[kS / 2]) {
    trace(1);
    wait_k();
    trace(2);
    wait_turn();
    trace(3);
    multiply_qk(s, q);
    wait_v();
    trace(4);
    multiply_pv(o, probabilities);
    pass_turn();
    trace(5);
  }

  // Softmax of one step. Returns whether O is to be multiplied by alpha.
  __device__ __forceinline__ bool softmax_step(float (&s)[kS], SoftmaxRows &rows,
                                               float (&alpha)[2]) {
    bool rescale;
    if constexpr (C.early_exp) {
      bool grew = raise_reference(s, 0, rows, p.scale_log2, alpha);
      rows.sum[0] *= alpha[0];
      exponentiate_row(s, 0, rows, p.scale_log2);
      grew |= raise_reference(s, 1, rows, p.scale_log2, alpha);
      rows.sum[1] *= alpha[1];
      exponentiate_row(s, 1, rows, p.scale_log2);
      release_k_after(s[kS / 2 + 2]);
      rescale = __any_sync(0xffffffff, grew);
    } else {
      bool grew = raise_reference(s, 0, rows, p.scale_log2, alpha);
      grew |= raise_reference(s, 1, rows, p.scale_log2, alpha);
      rescale = __any_sync(0xffffffff, grew);
      if (rescale) {
        rows.sum[0] *= alpha[0];
        rows.sum[1] *= alpha[1];
      }
      exponentiate_row(s, 0, rows, p.scale_log2);
      exponentiate_row(s, 1, rows, p.scale_log2);
    }
    return rescale;
  }

  // ptxas moves the wait for P V up, past the exponentials that are there to hide it, but not past
  // the release of K. So this is put among them, its address taking a bit of no effect from one.
  __device__ __forceinline__ void release_k_after(float x) {
    const uint32_t none = __float_as_uint(x) & p.zero;
    release((&shared.k_empty[k_ring.stage])[none]);
    k_ring.advance();
  }

  __device__ __forceinline__ void clear_output(float (&o)[kO]) {
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
    hold(o);  // or ptxas keeps a second copy of O
  }
};

}  // namespace unsloth
