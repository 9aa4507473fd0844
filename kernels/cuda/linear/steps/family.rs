//! Products of five to eight rows with weights in blocks on Hopper: what the kernels are told, and what
//! tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_steps",
    directory: "linear/steps",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("format", "a contract's Blocks"),
        ("x_dtype", "a contract's Float"),
        ("rows", "of x, at most"),
        ("step", "weights of a row that a warp has"),
        ("slot_bytes", "of shared memory, for these of 16 rows"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const void"),
        "x",
        "rows are aligned to four elements",
    ),
    field(
        Type::Pointer("const uint8_t"),
        "weight",
        "rows are whole lines of 16 bytes",
    ),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(Type::Pointer("const void"), "bias", ""),
    field(Type::Pointer("const void"), "residual", "or gate"),
    field(Type::I64, "weight_stride", "bytes, as all strides"),
    field(Type::I64, "x_stride", ""),
    field(Type::I64, "out_stride", ""),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "blocks", "of a row of the weight"),
    field(Type::U32, "steps", "of a row"),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(
        Type::U32,
        "dtype",
        "a contract's Float: of residual and output",
    ),
    field(Type::U32, "parts", "of a row, blocks of a cluster"),
    field(Type::U32, "along", "warps along a row: other steps"),
    field(Type::U32, "across", "warps side by side: other tiles"),
    field(Type::U32, "columns", "of a cluster"),
    field(Type::U32, "slots", "of a warp's ring"),
    field(
        Type::U32,
        "tiles_of_round",
        "that a warp takes between two additions of shares",
    ),
    field(
        Type::U32,
        "constant",
        "1: no kernel in flight writes the weight, which may be read before they have ended",
    ),
];
