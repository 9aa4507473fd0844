//! Products of many rows with weights in blocks, of 8-bit floats or of codes on Hopper: what the kernels are told, and
//! what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_wide",
    directory: "linear/wide",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("x_dtype", "a contract's Float; I8: rounded to codes"),
        (
            "format",
            "a contract's Blocks; 0: 8-bit floats; I8 or TERNARY: codes",
        ),
        ("rows", "of x, of a tile"),
        ("box_rows", "of these, which are copied together"),
        ("box_halves", "of a step, of rows of codes"),
        ("columns", "of a tile"),
        ("step", "weights of a row that are copied at a time"),
        ("step_bytes", "of a row"),
        ("box_bytes", "of a row in shared memory"),
        ("blocks", "of a multiprocessor, at most"),
        ("needed_bytes", "of shared memory"),
    ],
};

/// Tensor maps are of 16-bit elements, the first two or three of four dimensions: of `x` (columns; rows), of its codes in pairs
/// (columns of half a step; rows; half steps of a row), box (64, as many rows and half steps as are copied together), with a
/// 128-byte swizzle; of the weight's bytes in pairs (those of a row; rows), box (those of a step, of
/// 8-bit codes half of them; columns of a tile), with a swizzle of as many bytes where they are of 8-bit floats
/// or of codes and with none where they are blocks.
const ARGUMENTS: &[Field] = &[
    field(Type::TensorMap, "x", ""),
    field(Type::TensorMap, "weight", ""),
    field(
        Type::Pointer("const float"),
        "x_scale",
        "of each row that was rounded to codes, four at a time",
    ),
    field(
        Type::Pointer("const int32_t"),
        "x_sum",
        "of each such row's codes, four at a time",
    ),
    field(
        Type::Pointer("const float"),
        "weight_scale",
        "may be null, for ones",
    ),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(Type::Pointer("const void"), "bias", ""),
    field(Type::Pointer("const void"), "residual", "or gate"),
    field(
        Type::Pointer("float"),
        "partial",
        "a tile of each block, for what it has of one that another has begun",
    ),
    field(
        Type::Pointer("uint64_t"),
        "left",
        "a word of each block: the launch's tag, once that is there; any other number before",
    ),
    field(Type::U64, "launch_tag", "what no other launch has"),
    field(Type::I64, "out_stride", "bytes, as all strides"),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "steps", "of a row"),
    field(
        Type::U32,
        "rows_of_scale",
        "rows of the weight that share one",
    ),
    field(Type::U32, "row_tiles", "of x"),
    field(
        Type::U32,
        "tiles",
        "of the output, which blocks take by turns; a cluster has one",
    ),
    field(
        Type::U32,
        "parts",
        "of a row of the weight, blocks of a cluster: up to eight, of tiles of more than 64 rows two",
    ),
    field(
        Type::U32,
        "share",
        "steps of a block, where all have as many of those of all tiles, one behind the other, and parts is 1; 0: tiles are whole",
    ),
    field(
        Type::U32,
        "one_more",
        "shares with one more step, the first ones; the last block has the first share",
    ),
    field(
        Type::U32,
        "launch",
        "1: the next launch is of the rest of the rows, and starts once what is multiplied is there; 2: is that launch, which ends behind the one before; 0: all rows",
    ),
    field(
        Type::U32,
        "vectors",
        "1: eight neighbours of out and residual are aligned to 16 bytes",
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
