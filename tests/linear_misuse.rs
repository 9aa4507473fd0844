//! Linear layers through the C ABI with arguments that must be refused.

mod common;

use common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use common::{TestTensor, contexts, rng};
use unsloth::ffi::linear::{
    unsloth_linear_forward, unsloth_linear_params, unsloth_linear_supported,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_linear_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "linear: struct_size is 100, at least 568 is needed",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "linear: x is absent (rank 0), it is required",
    ),
    (
        |p| p.weight = absent(),
        INVALID,
        "linear: weight is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "linear: out is absent (rank 0), it is required",
    ),
    (
        |p| (p.out, p.residual) = (absent(), absent()),
        INVALID,
        "linear: out is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "linear: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.weight.dtype = DType::I32 as u32,
        INVALID,
        "linear: weight has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.bias.dtype = DType::Bool as u32,
        INVALID,
        "linear: bias has dtype bool, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "linear: out has dtype f16, x has f32",
    ),
    (
        |p| p.residual.dtype = DType::F16 as u32,
        INVALID,
        "linear: residual has dtype f16, out has f32",
    ),
    (
        |p| p.weight.rank = 1,
        INVALID,
        "linear: weight has rank 1, allowed: 2",
    ),
    (
        |p| p.weight.shape[1] = 5,
        INVALID,
        "linear: weight has shape [3, 5], expected [3, 4]",
    ),
    (
        |p| p.bias.shape[0] = 4,
        INVALID,
        "linear: bias has shape [4], expected [3]",
    ),
    (
        |p| p.out.shape[1] = 4,
        INVALID,
        "linear: out has shape [2, 4], expected [2, 3]",
    ),
    (
        |p| p.residual.shape[0] = 1,
        INVALID,
        "linear: residual has shape [1, 3], out has [2, 3]",
    ),
    (
        |p| p.x.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "linear: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.weight.strides = [1, 3, 0, 0, 0, 0],
        INVALID,
        "linear: weight has stride 3 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.strides = [0, 1, 0, 0, 0, 0],
        INVALID,
        "linear: out has shape [2, 3] with strides [0, 1]: elements of an output may not overlap",
    ),
    (|p| p.out.data = p.x.data, INVALID, "linear: out overlaps x"),
    (
        |p| p.out.data = p.weight.data,
        INVALID,
        "linear: out overlaps weight",
    ),
    (
        |p| p.out.data = p.bias.data,
        INVALID,
        "linear: out overlaps bias",
    ),
    (
        |p| p.out = shifted(&p.residual),
        INVALID,
        "linear: out overlaps residual",
    ),
    (
        |p| p.weight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear: data of weight is NULL",
    ),
    (
        |p| p.residual.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear: data of residual is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let input = |shape: &[usize]| {
        TestTensor::normal(&mut rng(), DType::F32, Layout::contiguous(shape).unwrap())
            .upload(memory)
    };
    let (x, weight, bias, residual) = (input(&[2, 4]), input(&[3, 4]), input(&[3]), input(&[2, 3]));
    let out = TestTensor::poisoned(DType::F32, residual.layout).upload(memory);
    // SAFETY: integers and pointers, size first.
    let mut good: unsloth_linear_params = unsafe { abi::zeroed_params() };
    (good.x, good.weight, good.bias) = (c_tensor(&x), c_tensor(&weight), c_tensor(&bias));
    (good.residual, good.out) = (c_tensor(&residual), c_tensor(&out));
    let operation = Operation {
        name: "linear",
        supported: unsloth_linear_supported,
        forward: unsloth_linear_forward,
    };
    operation.check(good, MISUSE, &[&out]);
}
