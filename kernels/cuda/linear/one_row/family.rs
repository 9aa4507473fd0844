//! Products of one row with weights in blocks on Hopper: what the kernels are told, and what tells them apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "linear_one_row",
    directory: "linear/one_row",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("format", "a contract's Blocks"),
        ("x_dtype", "a contract's Float"),
        ("step", "weights of a row that a warp multiplies at a time"),
        ("steps", "of a row that are copied together"),
        ("slot_bytes", "of shared memory, for these of 16 rows"),
        (
            "x_bytes",
            "of shared memory, for 32 neighbours of x as integers",
        ),
        (
            "share_bytes",
            "of shared memory, for what warps have of the sums of 16 rows",
        ),
        (
            "rest_bytes",
            "of shared memory, for the sums of squares of x",
        ),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(Type::Pointer("const void"), "x", "aligned to 16 bytes"),
    field(
        Type::Pointer("const uint8_t"),
        "weight",
        "aligned to 16 bytes",
    ),
    field(
        Type::Pointer("const uint8_t"),
        "up",
        "where gated: what is, as `weight` is the gate's",
    ),
    field(Type::Pointer("void"), "out", "may be the residual"),
    field(
        Type::Pointer("const void"),
        "residual",
        "or gate; of a column, read before it is written",
    ),
    field(Type::Pointer("const void"), "bias", ""),
    field(
        Type::Pointer("const void"),
        "up_bias",
        "where gated: of what is",
    ),
    field(
        Type::Pointer("const void"),
        "norm",
        "gains, aligned to 16 bytes, where x is normalised",
    ),
    field(Type::I64, "weight_stride", "bytes, of both weights"),
    field(Type::U32, "units", "of 32 neighbours, of a row"),
    field(Type::U32, "slots", "of the ring: an even number"),
    field(Type::U32, "slot_bytes", "whole lines of 16"),
    field(
        Type::U32,
        "interval",
        "nanoseconds from one chunk that a warp asks for to the next, or 0; tiles that are copied as they lie have no pace",
    ),
    field(
        Type::U32,
        "whole_tiles",
        "1: tiles are copied as they lie, rows without gaps; 0: rows are whole lines of 16 bytes and whole steps",
    ),
    field(
        Type::U32,
        "tiles",
        "of a block, each of 16 rows of the weight; where gated, of eight of each",
    ),
    field(
        Type::U32,
        "chunks_inverse",
        "65536 / the chunks of a row, and one: times a block's index, in its upper half, it is that index by the chunks",
    ),
    field(
        Type::U32,
        "one_more",
        "blocks with one more, the first ones",
    ),
    field(Type::U32, "bias_dtype", "a contract's Float, or 0 for none"),
    field(
        Type::U32,
        "up_bias_dtype",
        "a contract's Float, or 0 for none",
    ),
    field(Type::U32, "epilogue", "a contract's Epilogue"),
    field(
        Type::U32,
        "dtype",
        "a contract's Float: of residual and output",
    ),
    field(
        Type::U32,
        "gated",
        "1: of two weights, of which the activation says",
    ),
    field(
        Type::U32,
        "norm_dtype",
        "of the gains: f32 or that of x, or 0 for no norm",
    ),
    field(Type::U32, "norm_constant", "1: nor do they write the gains"),
    field(Type::F32, "norm_offset", "added to gains"),
    field(Type::F32, "norm_epsilon", ""),
    field(Type::F32, "norm_inverse_length", "1 / elements of a row"),
    field(
        Type::U32,
        "constant",
        "1: no kernel in flight writes the weight, which may be read before they have ended",
    ),
];
