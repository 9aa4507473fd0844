//! Gated activations through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, rng};
use unsloth::ffi::status::*;
use unsloth::ffi::swiglu::{
    unsloth_swiglu_forward, unsloth_swiglu_params, unsloth_swiglu_supported,
};
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_swiglu_params>] = &[
    (
        |p| p.struct_size = 4,
        INVALID,
        "swiglu: struct_size is 4, at least 560 is needed",
    ),
    (
        |p| (p.gate, p.out) = (absent(), absent()),
        INVALID,
        "swiglu: gate and gate_up are absent, one is required",
    ),
    (
        |p| p.up = absent(),
        INVALID,
        "swiglu: up is absent (rank 0), it is required",
    ),
    (
        |p| p.gate_up = p.up,
        INVALID,
        "swiglu: gate and gate_up are both there: set one",
    ),
    (
        |p| (p.gate_up, p.gate) = (p.up, absent()),
        INVALID,
        "swiglu: up and gate_up are both there: set one",
    ),
    (
        |p| packed(p, |_| {}),
        INVALID,
        "swiglu: out has shape [2, 6], expected [2, 3]",
    ),
    (
        |p| packed(p, |p| p.gate_up.shape[1] = 5),
        INVALID,
        "swiglu: gate_up has 5 columns, an even number is needed",
    ),
    (
        |p| packed(p, |p| p.out = absent()),
        INVALID,
        "swiglu: out is absent (rank 0), it is required",
    ),
    (
        |p| packed(p, |p| (p.out.data, p.out.shape[1]) = (p.gate_up.data, 3)),
        INVALID,
        "swiglu: out overlaps gate_up",
    ),
    (
        |p| p.activation = 4,
        INVALID,
        "swiglu: activation is 4, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)",
    ),
    (
        |p| p.gate_order = 2,
        INVALID,
        "swiglu: gate_order is 2, allowed: 0 (gate first), 1 (up first)",
    ),
    (
        |p| p.gate.dtype = DType::Bool as u32,
        INVALID,
        "swiglu: gate has dtype bool, allowed: f32, f16, bf16",
    ),
    (
        |p| p.up.dtype = DType::F16 as u32,
        INVALID,
        "swiglu: up has dtype f16, gate has f32",
    ),
    (
        |p| p.up.shape[1] = 5,
        INVALID,
        "swiglu: up has shape [2, 5], gate has [2, 6]",
    ),
    (
        |p| p.out.shape[1] = 5,
        INVALID,
        "swiglu: out has shape [2, 5], gate has [2, 6]",
    ),
    (
        |p| p.up.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "swiglu: up has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.strides = [3, 1, 0, 0, 0, 0],
        INVALID,
        "swiglu: out has shape [2, 6] with strides [3, 1]: elements of an output may not overlap",
    ),
    (
        |p| p.out = shifted(&p.gate),
        INVALID,
        "swiglu: out overlaps gate",
    ),
    (|p| p.out = p.up, INVALID, "swiglu: out overlaps up"),
    (
        |p| p.up.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "swiglu: data of up is NULL",
    ),
];

/// The arguments with `up` as a packed tensor, spoilt further.
fn packed(p: &mut unsloth_swiglu_params, spoil: fn(&mut unsloth_swiglu_params)) {
    (p.gate_up, p.gate, p.up) = (p.up, absent(), absent());
    spoil(p);
}

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let layout = Layout::contiguous(&[2, 6]).unwrap();
        let input = || TestTensor::normal(&mut rng(), DType::F32, layout).upload(memory);
        let (gate, up) = (input(), input());
        let out = TestTensor::poisoned(DType::F32, layout).upload(memory);
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_swiglu_params = unsafe { abi::zeroed_params() };
        (good.gate, good.up, good.out) = (c_tensor(&gate), c_tensor(&up), c_tensor(&out));
        let operation = Operation {
            name: "swiglu",
            supported: unsloth_swiglu_supported,
            forward: unsloth_swiglu_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&out]);
    }
}
