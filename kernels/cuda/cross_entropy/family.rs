//! Cross-entropy with its gradient on Hopper: what its kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "cross_entropy_ring",
    directory: "cross_entropy",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float"),
        ("blocks", "of a cluster, which share a token"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("void"),
        "logits",
        "rows are aligned to 16 bytes, as are those of dlogits",
    ),
    field(Type::Pointer("const void"), "targets", ""),
    field(Type::Pointer("void"), "dlogits", "may be logits"),
    field(Type::Pointer("float"), "losses", "[tokens]; may be null"),
    field(Type::Pointer("float"), "lses", "[tokens]; may be null"),
    field(Type::Pointer("const float"), "dloss", "may be null"),
    field(Type::Pointer("const float"), "denominator", "may be null"),
    field(
        Type::Pointer("unsigned long long"),
        "counter",
        "two words, aligned to 16 bytes, of any contents; null: no more tokens than blocks, or pairs of them",
    ),
    field(
        Type::U64,
        "launch_tag",
        "which no other launch of the process has, and not zero",
    ),
    field(Type::I64, "ignore_index", ""),
    field(Type::I64, "logits_0", "bytes, as all strides"),
    field(Type::I64, "logits_1", ""),
    field(Type::I64, "logits_2", ""),
    field(Type::I64, "dlogits_0", ""),
    field(Type::I64, "dlogits_1", ""),
    field(Type::I64, "dlogits_2", ""),
    field(Type::I64, "targets_0", ""),
    field(Type::I64, "targets_1", ""),
    field(Type::I64, "targets_2", ""),
    field(Type::U32, "tokens", "below 2^31"),
    field(Type::U32, "length", "of a row, in vectors of 16 bytes"),
    field(Type::U32, "wide_targets", "1: of 64 bits"),
    field(
        Type::U32,
        "size_1",
        "of the row dimensions behind the first",
    ),
    field(Type::U32, "size_1_multiplier", ""),
    field(Type::U32, "size_1_shift", ""),
    field(Type::U32, "size_2", ""),
    field(Type::U32, "size_2_multiplier", ""),
    field(Type::U32, "size_2_shift", ""),
    field(Type::F32, "label_smoothing", ""),
    field(Type::F32, "spread", "label_smoothing / columns"),
    field(Type::F32, "z_loss", ""),
];
