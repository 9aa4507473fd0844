//! Conversions through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, contexts, rng};
use unsloth::ffi::cast::{unsloth_cast_forward, unsloth_cast_params, unsloth_cast_supported};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_cast_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "cast: struct_size is 100, at least 280 is needed",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "cast: x is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "cast: out is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "cast: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "cast: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.dtype = DType::I64 as u32,
        INVALID,
        "cast: out has dtype i64, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.shape[1] = 3,
        INVALID,
        "cast: out has shape [2, 3], x has [2, 4]",
    ),
    (
        |p| p.out.rank = 1,
        INVALID,
        "cast: out has shape [2], x has [2, 4]",
    ),
    (
        |p| p.out.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "cast: out has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.strides = [2, 1, 0, 0, 0, 0],
        INVALID,
        "cast: out has shape [2, 4] with strides [2, 1]: elements of an output may not overlap",
    ),
    (|p| p.out = shifted(&p.x), INVALID, "cast: out overlaps x"),
    (|p| p.out.data = p.x.data, INVALID, "cast: out overlaps x"),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "cast: data of x is NULL",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "cast: data of out is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let layout = Layout::contiguous(&[2, 4]).unwrap();
    let x = TestTensor::normal(&mut rng(), DType::F32, layout).upload(memory);
    let out = TestTensor::poisoned(DType::Bf16, layout).upload(memory);
    // SAFETY: integers and pointers, size first.
    let mut good: unsloth_cast_params = unsafe { abi::zeroed_params() };
    (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
    let operation = Operation {
        name: "cast",
        supported: unsloth_cast_supported,
        forward: unsloth_cast_forward,
    };
    operation.check(good, MISUSE, &[&out]);
}
