//! Products of few rows of 16 bits on Hopper, with weights like them or in blocks: what the kernels are told,
//! and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_few",
    directory: "linear/few",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "of x: a contract's Float"),
        ("weight_dtype", "the same, or a contract's Blocks"),
        ("rows", "of x, at most"),
        ("in_parts", "1: blocks of a cluster can part rows"),
        ("columns", "rows of the weight of a tile, at most"),
        (
            "step",
            "elements of a row that a warp multiplies at a time, at most",
        ),
        ("step_bytes", "of these"),
        ("steps", "of a row that are copied together, at most"),
        (
            "teams",
            "of warps, which have chunks by turns: slots are a multiple",
        ),
        ("sum_bytes", "of shared memory, for sums of x of a step"),
        (
            "share_bytes",
            "of shared memory, for what warps have of the sums of tiles, for each row of x",
        ),
        (
            "partial_bytes",
            "of shared memory, for what another block of a cluster has of a tile",
        ),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const void"),
        "x",
        "rows are whole lines of 16 bytes, as all that are read",
    ),
    field(Type::Pointer("const uint8_t"), "weight", "or of the gate"),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(Type::Pointer("const void"), "bias", "or of the gate"),
    field(Type::Pointer("const void"), "up_bias", "of what is gated"),
    field(Type::Pointer("const void"), "residual", ""),
    field(
        Type::Pointer("const void"),
        "norm",
        "gains, where x is normalised",
    ),
    field(Type::I64, "weight_stride", "bytes, as all strides"),
    field(
        Type::I64,
        "up_offset",
        "from the gate's weight to that of what is gated",
    ),
    field(Type::I64, "x_stride", ""),
    field(Type::I64, "out_stride", ""),
    field(Type::I64, "residual_stride", ""),
    field(Type::U32, "rows", "of x"),
    field(Type::U32, "out_features", ""),
    field(Type::U32, "lines", "of 16 bytes of a row of x"),
    field(
        Type::U32,
        "steps",
        "of a block's part of a row, the last of which may be shorter, or not there",
    ),
    field(
        Type::U32,
        "units_of_step",
        "of 32 neighbours, of weights in blocks",
    ),
    field(
        Type::U32,
        "steps_of_chunk",
        "that are copied together: at most as many as warps multiply at a time",
    ),
    field(Type::U32, "slots", "of the ring"),
    field(
        Type::U32,
        "in_flight",
        "chunks that are on their way for either half of the warps, once the ring has been full",
    ),
    field(
        Type::U32,
        "pitch",
        "bytes of a slot from row to row, so that the same words of neighbouring ones lie in different banks",
    ),
    field(
        Type::U32,
        "whole_tiles",
        "1: tiles in blocks are copied as they lie, rows without gaps; 0: rows are whole lines of 16 bytes",
    ),
    field(
        Type::U32,
        "parts",
        "of a row, each for a block of a cluster: a power of two",
    ),
    field(
        Type::U32,
        "columns_of_tile",
        "of the output: where gated, at most half of a tile's rows",
    ),
    field(
        Type::U32,
        "tiles",
        "of a cluster, every so many as there are clusters",
    ),
    field(
        Type::U32,
        "one_more",
        "clusters with one more, the first ones",
    ),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(Type::U32, "up_bias_dtype", "the same"),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(
        Type::U32,
        "gated",
        "1: of two matrices, of which the activation says",
    ),
    field(
        Type::U32,
        "dtype",
        "a contract's Float: of residual and output",
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
