//! Few rows added up over ranks and normalised: what the kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "all_reduce_rms_norm",
    directory: "all_reduce_rms_norm",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float: of x"),
        ("ranks", "at most"),
        ("lines", "of a row, at most"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const void"),
        "x",
        "contiguous rows, as all tensors have them",
    ),
    field(
        Type::Pointer("const void"),
        "residual",
        "may be null; may be residual_out",
    ),
    field(Type::Pointer("const void"), "weight", "gains; may be null"),
    field(Type::Pointer("void"), "out", "may be x"),
    field(
        Type::Pointer("void"),
        "residual_out",
        "what is normalised; may be null",
    ),
    field(
        Type::Pointer("void"),
        "slots_0",
        "those of rank 0, where this device reaches them",
    ),
    field(Type::Pointer("void"), "slots_1", ""),
    field(Type::Pointer("void"), "slots_2", ""),
    field(Type::Pointer("void"), "slots_3", ""),
    field(Type::Pointer("void"), "slots_4", ""),
    field(Type::Pointer("void"), "slots_5", ""),
    field(Type::Pointer("void"), "slots_6", ""),
    field(Type::Pointer("void"), "slots_7", ""),
    field(
        Type::Pointer("void"),
        "own_slots",
        "this rank's, where it reads them",
    ),
    field(
        Type::Pointer("uint32_t"),
        "calls",
        "how often each block has run: its flag, which grows by one",
    ),
    field(
        Type::Pointer("const uint32_t"),
        "aborted",
        "of the host: other than 0 when nobody waits any more",
    ),
    field(Type::U32, "rank", ""),
    field(Type::U32, "ranks", "at most 8"),
    field(Type::U32, "row_lines", "lines of a row"),
    field(
        Type::U32,
        "aligned",
        "1: what a thread has of each tensor lies at a multiple of its bytes",
    ),
    field(Type::U32, "weight_dtype", "a contract's Float"),
    field(Type::F32, "weight_offset", ""),
    field(Type::F32, "epsilon", ""),
];
