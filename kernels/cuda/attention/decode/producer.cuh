// The producer: a warp that finds the block's work, and keeps K and V coming. It runs ahead of the
// warps that compute as far as the ring allows, so memory has work while they finish a pair.
#pragma once

#include "common/tma.cuh"
#include "schedule.cuh"

namespace unsloth {

template <DecodeConfig C, class T>
class Producer {
 public:
  __device__ __forceinline__ Producer(const AttentionDecodingArguments &p, Shared<C, T> &shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32), box_log2_(__ffs(p.kv_box_rows) - 1) {}

  __device__ __forceinline__ void run() {
    Walk<C> walk(p_, shared_);
    Item item;
    int k_begin;
    Ring<kItems> slot;
    for (; walk.next(item, k_begin); slot.advance()) {
      // Asked for before all else, as keys wait for it.
      const int page = is_paged() ? page_of_box(item, first_box(item) + lane_) : 0;
      load(item, k_begin, page, slot);
    }
    item.rows = -1;
    publish(item, slot);
  }

 private:
  // Hands a piece of work to the others, with its queries.
  __device__ __forceinline__ void publish(const Item &item, const Ring<kItems> &slot) {
    Mbarrier *full = &shared_.item_full[slot.stage];
    shared_.item_empty[slot.stage].wait(slot.parity ^ 1);
    if (lane_ == 0) {
      shared_.item[slot.stage] = item;
      full->arrive_expect(max(item.rows, 0) * C.heads * C.head_dim * 2);
    }
    __syncwarp();
    for (int i = lane_; i < item.rows * C.heads; i += 32) {
      const int which = i / item.rows, row_of_head = i - which * item.rows;
      const int token = row_of_head / p_.group;
      const int head = (item.head + which) * p_.group + row_of_head - token * p_.group;
      const T *row = static_cast<const T *>(p_.q) +
                     (p_.cu_seqlens_q != nullptr ? 0 : item.batch) * p_.q_batch_stride +
                     (item.q_begin + token) * p_.q_sequence_stride + head * p_.q_head_stride;
      bulk_load_by_thread(shared_address(shared_.q[slot.stage][which][row_of_head]), row,
                          C.head_dim * 2, full);
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool is_paged() const { return p_.block_table != nullptr; }

  // Tiles come in boxes of rows, each from one page.
  __device__ __forceinline__ int first_box(const Item &item) const {
    return item.tile_begin * C.tile >> box_log2_;
  }

  // Boxes that nobody sees are left out: their pages may not exist.
  __device__ __forceinline__ int page_of_box(const Item &item, int index) const {
    const int box = p_.kv_box_rows, key = index << box_log2_;
    const bool is_there = key < min(item.tile_end * C.tile, item.k) && key + box > item.first;
    const int64_t table = item.batch * static_cast<int64_t>(p_.block_table_stride);
    return is_there ? p_.block_table[table + (key >> p_.page_log2)] : 0;
  }

  // Lanes have the pages of 32 boxes, of which the first 32 are given, and look up the next 32
  // meanwhile. The piece of work is handed on once its first keys are on their way: finding its
  // queries takes a while.
  __device__ __forceinline__ void load(const Item &item, int k_begin, int page,
                                       const Ring<kItems> &slot) {
    const bool keys_first = reads_long_pieces(C) || !is_paged();
    if (!keys_first || item.tile_begin == item.tile_end) publish(item, slot);
    const int box = p_.kv_box_rows;
    const int outer = p_.cu_seqlens_k != nullptr ? 0 : item.batch;
    int boxes = first_box(item), next_page = 0;
    if (is_paged()) next_page = page_of_box(item, boxes + 32 + lane_);
#pragma unroll 1
    for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
      const int key = tile * C.tile;
      const int begin = max(item.first - key, 0) & -box;
      const int end = (min(C.tile, item.k - key) + box - 1) & -box;
      if (key >> box_log2_ == boxes + 32) {
        boxes += 32;
        page = next_page;
        if (is_paged()) next_page = page_of_box(item, boxes + 32 + lane_);
      }
#pragma unroll
      for (int is_v = 0; is_v < 2; ++is_v) {
        shared_.empty[at_.stage].wait(at_.parity ^ 1);
        const int stage = uniform(at_.stage);
        Mbarrier *full = &shared_.full[stage];
        if (lane_ == 0) full->arrive_expect((end - begin) * C.heads * row_bytes(C));
        __syncwarp();
        const uint32_t to = shared_address(shared_.ring[stage]);
#pragma unroll 1
        for (int row = begin; row < end; row += box) {
          int from = outer, at_row = k_begin + key + row;
          if (is_paged()) {
            from = __shfl_sync(0xffffffff, page, ((key + row) >> box_log2_) - boxes);
            at_row = (key + row) & ((1 << p_.page_log2) - 1);
          }
          tma_load_5d(to + row * C.heads * row_bytes(C), is_v ? &p_.v : &p_.k, full,
                      reads_long_pieces(C) ? kEvictFirst : kEvictNormal, 0, at_row, 0, item.head,
                      from);
        }
        at_.advance();
        if (is_v == 0 && tile == item.tile_begin && keys_first) publish(item, slot);
      }
    }
  }

  const AttentionDecodingArguments &p_;
  Shared<C, T> &shared_;
  const int lane_, box_log2_;
  Ring<C.entries> at_;
};

}  // namespace unsloth
