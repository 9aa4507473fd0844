//! Attention on Hopper, f16 and bf16: what its kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "attention_forward",
    directory: "attention/forward",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float"),
        ("head_dim", "the largest served"),
        ("head_dim_v", "the largest served"),
        ("mask", "a contract's Mask"),
        ("softcap", "whether scores are capped"),
        ("for_short", "1 if a sibling is better for long sequences"),
        ("block_m", "query rows per tile"),
        ("block_n", "keys per tile"),
    ],
};

/// Tensor maps have a 128-byte swizzle and are 64 elements wide. q and o: (dim, packed heads, sequence, heads, batch), box (64, pack,
/// 64 / pack, 1, 1), where pack = 1 << pack_log2 query heads of one key head share a tile ("packed GQA"). k and v: (dim, sequence,
/// heads, batch), box (64, kv_box_rows, 1, 1); paged: (dim, row in page, heads, page). Variable length: one batch of all tokens.
const ARGUMENTS: &[Field] = &[
    field(Type::TensorMap, "q", ""),
    field(Type::TensorMap, "k", ""),
    field(Type::TensorMap, "v", ""),
    field(Type::TensorMap, "o", ""),
    field(
        Type::Pointer("void"),
        "o_pointer",
        "16-byte aligned rows, as are the strides below",
    ),
    field(
        Type::Pointer("float"),
        "lse",
        "[batch, heads, seqlen_q] or [heads, tokens]; may be null",
    ),
    field(
        Type::Pointer("const float"),
        "sinks",
        "[heads]: a logit beside each row's scores; may be null",
    ),
    field(
        Type::Pointer("const int32_t"),
        "cu_seqlens_q",
        "[batch + 1], or null: every sequence has seqlen_q",
    ),
    field(
        Type::Pointer("const int32_t"),
        "cu_seqlens_k",
        "[batch + 1], or null",
    ),
    field(
        Type::Pointer("const int32_t"),
        "seqlens_k",
        "[batch]: keys in use, or null",
    ),
    field(
        Type::Pointer("const int32_t"),
        "block_table",
        "[batch, block_table_stride]: pages of K and V, or null",
    ),
    field(
        Type::Pointer("unsigned long long"),
        "tile_counter",
        "two words, aligned to 16 bytes, of any contents; null: no more tiles than blocks",
    ),
    field(
        Type::U64,
        "launch_tag",
        "which no other launch of the process has, and not zero",
    ),
    field(Type::I64, "o_batch_stride", "elements, as all strides"),
    field(Type::I64, "o_sequence_stride", ""),
    field(Type::I64, "o_head_stride", ""),
    field(Type::I64, "lse_batch_stride", ""),
    field(Type::I64, "lse_head_stride", ""),
    field(Type::I64, "lse_sequence_stride", ""),
    field(Type::I32, "batch", ""),
    field(Type::I32, "heads_q", ""),
    field(Type::I32, "heads_kv", ""),
    field(Type::I32, "head_dim_v", ""),
    field(Type::I32, "seqlen_q", "variable length: the longest"),
    field(Type::I32, "seqlen_k", "variable length: the longest"),
    field(Type::I32, "pack_log2", ""),
    field(Type::I32, "kv_box_rows", ""),
    field(Type::I32, "page_log2", "pages have 1 << page_log2 tokens"),
    field(Type::I32, "block_table_stride", ""),
    field(
        Type::I32,
        "window_left",
        "keys seen before the diagonal, kNoLimit at most",
    ),
    field(
        Type::I32,
        "window_right",
        "keys seen after the diagonal, kNoLimit at most",
    ),
    field(
        Type::I32,
        "ragged",
        "1 if any of cu_seqlens_q, cu_seqlens_k and seqlens_k is given",
    ),
    field(Type::I32, "tiles", "work items; ragged: at most"),
    field(
        Type::I32,
        "row_blocks",
        "query blocks per sequence and head",
    ),
    field(
        Type::I32,
        "q_begin",
        "the first row of the queries, behind those of another chunk",
    ),
    field(
        Type::I32,
        "chunk_from",
        "the first work item of another chunk of queries, which are the first rows; `tiles` without one",
    ),
    field(Type::I32, "chunk_seqlen_q", "its length"),
    field(Type::I32, "chunk_seqlen_k", "how many of the keys it sees"),
    field(Type::I32, "chunk_row_blocks", "its query blocks"),
    field(
        Type::I32,
        "pairs_in_l2",
        "pairs scheduled together, longest first; 0: pair by pair",
    ),
    field(
        Type::I32,
        "keys_in_l2",
        "ragged: instead, keys of one head that L2 has room for",
    ),
    field(
        Type::F32,
        "scale_log2",
        "log2(e) times what a score is multiplied by (the cap, with a soft cap)",
    ),
    field(Type::F32, "softcap_scale", "scale / cap"),
    field(Type::U32, "zero", "0, which the compiler does not know"),
];
