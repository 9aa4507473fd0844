//! Products with weights of 8 or 2 bits whose scales lie apart: what the kernels are told, and what
//! tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_codes",
    directory: "linear/codes",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("ternary", "1: weights of 2 bits; 0 of 8"),
        ("rows", "of a tile"),
        ("columns", "of a tile"),
        ("warps", "of a block"),
        ("step", "weights of a row that a warp takes at a time"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const uint8_t"),
        "x",
        "codes of 8 bits, rows of whole steps",
    ),
    field(Type::Pointer("const float"), "x_scale", "of each row"),
    field(
        Type::Pointer("const int32_t"),
        "x_sum",
        "of each row's codes",
    ),
    field(Type::Pointer("const uint8_t"), "weight", "at any address"),
    field(
        Type::Pointer("const float"),
        "weight_scale",
        "may be null, for ones",
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
    field(Type::U32, "row_bytes", "of the weight"),
    field(
        Type::U32,
        "rows_of_scale",
        "rows of the weight that share one",
    ),
    field(Type::U32, "steps", "of a row"),
    field(Type::U32, "row_tiles", "of x"),
    field(
        Type::U32,
        "split_log2",
        "of the number of warps that share a tile",
    ),
    field(
        Type::U32,
        "aligned",
        "1: rows of the weight are aligned to 16 bytes",
    ),
    field(
        Type::U32,
        "dtype",
        "a contract's Float: of out and residual",
    ),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(
        Type::U32,
        "constant",
        "1: no kernel in flight writes the weight, which may be read before they have ended",
    ),
];
