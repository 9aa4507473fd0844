//! Products with weights that are 8-bit floats whose scales lie apart: what the kernels are told, and
//! what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_e4m3",
    directory: "linear/e4m3",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("x_dtype", "a contract's Float"),
        (
            "rows",
            "of x that a block takes, or 0 where the weight is decoded",
        ),
        ("columns", "of a tile"),
        (
            "step",
            "weights of a row that a warp, or a block that decodes, takes at a time",
        ),
        ("warp_bytes", "of shared memory, of a warp"),
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
    field(
        Type::Pointer("void"),
        "out",
        "may be the residual; or of the decoded weight",
    ),
    field(Type::Pointer("const void"), "bias", ""),
    field(Type::Pointer("const void"), "residual", "or gate"),
    field(Type::I64, "weight_stride", "bytes, as all strides"),
    field(Type::I64, "x_stride", ""),
    field(Type::I64, "out_stride", ""),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "in_features", ""),
    field(
        Type::U32,
        "rows_of_scale",
        "rows of the weight that share one",
    ),
    field(
        Type::U32,
        "first",
        "row of all that is the first one, where the weight is decoded",
    ),
    field(Type::U32, "steps", "of a row"),
    field(
        Type::U32,
        "aligned",
        "1: rows of the weight are aligned to 16 bytes",
    ),
    field(
        Type::U32,
        "x_aligned",
        "1: rows of x, or of the decoded weight, are aligned to 16 bytes",
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
