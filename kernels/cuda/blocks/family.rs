//! Rows of weights in blocks, decoded: what the kernels are told, and what tells them apart.
//!
//! An embedding gathers them by ids; products of many rows have all of a matrix decoded.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "blocks_rows",
    directory: "blocks",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("format", "a contract's Blocks"),
        ("dtype", "a contract's Float"),
        ("per_block", "weights"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(Type::Pointer("const uint8_t"), "table", "at any address"),
    field(
        Type::Pointer("const void"),
        "ids",
        "null: rows in their order",
    ),
    field(Type::Pointer("void"), "out", ""),
    field(Type::U64, "rows", "of the table"),
    field(
        Type::U64,
        "begin",
        "the row of the vocabulary that its first is",
    ),
    field(Type::U64, "vocab", "rows of the vocabulary"),
    field(Type::I64, "table_stride", "bytes, as all strides"),
    field(Type::I64, "ids_0", ""),
    field(Type::I64, "ids_1", ""),
    field(Type::I64, "ids_2", ""),
    field(Type::I64, "out_0", ""),
    field(Type::I64, "out_1", ""),
    field(Type::I64, "out_2", ""),
    field(Type::U32, "length", "of a row, in eights of weights"),
    field(Type::U32, "wide_ids", "1: of 64 bits"),
    field(Type::U32, "even", "1: the table lies at an even address"),
    field(
        Type::U32,
        "vectors",
        "1: rows of the output are aligned to 16 bytes",
    ),
    field(Type::U32, "blocks_per_row", "of the grid"),
    field(Type::U32, "blocks_per_row_multiplier", ""),
    field(Type::U32, "blocks_per_row_shift", ""),
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
