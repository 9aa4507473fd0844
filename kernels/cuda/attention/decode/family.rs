//! Attention of few queries on Hopper, f16 and bf16, and of codes of 8-bit floats: what its kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "attention_decoding",
    directory: "attention/decode",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "of q and o, a contract's Float"),
        ("codes", "whether k and v are codes of 8-bit floats (e4m3)"),
        ("head_dim", "of q, k, v and o"),
        (
            "heads",
            "of keys that are read together, and lie side by side",
        ),
        ("tile", "keys of a step, of which blocks have whole ones"),
        ("blocks", "on a multiprocessor, at most"),
    ],
};

/// Tensor maps have a 128-byte swizzle (of heads of 64 codes, a 64-byte one) and are of the columns that it spans: (columns, sequence, spans
/// of a row, heads, batch); paged: (columns, row in page, spans, heads, page). Their boxes are whole rows, `kv_box_rows` of each of as many
/// heads as are read together. Variable length: one batch of all tokens.
///
/// The rows of a key head are a sequence's queries times the `group` heads of each, 16 at most.
const ARGUMENTS: &[Field] = &[
    field(Type::TensorMap, "k", ""),
    field(Type::TensorMap, "v", ""),
    field(
        Type::Pointer("const void"),
        "q",
        "16-byte aligned rows, as are its strides",
    ),
    field(Type::Pointer("void"), "o", "the same"),
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
        "counters",
        "[blocks, 2], aligned to 16 bytes, of any contents; this and the next two only where pairs may have several parts",
    ),
    field(
        Type::Pointer("float"),
        "partial",
        "[blocks, 2, heads, rows, head_dim]: sums of parts",
    ),
    field(
        Type::Pointer("float2"),
        "partial_sums",
        "[blocks, 2, heads, rows]: what they are relative to, and sums of exponentials",
    ),
    field(
        Type::Pointer("const float"),
        "k_scale",
        "what codes of K are multiplied by; may be null",
    ),
    field(Type::Pointer("const float"), "v_scale", "the same of V"),
    field(
        Type::U64,
        "launch_tag",
        "which no other launch of the process has, and not zero",
    ),
    field(Type::I64, "q_batch_stride", "elements, as all strides"),
    field(Type::I64, "q_sequence_stride", ""),
    field(Type::I64, "q_head_stride", ""),
    field(Type::I64, "o_batch_stride", ""),
    field(Type::I64, "o_sequence_stride", ""),
    field(Type::I64, "o_head_stride", ""),
    field(Type::I64, "lse_batch_stride", ""),
    field(Type::I64, "lse_head_stride", ""),
    field(Type::I64, "lse_sequence_stride", ""),
    field(Type::I32, "batch", ""),
    field(Type::I32, "heads_kv", ""),
    field(Type::I32, "group", "query heads of a key head"),
    field(Type::I32, "rows", "of a key head, at most"),
    field(Type::I32, "seqlen_q", "variable length: the longest"),
    field(Type::I32, "seqlen_k", "variable length: the longest"),
    field(
        Type::I32,
        "kv_box_rows",
        "a power of two from 16 to a tile, and of pages",
    ),
    field(Type::I32, "page_log2", "pages have 1 << page_log2 tokens"),
    field(Type::I32, "block_table_stride", ""),
    field(
        Type::I32,
        "k_scale_head",
        "distance of the scales of two key heads, or 0",
    ),
    field(Type::I32, "v_scale_head", ""),
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
        "least_tiles",
        "of a block that has any of the row, but for the last",
    ),
    field(
        Type::I32,
        "more_tiles",
        "that a block may have beyond its equal share, if pairs are then not cut, or into parts as long",
    ),
    field(
        Type::F32,
        "scale_log2",
        "log2(e) times what a score is multiplied by (the cap, with a soft cap)",
    ),
    field(Type::F32, "softcap_scale", "scale / cap, or 0"),
];
