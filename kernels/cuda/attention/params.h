/* The argument of every attention forward kernel, passed by value as a __grid_constant__.
 * Shared with the host: plain C, fixed widths, no padding but what is named. */
#ifndef UNSLOTH_KERNELS_ATTENTION_PARAMS_H
#define UNSLOTH_KERNELS_ATTENTION_PARAMS_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

typedef struct AttentionForwardParams {
  /* Tensor maps, 128-byte swizzle, 64 elements wide.
   * q and o: (dim, packed heads, sequence, heads, batch), box (64, pack, 64 / pack, 1, 1), where
   *   pack = 1 << pack_log2 query heads of one key head share a tile ("packed GQA").
   * k and v: (dim, sequence, heads, batch), box (64, kv_box_rows, 1, 1); paged: (dim, row in page,
   *   heads, page).
   * Variable length: one batch of all tokens. */
  CUtensorMap q, k, v, o;

  void *o_pointer;                  /* 16-byte aligned rows, as are the strides below */
  float *lse;                       /* [batch, heads, seqlen_q] or [heads, tokens]; may be null */
  const float *sinks;               /* [heads]: a logit beside each row's scores; may be null */
  const int32_t *cu_seqlens_q;      /* [batch + 1], or null: every sequence has seqlen_q */
  const int32_t *cu_seqlens_k;      /* [batch + 1], or null */
  const int32_t *seqlens_k;         /* [batch]: keys in use, or null */
  const int32_t *block_table;       /* [batch, block_table_stride]: pages of K and V, or null */
  unsigned long long *tile_counter; /* two words, aligned to 16 bytes, of any contents; null: no
                                       more tiles than blocks */
  uint64_t launch_tag;              /* which no other launch of the process has, and not zero */

  int64_t o_batch_stride, o_sequence_stride, o_head_stride; /* elements */
  int64_t lse_batch_stride, lse_head_stride, lse_sequence_stride;

  int32_t batch, heads_q, heads_kv, head_dim_v;
  int32_t seqlen_q, seqlen_k; /* variable length: the longest */
  int32_t pack_log2;
  int32_t kv_box_rows;
  int32_t page_log2, block_table_stride; /* pages have 1 << page_log2 tokens */
  int32_t window_left, window_right; /* keys seen before and after the diagonal; 2^30: no limit */
  int32_t ragged;      /* 1 if any of cu_seqlens_q, cu_seqlens_k and seqlens_k is given */
  int32_t tiles;       /* work items; ragged: at most */
  int32_t row_blocks;  /* query blocks per sequence and head */
  int32_t pairs_in_l2; /* pairs scheduled together, longest first; 0: pair by pair */
  int32_t keys_in_l2;  /* ragged: instead, keys of one head that L2 has room for */
  float scale_log2;    /* log2(e) times what a score is multiplied by (the cap, with a soft cap) */
  float softcap_scale; /* scale / cap */
  uint32_t zero;       /* 0, which the compiler does not know */
} AttentionForwardParams;

/* Where the host must put each field, in order, after the size of the whole. Every image exports it
 * as attention_forward_layout. */
#define UNSLOTH_AT(field) ((uint32_t)offsetof(AttentionForwardParams, field))
#define UNSLOTH_ATTENTION_FORWARD_LAYOUT \
  {                                      \
      sizeof(AttentionForwardParams),    \
      UNSLOTH_AT(q),                     \
      UNSLOTH_AT(k),                     \
      UNSLOTH_AT(v),                     \
      UNSLOTH_AT(o),                     \
      UNSLOTH_AT(o_pointer),             \
      UNSLOTH_AT(lse),                   \
      UNSLOTH_AT(sinks),                 \
      UNSLOTH_AT(cu_seqlens_q),          \
      UNSLOTH_AT(cu_seqlens_k),          \
      UNSLOTH_AT(seqlens_k),             \
      UNSLOTH_AT(block_table),           \
      UNSLOTH_AT(tile_counter),          \
      UNSLOTH_AT(launch_tag),            \
      UNSLOTH_AT(o_batch_stride),        \
      UNSLOTH_AT(o_sequence_stride),     \
      UNSLOTH_AT(o_head_stride),         \
      UNSLOTH_AT(lse_batch_stride),      \
      UNSLOTH_AT(lse_head_stride),       \
      UNSLOTH_AT(lse_sequence_stride),   \
      UNSLOTH_AT(batch),                 \
      UNSLOTH_AT(heads_q),               \
      UNSLOTH_AT(heads_kv),              \
      UNSLOTH_AT(head_dim_v),            \
      UNSLOTH_AT(seqlen_q),              \
      UNSLOTH_AT(seqlen_k),              \
      UNSLOTH_AT(pack_log2),             \
      UNSLOTH_AT(kv_box_rows),           \
      UNSLOTH_AT(page_log2),             \
      UNSLOTH_AT(block_table_stride),    \
      UNSLOTH_AT(window_left),           \
      UNSLOTH_AT(window_right),          \
      UNSLOTH_AT(ragged),                \
      UNSLOTH_AT(tiles),                 \
      UNSLOTH_AT(row_blocks),            \
      UNSLOTH_AT(pairs_in_l2),           \
      UNSLOTH_AT(keys_in_l2),            \
      UNSLOTH_AT(scale_log2),            \
      UNSLOTH_AT(softcap_scale),         \
      UNSLOTH_AT(zero),                  \
  }

/* What the host must know of a kernel to choose and launch it; each kernel exports one as
 * NAME_launch. */
typedef struct AttentionForwardLaunch {
  int32_t dtype;                /* UNSLOTH_DTYPE_* of include/unsloth.h */
  int32_t head_dim, head_dim_v; /* the largest served */
  int32_t mask;                 /* 0 none, 1 causal, 2 window */
  int32_t softcap;
  int32_t for_short;        /* 1 if a sibling is better for long sequences */
  int32_t block_m, block_n; /* query rows and keys per tile */
  int32_t threads, shared_bytes;
} AttentionForwardLaunch;

#endif
