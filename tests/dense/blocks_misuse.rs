//! Weights in blocks that must be refused.

use crate::common::abi::{self, Misuse, Operation, c_tensor};
use crate::common::guarded::Guarded;
use crate::common::{TestTensor, contiguous, rng};
use unsloth::ffi::linear::{
    unsloth_linear_forward, unsloth_linear_params, unsloth_linear_supported,
};
use unsloth::ffi::status::*;
use unsloth::{Context, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

const MISUSE: &[Misuse<unsloth_linear_params>] = &[
    (
        |p| (p.x.shape[1], p.weight.shape[1]) = (40, 40),
        INVALID,
        "linear: weight has rows of 40 elements, allowed for q4_0: multiples of 32",
    ),
    (
        |p| (p.x.shape[1], p.weight.shape[1], p.weight.dtype) = (96, 96, DType::Q5K as u32),
        INVALID,
        "linear: weight has rows of 96 elements, allowed for q5_k: multiples of 256",
    ),
    (
        |p| p.weight.strides = [80, 1, 0, 0, 0, 0],
        INVALID,
        "linear: weight has shape [3, 64] with strides [80, 1], allowed for q4_0: rows that begin at multiples of 32",
    ),
    (
        |p| p.weight.strides = [1, 3, 0, 0, 0, 0],
        INVALID,
        "linear: weight has stride 3 along its last dimension, allowed: 1",
    ),
    (
        |p| p.weight.shape[1] = 128,
        INVALID,
        "linear: weight has shape [3, 128], expected [3, 64]",
    ),
    (
        |p| p.weight.dtype = DType::F8E5M2 as u32,
        UNSUPPORTED,
        "linear: weight has dtype f8e5m2, which no operation of this version takes",
    ),
    (
        |p| p.x.dtype = DType::Q4_0 as u32,
        UNSUPPORTED,
        "linear: x has dtype q4_0, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::Q4_0 as u32,
        INVALID,
        "linear: out has dtype q4_0, x has f32",
    ),
    (
        |p| p.weight.flags = 16,
        INVALID,
        "linear: weight.flags is 0x10, allowed: 0 or a sum of 1 (strided), 2 (float_activations), 4 (constant) and 8 (int8_activations)",
    ),
    (
        |p| p.weight.flags = 8 | 2,
        INVALID,
        "linear: weight.flags is 0xa, allowed: only one of 2 (float_activations) and 8 (int8_activations)",
    ),
    (
        |p| p.weight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear: data of weight is NULL",
    ),
    (
        |p| p.weight.data = p.out.data,
        INVALID,
        "linear: out overlaps weight",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = Context::cpu().unwrap();
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[2, 256])).upload(&memory);
    let out = TestTensor::poisoned(DType::F32, contiguous(&[2, 3])).upload(&memory);
    // An odd address, and finite factors there.
    let bytes = Guarded::new(&[0x11; 3 * 36 + 1]);
    let weight = bytes.view(DType::Q4_0, contiguous(&[3, 64]));
    let data = weight.as_ptr().wrapping_add(1).cast_mut().cast();
    // SAFETY: integers and pointers, size first.
    let mut good: unsloth_linear_params = unsafe { abi::zeroed_params() };
    (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
    good.x.shape[1] = 64;
    good.weight = abi::described(data, DType::Q4_0, weight.layout());
    let operation = Operation {
        name: "linear",
        supported: unsloth_linear_supported,
        forward: unsloth_linear_forward,
    };
    operation.check_on(&abi::Handle::cpu(), good, MISUSE, &[&out]);
}
