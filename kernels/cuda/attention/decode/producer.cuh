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
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    Walk<C> walk(p_, shared_);
    Item item;
    int k_begin;
    Ring<kItems> slot;
    for (; walk.next(item, k_begin); slot.advance()) {
      publish(item, slot);
      load(item, k_begin);
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

  // Tiles come in boxes of rows, each from one page. Lane i looks up the page of box i, a tile
  // ahead. Boxes that nobody sees are left out: their pages may not exist.
  __device__ __forceinline__ void load(const Item &item, int k_begin) {
    const bool is_paged = p_.block_table != nullptr;
    const int box = p_.kv_box_rows;
    const int box_log2 = __ffs(box) - 1;  // of pages
    const int outer = p_.cu_seqlens_k != nullptr ? 0 : item.batch;
    const int64_t table = item.batch * static_cast<int64_t>(p_.block_table_stride);
    const auto page_of_box = [&](int tile) {
      const int key = tile * C.tile + lane_ * box;
      const bool there =
          lane_ * box < C.tile && tile < item.tile_end && key < item.k && key + box > item.first;
      return there ? p_.block_table[table + (key >> p_.page_log2)] : 0;
    };
    int page = is_paged ? page_of_box(item.tile_begin) : 0;
#pragma unroll 1
    for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
      const int next_page = is_paged ? page_of_box(tile + 1) : 0;
      const int key = tile * C.tile;
      const int begin = max(item.first - key, 0) / box * box;
      const int end = ceil_div(min(C.tile, item.k - key), box) * box;
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
          const int from = is_paged ? __shfl_sync(0xffffffff, page, row >> box_log2) : outer;
          const int at_row =
              is_paged ? (key + row) & ((1 << p_.page_log2) - 1) : k_begin + key + row;
          tma_load_5d(to + row * C.heads * row_bytes(C), is_v ? &p_.v : &p_.k, full,
                      C.once ? kEvictFirst : kEvictNormal, 0, at_row, 0, item.head, from);
        }
        at_.advance();
      }
      page = next_page;
    }
  }

  const AttentionDecodingArguments &p_;
  Shared<C, T> &shared_;
  const int lane_;
  Ring<C.entries> at_;
};

}  // namespace unsloth
