//! The gradients of RMSNorm and LayerNorm on Hopper: what its kernels are told, and what tells them
//! apart.

use crate::family::{Family, Field, Type, field};

/// The family.
pub const FAMILY: Family = Family {
    name: "norm_backward_ring",
    directory: "norm/backward",
    architecture: Some((90, "a")),
    arguments: ARGUMENTS,
    choices: &[
        ("dtype", "a contract's Float"),
        ("centered", "whether it is LayerNorm's"),
        ("residual", "whether a residual's gradient is added"),
        (
            "refill",
            "when stages are filled again, as the argument; 3 as that says",
        ),
        (
            "group",
            "threads that share a row; 0 for as many as the argument says",
        ),
        ("rows", "that these take at a time"),
        ("vectors", "that a thread has of a row at most"),
        ("stages", "of a ring at most"),
        (
            "head_bytes",
            "of shared memory, which gains and stages do not get",
        ),
    ],
};

const ARGUMENTS: &[Field] = &[
    field(
        Type::Pointer("const void"),
        "x",
        "rows of all tensors are aligned to 16 bytes",
    ),
    field(Type::Pointer("const void"), "dout", "may be dx"),
    field(Type::Pointer("const void"), "dresidual", ""),
    field(Type::Pointer("const void"), "weight", ""),
    field(Type::Pointer("void"), "dx", ""),
    field(
        Type::Pointer("void"),
        "dweights",
        "[blocks, columns] shares of f32, or of one block the gradient; may be null",
    ),
    field(Type::Pointer("void"), "dbiases", "the same"),
    field(Type::I64, "x_0", "bytes, as all strides"),
    field(Type::I64, "x_1", ""),
    field(Type::I64, "x_2", ""),
    field(Type::I64, "dout_0", ""),
    field(Type::I64, "dout_1", ""),
    field(Type::I64, "dout_2", ""),
    field(Type::I64, "dresidual_0", ""),
    field(Type::I64, "dresidual_1", ""),
    field(Type::I64, "dresidual_2", ""),
    field(Type::I64, "dx_0", ""),
    field(Type::I64, "dx_1", ""),
    field(Type::I64, "dx_2", ""),
    field(Type::U32, "rows", "below 2^31"),
    field(Type::U32, "length", "of a row, in vectors of 16 bytes"),
    field(
        Type::U32,
        "threads",
        "that share a row: 32 to 512, a power of two; unless `group` says it",
    ),
    field(Type::U32, "stages", "of a slot's ring, two or more"),
    field(
        Type::U32,
        "refill",
        "when: 0 at once, 1 before the next row's sums, 2 after them",
    ),
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
    field(
        Type::U32,
        "dweights_dtype",
        "of the gradient, a contract's Float; 0 for shares",
    ),
    field(Type::U32, "dbiases_dtype", "the same"),
    field(
        Type::U32,
        "accumulate",
        "whether gradients of f32 are added to what is there",
    ),
    field(
        Type::U32,
        "weight_dtype",
        "a contract's Float, or 0 for none",
    ),
    field(Type::F32, "weight_offset", ""),
    field(Type::F32, "epsilon", ""),
    field(Type::F32, "inverse_length", "1 / elements of a row"),
];
