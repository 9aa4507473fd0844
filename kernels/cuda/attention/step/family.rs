//! One new token of each sequence on Hopper, f16 and bf16: it is rotated, put into the cache, and attends to what is there. Or,
//! without `append`, one query of each attends to keys that are all there.
//! What the kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "attention_step",
    directory: "attention/step",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float: of all tensors"),
        ("head_dim", "of q, k, v and o"),
        ("rows", "query heads of a key head, at most"),
        ("keys", "that a warp has at a time"),
        ("slot_bytes", "of shared memory for these, of all warps"),
        ("own_bytes", "of shared memory for all else"),
    ],
};

/// A cluster of `parts` blocks has a sequence and a key head. With `append`, block table, lengths and positions, and what the pages held
/// before, are read before the kernel waits for the one before it: no kernel writes them that may still run then.
const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const void"),
        "q",
        "[batch, heads, head_dim] before the rotation, as k",
    ),
    field(
        Type::Pointer("const void"),
        "k",
        "[batch, heads_kv, head_dim]",
    ),
    field(Type::Pointer("const void"), "v", "the same"),
    field(Type::Pointer("void"), "o", "as q"),
    field(
        Type::Pointer("void"),
        "lse",
        "[batch, heads] f32, or NULL: of scaled scores, the natural logarithm of the sum of their exponentials",
    ),
    field(
        Type::Pointer("void"),
        "k_pages",
        "rows are aligned to 16 bytes",
    ),
    field(Type::Pointer("void"), "v_pages", "the same"),
    field(
        Type::Pointer("const int32_t"),
        "seqlens",
        "[batch]: with the new token; or NULL where all have `keys`",
    ),
    field(
        Type::Pointer("const int32_t"),
        "block_table",
        "[batch, block_table_stride]; or NULL where a sequence is a page",
    ),
    field(
        Type::Pointer("const int32_t"),
        "positions",
        "[batch]: where the new tokens stand",
    ),
    field(Type::Pointer("const float"), "factors", ""),
    field(Type::Pointer("const float"), "cos_table", ""),
    field(Type::Pointer("const float"), "sin_table", ""),
    field(Type::U64, "q_token", "elements, as all strides"),
    field(Type::U64, "q_head", ""),
    field(Type::U64, "k_token", ""),
    field(Type::U64, "k_head", ""),
    field(Type::U64, "v_token", ""),
    field(Type::U64, "v_head", ""),
    field(Type::U64, "o_token", ""),
    field(Type::U64, "o_head", ""),
    field(Type::U64, "lse_token", ""),
    field(Type::U64, "lse_head", ""),
    field(Type::U64, "k_page", ""),
    field(Type::U64, "k_slot", ""),
    field(Type::U64, "k_page_head", ""),
    field(Type::U64, "v_page", ""),
    field(Type::U64, "v_slot", ""),
    field(Type::U64, "v_page_head", ""),
    field(Type::U64, "block_table_stride", ""),
    field(Type::U64, "table_rows", ""),
    field(Type::U64, "cos_stride", ""),
    field(Type::U64, "sin_stride", ""),
    field(Type::U32, "group", "query heads of a key head"),
    field(
        Type::U32,
        "parts",
        "1, 2, 4 or 8: blocks of a cluster, which is along x",
    ),
    field(Type::U32, "slots", "1 to 3: of a warp's ring"),
    field(Type::U32, "keys", "of a sequence, at most"),
    field(
        Type::U32,
        "append",
        "1: the last token is new, `k` and `v`, and in no page",
    ),
    field(Type::U32, "page_log2", "pages have 1 << page_log2 tokens"),
    field(
        Type::U32,
        "interleaved",
        "whether neighbours are a pair, and not components of two halves",
    ),
    field(Type::U32, "pairs", "that turn"),
    field(Type::U32, "angle_kind", "a contract's Angles"),
    field(Type::F32, "scale", "of cosines and sines"),
    field(Type::F32, "direction", "1"),
    field(
        Type::F32,
        "score_scale_log2",
        "log2(e) times what a score is multiplied by",
    ),
    field(Type::Floats(64), "frequencies", "of pairs"),
];
