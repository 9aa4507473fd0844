//! Rounding to codes of 8 or 2 bits: what the kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "quantize",
    directory: "quantize",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("kind", "a contract's quantize Kind"),
        ("dtype", "a contract's Float: of x; 0 where x is not read"),
        (
            "codes",
            "a contract's quantize Codes; 0 where none are made",
        ),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(Type::Pointer("const void"), "x", ""),
    field(Type::Pointer("uint8_t"), "out", ""),
    field(
        Type::Pointer("float"),
        "scale",
        "of each group, or the one that all share",
    ),
    field(
        Type::Pointer("int32_t"),
        "sum",
        "of each group; may be null",
    ),
    field(
        Type::Pointer("float2"),
        "rows_found",
        "in the workspace: what each row adds to the scale of all",
    ),
    field(
        Type::Pointer("float2"),
        "shared",
        "in the workspace: the scale of all and the threshold; null where groups have theirs",
    ),
    field(Type::I64, "x_0", "bytes, as all strides"),
    field(Type::I64, "x_1", ""),
    field(Type::I64, "x_2", ""),
    field(Type::I64, "out_0", ""),
    field(Type::I64, "out_1", ""),
    field(Type::I64, "out_2", ""),
    field(Type::U64, "num_elements", "of x"),
    field(Type::U32, "num_rows", "of this launch"),
    field(Type::U32, "first_row", "of this launch, among all"),
    field(Type::U32, "groups", "of a row"),
    field(Type::U32, "length", "of a group, in elements"),
    field(
        Type::U32,
        "padded",
        "of a group's codes of 8 bits, with the zeros behind them",
    ),
    field(Type::U32, "rule", "a contract's quantize Rule"),
    field(
        Type::U32,
        "second",
        "1: only magnitudes above the threshold, which there is already",
    ),
    field(
        Type::U32,
        "vectors",
        "1: groups of x are vectors of 16 bytes, and those of codes as many codes",
    ),
    field(
        Type::U32,
        "warps",
        "that share a group: one, or all of a block; of one that is held 1, 2, 4 or 8",
    ),
    field(
        Type::U32,
        "held",
        "1: codes of 8 bits by the greatest magnitude, of groups that their threads can hold",
    ),
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
];
