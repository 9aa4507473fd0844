//! Argmax through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{TestTensor, contexts, rng};
use unsloth::ffi::argmax::{
    unsloth_argmax_forward, unsloth_argmax_params, unsloth_argmax_supported,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_argmax_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "argmax: struct_size is 100, at least 280 is needed",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "argmax: x is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "argmax: out is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "argmax: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "argmax: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.dtype = DType::F32 as u32,
        INVALID,
        "argmax: out has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.out.shape[0] = 3,
        INVALID,
        "argmax: out has shape [3], expected [2]",
    ),
    (
        |p| (p.x.rank, p.x.shape[0], p.x.strides[0]) = (1, 4, 1),
        INVALID,
        "argmax: out has shape [2], expected [1]",
    ),
    (
        |p| p.x.shape[1] = 0,
        INVALID,
        "argmax: x has 0 columns, allowed: 1 to 2147483647",
    ),
    (
        |p| p.x.shape[1] = 1 << 31,
        INVALID,
        "argmax: x has 2147483648 columns, allowed: 1 to 2147483647",
    ),
    (
        |p| (p.out.rank, p.out.shape) = (2, [2, 1, 0, 0, 0, 0]),
        INVALID,
        "argmax: out has shape [2, 1], expected [2]",
    ),
    (|p| p.out.data = p.x.data, INVALID, "argmax: out overlaps x"),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "argmax: data of x is NULL",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "argmax: data of out is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let layout = Layout::contiguous(&[2, 4]).unwrap();
    let x = TestTensor::normal(&mut rng(), DType::F32, layout).upload(memory);
    let out = TestTensor::poisoned(DType::I64, Layout::contiguous(&[2]).unwrap()).upload(memory);
    // SAFETY: integers and pointers, size first.
    let mut good: unsloth_argmax_params = unsafe { abi::zeroed_params() };
    (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
    let operation = Operation {
        name: "argmax",
        supported: unsloth_argmax_supported,
        forward: unsloth_argmax_forward,
    };
    operation.check(good, MISUSE, &[&out]);
}
