//! Parts of a sum that lie behind each other, added up and normalised: what the kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "sum_rms_norm",
    directory: "sum_rms_norm",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float: of all tensors but the gains"),
        ("vectors", "16 bytes each: of a row, at most"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const uint4"),
        "parts",
        "contiguous rows of the first part, then those of the next one; may have out among them",
    ),
    field(
        Type::Pointer("const void"),
        "residual",
        "contiguous rows; may be null; may be residual_out",
    ),
    field(Type::Pointer("const void"), "weight", "gains"),
    field(
        Type::Pointer("uint4"),
        "out",
        "contiguous rows; may be one of the parts",
    ),
    field(
        Type::Pointer("void"),
        "residual_out",
        "contiguous rows of what is normalised; may be null",
    ),
    field(Type::U64, "part_vectors", "of a part's rows, 16 bytes each"),
    field(Type::U32, "num_parts", ""),
    field(Type::U32, "row_vectors", "of a row, 16 bytes each"),
    field(
        Type::U32,
        "aligned",
        "1: residual and residual_out lie at a multiple of 16 bytes",
    ),
    field(
        Type::U32,
        "weight_dtype",
        "a contract's Float; 0 without gains",
    ),
    field(Type::F32, "weight_offset", ""),
    field(Type::F32, "epsilon", ""),
];
