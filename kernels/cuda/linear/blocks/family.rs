//! Products of few rows with weights in blocks: what the kernels are told, and what tells them
//! apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_blocks",
    directory: "linear/blocks",
    architecture: None,
    arguments: ARGUMENTS,
    choices: &[
        ("format", "a contract's Blocks"),
        ("dtype", "a contract's Float: of x"),
        ("rows", "of a tile"),
        ("columns", "of a tile"),
        ("warps", "of a block"),
        ("step", "weights of a row that a warp takes at a time"),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(Type::Pointer("const void"), "x", ""),
    field(Type::Pointer("const uint8_t"), "weight", "at any address"),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(Type::Pointer("const void"), "bias", ""),
    field(Type::Pointer("const void"), "residual", "or gate"),
    field(
        Type::U64,
        "weight_bytes",
        "from the first row's first to the last row's last",
    ),
    field(Type::I64, "weight_stride", "bytes, as all strides"),
    field(Type::I64, "x_stride", ""),
    field(Type::I64, "out_stride", ""),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "blocks", "of a row of the weight"),
    field(Type::U32, "steps", "of a row"),
    field(Type::U32, "row_tiles", "of x"),
    field(
        Type::U32,
        "split_log2",
        "of the number of warps that share a tile",
    ),
    field(
        Type::U32,
        "gapless",
        "1: rows of the weight follow each other",
    ),
    field(
        Type::U32,
        "aligned",
        "1: the weight lies where words of its blocks may",
    ),
    field(
        Type::U32,
        "x_aligned",
        "1: rows of x are aligned to four elements",
    ),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(
        Type::U32,
        "wide",
        "1: residual and output are f32, else of the dtype of x",
    ),
];
