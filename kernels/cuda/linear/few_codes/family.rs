//! Products of few rows with weights of 8 or 2 bits whose scales lie apart, rounding included: what the
//! kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_few_codes",
    directory: "linear/few_codes",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("ternary", "1: weights of 2 bits; 0 of 8"),
        ("x_dtype", "a contract's Float"),
        ("rows", "of x, at most"),
        ("columns", "of a tile"),
        ("unit", "weights of a row that a warp takes at a time"),
        ("first_bytes", "of shared memory, before codes and sums"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(Type::Pointer("const void"), "x", ""),
    field(Type::Pointer("const uint8_t"), "weight", "at any address"),
    field(
        Type::Pointer("const float"),
        "weight_scale",
        "may be null, for ones",
    ),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(Type::Pointer("const void"), "bias", ""),
    field(Type::Pointer("const void"), "residual", "or gate"),
    field(Type::I64, "x_stride", "bytes, as all strides"),
    field(Type::I64, "weight_stride", ""),
    field(Type::I64, "out_stride", ""),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(
        Type::U32,
        "rows_log2",
        "of the power of two that the rows are no more than",
    ),
    field(Type::U32, "in_features", ""),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "row_bytes", "of the weight"),
    field(
        Type::U32,
        "pitch",
        "bytes from one row of codes of x to the next in shared memory",
    ),
    field(
        Type::U32,
        "rows_of_scale",
        "rows of the weight that share one",
    ),
    field(Type::U32, "tiles_of_block", "at least"),
    field(
        Type::U32,
        "one_more",
        "blocks with one more tile, the first ones",
    ),
    field(
        Type::U32,
        "lines",
        "1: rows of the weight and of x begin at, and consist of, whole lines of 16 bytes",
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
        "1: no kernel in flight writes the weight or its scales, which may be read before they have ended",
    ),
];
