/* The argument of every attention forward kernel, passed by value as a __grid_constant__.
 * Shared with the host: plain C, fixed widths, no padding but what is named. */
#ifndef UNSLOTH_KERNELS_ATTENTION_PARAMS_H
#define UNSLOTH_KERNELS_ATTENTION_PARAMS_H

#include <cuda.h>
#include <stdint.h>

typedef struct AttentionForwardParams {
  /* Tensor maps, 128-byte swizzle, 64 elements wide.
   * q and o: (dim, packed heads, sequence, heads, batch), box (64, pack, 64 / pack, 1, 1), where
   *   pack = 1 << pack_log2 query heads of one key head share a tile ("packed GQA").
   * k and v: (dim, sequence, heads, batch), box (64, kv_box_rows, 1, 1); paged: (dim, row in page,
   *   heads, page).
   * Variable length: one batch of all tokens. */
  CUtensorMap q, k, v, o;

  void *o_pointer;             /* 16-byte aligned rows, as are the strides below */
  float *lse;                  /* [batch, heads, seqlen_q] or [heads, tokens]; may be null */
  const float *sinks;          /* [heads]: a logit beside each row's scores; may be null */
  const int32_t *cu_seqlens_q; /* [batch + 1], or null: every sequence has seqlen_q */
  const int32_t *cu_seqlens_k; /* [batch + 1], or null */
  const int32_t *seqlens_k;    /* [batch]: keys in use, or null */
  const int32_t *block_table;  /* [batch, block_table_stride]: pages of K and V, or null */
  uint32_t *tile_counter;      /* zero between launches; null: tiles are dealt out in turn */

  int64_t o_batch_stride, o_sequence_stride, o_head_stride; /* elements */
  int64_t lse_batch_stride, lse_head_stride;

  int32_t batch, heads_q, heads_kv, head_dim_v;
  int32_t seqlen_q, seqlen_k; /* variable length: the longest */
  int32_t pack_log2;
  int32_t kv_box_rows;
  int32_t page_size, block_table_stride;
  int32_t window_left, window_right; /* keys seen before and after the diagonal; 2^30: no limit */
  int32_t tiles, row_blocks;         /* work items, and query blocks per (batch, head) pair */
  int32_t pairs_in_l2;               /* pairs scheduled together, longest first; 0: pair by pair */
  float scale_log2;    /* log2(e) times what a score is multiplied by (the cap, with a soft cap) */
  float softcap_scale; /* scale / cap */
  uint32_t zero;       /* 0, which the compiler does not know */
  float scale;         /* natural units, for the log-sum-exp: scale_log2 / log2(e) */
} AttentionForwardParams;

/* What the host must know of a kernel to launch it; each kernel exports one as NAME_launch. */
typedef struct AttentionForwardLaunch {
  int32_t params_bytes;
  int32_t block_m, block_n; /* query rows and keys per tile */
  int32_t threads, shared_bytes;
  int32_t head_dim, head_dim_v; /* the largest served */
} AttentionForwardLaunch;

#endif
