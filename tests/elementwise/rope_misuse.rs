//! RoPE through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, rng};
use unsloth::ffi::rope::{unsloth_rope_forward, unsloth_rope_params, unsloth_rope_supported};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_rope_params>] = &[
    (
        |p| p.struct_size = 3,
        INVALID,
        "rope: struct_size is 3, at least 1184 is needed",
    ),
    (
        |p| (p.q, p.q_out, p.k, p.k_out) = (absent(), absent(), absent(), absent()),
        INVALID,
        "rope: q and k are absent, one is required",
    ),
    (
        |p| p.q = absent(),
        INVALID,
        "rope: q is absent (rank 0), it is required",
    ),
    (
        |p| p.k = absent(),
        INVALID,
        "rope: k is absent (rank 0), it is required",
    ),
    (
        |p| p.q.rank = 2,
        INVALID,
        "rope: q has rank 2, allowed: 3, 4",
    ),
    (
        |p| p.q.dtype = DType::I64 as u32,
        INVALID,
        "rope: q has dtype i64, allowed: f32, f16, bf16",
    ),
    (
        |p| p.q_out.dtype = DType::F16 as u32,
        INVALID,
        "rope: q_out has dtype f16, q has f32",
    ),
    (
        |p| (p.k.dtype, p.k_out.dtype) = (DType::F16 as u32, DType::F16 as u32),
        INVALID,
        "rope: k has dtype f16, q has f32",
    ),
    (
        |p| (p.k.shape[0], p.k_out.shape[0]) = (1, 1),
        INVALID,
        "rope: k has shape [1, 1, 8], q has [2, 2, 8]: only the heads may differ",
    ),
    (
        |p| (p.k.shape[2], p.k_out.shape[2]) = (6, 6),
        INVALID,
        "rope: k has shape [2, 1, 6], q has [2, 2, 8]: only the heads may differ",
    ),
    (
        |p| p.q_out.strides = [0, 8, 1, 0, 0, 0],
        INVALID,
        "rope: q_out has shape [2, 2, 8] with strides [0, 8, 1]: elements of an output may not overlap",
    ),
    (
        |p| p.q_out = shifted(&p.q),
        INVALID,
        "rope: q_out overlaps q",
    ),
    (
        |p| p.k_out.data = p.q_out.data,
        INVALID,
        "rope: k_out overlaps q_out",
    ),
    (
        |p| p.k_out.data = p.q.data,
        INVALID,
        "rope: k_out overlaps q",
    ),
    (
        |p| p.q_out.data = p.positions.data,
        INVALID,
        "rope: q_out overlaps positions",
    ),
    (
        |p| p.q.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "rope: data of q is NULL",
    ),
    (
        |p| p.positions.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "rope: data of positions is NULL",
    ),
    (
        |p| p.positions.shape[0] = 3,
        INVALID,
        "rope: positions has shape [3], expected [2]",
    ),
    (
        |p| p.positions.dtype = DType::F32 as u32,
        INVALID,
        "rope: positions has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.position_offset = 5,
        INVALID,
        "rope: position_offset is 5 and positions are there: set one",
    ),
    (
        |p| (p.positions, p.position_offset) = (absent(), i64::MAX),
        INVALID,
        "rope: position_offset is 9223372036854775807 and q has 2 tokens: the sum overflows",
    ),
    (
        |p| p.inverse = 2,
        INVALID,
        "rope: inverse is 2, allowed: 0, 1",
    ),
    (
        |p| p.rotation.style = 2,
        INVALID,
        "rope: style is 2, allowed: 0 (half split), 1 (interleaved)",
    ),
    (
        |p| p.rotation.scaling = 9,
        INVALID,
        "rope: scaling is 9, allowed: 0 (none), 1 (linear), 2 (ntk), 3 (yarn), 4 (llama 3)",
    ),
    (
        |p| p.rotation.rotary_dim = 10,
        INVALID,
        "rope: rotary_dim is 10, above the head_dim 8",
    ),
    (
        |p| p.rotation.rotary_dim = 3,
        INVALID,
        "rope: rotary_dim is 3: an even number of components is rotated",
    ),
    (
        |p| {
            for t in [&mut p.q, &mut p.q_out, &mut p.k, &mut p.k_out] {
                t.shape[2] = 7;
            }
        },
        INVALID,
        "rope: head_dim is 7: an even number of components is rotated",
    ),
    (
        |p| p.rotation.theta = -1.0,
        INVALID,
        "rope: theta is -1, a positive number is needed",
    ),
    (
        |p| p.rotation.theta = f32::NAN,
        INVALID,
        "rope: theta is NaN, a finite number is needed",
    ),
    (
        |p| p.rotation.attention_factor = -2.0,
        INVALID,
        "rope: attention_factor is -2, at least 0 is needed",
    ),
    (
        |p| p.rotation.scaling = 1,
        INVALID,
        "rope: factor is 0, a positive number is needed",
    ),
    (
        |p| (p.rotation.scaling, p.rotation.factor) = (2, f32::INFINITY),
        INVALID,
        "rope: factor is inf, a finite number is needed",
    ),
    (
        |p| (p.rotation.scaling, p.rotation.factor) = (3, 4.0),
        INVALID,
        "rope: original_max_positions is 0, this scaling needs it",
    ),
    (
        |p| {
            (p.rotation.scaling, p.rotation.factor) = (3, 4.0);
            p.rotation.fractional_ramp = 7;
        },
        INVALID,
        "rope: fractional_ramp is 7, allowed: 0, 1",
    ),
    (
        |p| {
            (p.rotation.scaling, p.rotation.factor) = (4, 8.0);
            (p.rotation.low_freq_factor, p.rotation.high_freq_factor) = (4.0, 4.0);
        },
        INVALID,
        "rope: high_freq_factor is 4, it must be above low_freq_factor 4",
    ),
    (
        |p| p.rotation.reserved[1] = 1,
        INVALID,
        "rope: rotation.reserved is 1, allowed: 0",
    ),
    (
        |p| p.rotation.freq_factors = p.positions,
        INVALID,
        "rope: freq_factors has dtype i32, allowed: f32",
    ),
    (
        |p| p.rotation.freq_factors = p.q,
        INVALID,
        "rope: freq_factors has shape [2, 2, 8], expected [4]",
    ),
    (
        |p| p.rotation.cos = p.q,
        INVALID,
        "rope: sin is absent (rank 0): a table has cosines and sines",
    ),
    (
        |p| p.rotation.sin = p.q,
        INVALID,
        "rope: cos is absent (rank 0): a table has cosines and sines",
    ),
    (
        |p| (p.rotation.cos, p.rotation.sin) = (table(p, 4, 5), table(p, 4, 5)),
        INVALID,
        "rope: cos has shape [4, 5], expected [4, 4]",
    ),
    (
        |p| (p.rotation.cos, p.rotation.sin) = (table(p, 4, 4), table(p, 3, 4)),
        INVALID,
        "rope: sin has shape [3, 4], cos has [4, 4]",
    ),
    // Positions are 0 and 3.
    (
        |p| (p.rotation.cos, p.rotation.sin) = (table(p, 3, 4), table(p, 3, 4)),
        INVALID,
        "rope: positions has 3 at index 1, the table has 3",
    ),
    (
        |p| {
            (p.rotation.cos, p.rotation.sin) = (table(p, 3, 4), table(p, 3, 4));
            (p.positions, p.position_offset) = (absent(), 2);
        },
        INVALID,
        "rope: position_offset is 2 and q has 2 tokens: the table has 3 positions",
    ),
    (
        |p| {
            (p.rotation.cos, p.rotation.sin) = (table(p, 3, 4), table(p, 3, 4));
            (p.positions, p.position_offset) = (absent(), -1);
        },
        INVALID,
        "rope: position_offset is -1 and q has 2 tokens: the table has 3 positions",
    ),
];

/// A table in the memory of `q`, which is large enough.
fn table(p: &unsloth_rope_params, rows: i64, columns: i64) -> unsloth::ffi::tensor::unsloth_tensor {
    let mut t = p.q;
    (t.rank, t.shape, t.strides) = (2, [rows, columns, 0, 0, 0, 0], [0; 6]);
    t
}

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let layout = |heads| Layout::contiguous(&[2, heads, 8]).unwrap();
        let input =
            |heads| TestTensor::normal(&mut rng(), DType::F32, layout(heads)).upload(memory);
        let output = |heads| TestTensor::poisoned(DType::F32, layout(heads)).upload(memory);
        let (q, k, q_out, k_out) = (input(2), input(1), output(2), output(1));
        let positions = TestTensor::of(DType::I32, &[2], &[0.0, 3.0]).upload(memory);
        // SAFETY: integers, floats and pointers, size first.
        let mut good: unsloth_rope_params = unsafe { abi::zeroed_params() };
        (good.q, good.q_out) = (c_tensor(&q), c_tensor(&q_out));
        (good.k, good.k_out) = (c_tensor(&k), c_tensor(&k_out));
        good.positions = c_tensor(&positions);
        let operation = Operation {
            name: "rope",
            supported: unsloth_rope_supported,
            forward: unsloth_rope_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&q_out, &k_out]);
    }
}
