//! Products of few and of some rows with weights in blocks: what the kernels are told, and what tells them
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
        (
            "x_dtype",
            "a contract's Float, or 0 where any is rounded to integers",
        ),
        ("rows", "of x that a block takes, at most"),
        ("columns", "of a tile"),
        ("step", "weights of a row that a warp takes at a time"),
        ("slot_bytes", "of shared memory, for these of a tile"),
        (
            "x_bytes",
            "for 32 neighbours of a row of x as integers, or for a step of it as it is",
        ),
        ("sums_bytes", "for the sums of a warp"),
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
    field(
        Type::U32,
        "slots",
        "of a warp's ring, or of a block's: two to four",
    ),
    field(
        Type::U32,
        "rows_of_block_log2",
        "of x: 1, 2 or 4, or all that the kernel takes",
    ),
    field(Type::U32, "columns_of_block", ""),
    field(
        Type::U32,
        "gapless",
        "1: rows of the weight follow each other",
    ),
    field(
        Type::U32,
        "aligned",
        "rows of the weight: 0 anywhere, 1 where words of blocks may lie, 2 whole lines of 16 bytes",
    ),
    field(
        Type::U32,
        "x_aligned",
        "rows of x: 0 anywhere, 1 aligned to four elements, 2 to 16 bytes",
    ),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(Type::U32, "x_dtype", "a contract's Float"),
    field(
        Type::U32,
        "dtype",
        "a contract's Float: of residual and output",
    ),
    field(
        Type::U32,
        "parts",
        "of a row of the weight, blocks of a cluster; where x is as it is",
    ),
    field(
        Type::U32,
        "across",
        "warps side by side; where x is as it is",
    ),
    field(
        Type::Pointer("const void"),
        "up_bias",
        "where gated: of what is, as `weight` and `bias` are the gate's",
    ),
    field(
        Type::Pointer("const void"),
        "norm",
        "gains, where few rows of x of 16 bits are normalised",
    ),
    field(
        Type::I64,
        "up_offset",
        "from the gate's weight to that of what is gated",
    ),
    field(
        Type::U32,
        "up_bias_dtype",
        "a contract's Float, or 0 for none",
    ),
    field(
        Type::U32,
        "gated",
        "1: of two matrices in whole lines, of which the activation says; few rows of x",
    ),
    field(
        Type::U32,
        "norm_dtype",
        "of the gains: f32 or that of x, or 0 for no norm",
    ),
    field(Type::F32, "norm_offset", "added to gains"),
    field(Type::F32, "norm_epsilon", ""),
    field(Type::F32, "norm_inverse_length", "1 / elements of a row"),
    field(
        Type::U32,
        "constant",
        "1: no kernel in flight writes the weight, which may be read before they have ended",
    ),
];
