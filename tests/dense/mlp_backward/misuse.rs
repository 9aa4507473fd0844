//! What gradients of the MLP refuse.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{TestTensor, contexts, rng};
use unsloth::ffi::mlp::backward::*;
use unsloth::ffi::mlp::unsloth_mlp_params;
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// Spoils the forward's arguments.
fn spoil(p: &mut unsloth_mlp_backward_params, change: fn(&mut unsloth_mlp_params)) {
    // SAFETY: those of the good arguments, which live as long as the test.
    let mut forward = unsafe { *p.forward };
    change(&mut forward);
    p.forward = Box::leak(Box::new(forward));
}

/// Two tokens, hidden 4, intermediate 3, hidden out 5.
const MISUSE: &[Misuse<unsloth_mlp_backward_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "mlp_backward: struct_size is 100, at least 1528 is needed",
    ),
    (
        |p| p.forward = std::ptr::null(),
        UNSLOTH_STATUS_NULL_POINTER,
        "mlp_backward: forward is NULL",
    ),
    (
        |p| p.forward = std::ptr::without_provenance(0x1001),
        INVALID,
        "mlp_backward: forward 0x1001 is not aligned to 8 bytes",
    ),
    (
        |p| spoil(p, |f| f.struct_size = 8),
        INVALID,
        "mlp_backward: forward.struct_size is 8, at least 1984 is needed",
    ),
    (
        |p| spoil(p, |f| f.intermediate_norm = f.down_bias),
        UNSLOTH_STATUS_UNSUPPORTED,
        "mlp_backward: intermediate_norm is there: gradients are those of a block without it",
    ),
    (
        |p| spoil(p, |f| f.x = absent()),
        INVALID,
        "mlp_backward: x is absent (rank 0), it is required",
    ),
    (
        |p| spoil(p, |f| f.up_weight = absent()),
        INVALID,
        "mlp_backward: up_weight is absent (rank 0), it is required",
    ),
    (
        |p| spoil(p, |f| f.activation = 8),
        INVALID,
        "mlp_backward: activation is 8, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)",
    ),
    (
        |p| spoil(p, |f| f.down_weight.shape[1] = 2),
        INVALID,
        "mlp_backward: down_weight has shape [5, 2], expected [5, 3]",
    ),
    (
        |p| spoil(p, |f| f.down_weight.dtype = DType::Q6K as u32),
        UNSLOTH_STATUS_UNSUPPORTED,
        "mlp_backward: down_weight has dtype q6_k, allowed: f32, f16, bf16",
    ),
    (
        |p| p.accumulate = 2,
        INVALID,
        "mlp_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "mlp_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.dout.shape[1] = 4,
        INVALID,
        "mlp_backward: dout has shape [2, 4], expected [2, 5]",
    ),
    (
        |p| p.dout.dtype = DType::Bf16 as u32,
        INVALID,
        "mlp_backward: dout has dtype bf16, x has f32",
    ),
    (
        |p| p.gate_up.shape[1] = 3,
        INVALID,
        "mlp_backward: gate_up has shape [2, 3], expected [2, 6]",
    ),
    (
        |p| p.gate_up.strides[0] = 7,
        INVALID,
        "mlp_backward: gate_up has shape [2, 6] with strides [7, 1], it must be contiguous",
    ),
    (
        |p| p.dx.shape[1] = 3,
        INVALID,
        "mlp_backward: dx has shape [2, 3], x has [2, 4]",
    ),
    (
        |p| p.dx.strides[0] = 1,
        INVALID,
        "mlp_backward: dx has shape [2, 4] with strides [1, 1]: elements of an output may not overlap",
    ),
    (
        |p| p.dgate_weight.shape[1] = 3,
        INVALID,
        "mlp_backward: dgate_weight has shape [3, 3], expected [3, 4]",
    ),
    (
        |p| p.dup_bias = p.ddown_bias,
        INVALID,
        "mlp_backward: dup_bias is there, without up_bias it has no use",
    ),
    (
        |p| p.dgate_up_weight = p.dgate_weight,
        INVALID,
        "mlp_backward: dgate_up_weight is there, without gate_up_weight it has no use",
    ),
    (
        |p| p.ddown_bias.shape[0] = 3,
        INVALID,
        "mlp_backward: ddown_bias has shape [3], expected [5]",
    ),
    (
        |p| p.ddown_weight.dtype = DType::I32 as u32,
        INVALID,
        "mlp_backward: ddown_weight has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| {
            p.accumulate = 1;
            p.ddown_weight.dtype = DType::F16 as u32;
        },
        INVALID,
        "mlp_backward: ddown_weight has dtype f16, allowed with accumulate: f32",
    ),
    (
        |p| {
            (p.dx, p.dgate_weight, p.dup_weight) = (absent(), absent(), absent());
            (p.ddown_weight, p.ddown_bias) = (absent(), absent());
        },
        INVALID,
        "mlp_backward: dx is absent, as are all other gradients: nothing is asked for",
    ),
    (
        |p| p.dx.data = p.dout.data,
        INVALID,
        "mlp_backward: dx overlaps dout",
    ),
    (
        |p| p.dgate_weight.data = p.dup_weight.data,
        INVALID,
        "mlp_backward: dup_weight overlaps dgate_weight",
    ),
    (
        |p| p.workspace = p.dx.data,
        INVALID,
        "mlp_backward: workspace overlaps dx",
    ),
    (
        |p| p.workspace_size = 767,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "mlp_backward: workspace_size is 767 bytes, 768 are required",
    ),
    (
        |p| p.workspace = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "mlp_backward: workspace is NULL",
    ),
    (
        |p| p.gate_up.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "mlp_backward: data of gate_up is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let input = |shape: &[usize]| {
        TestTensor::normal(&mut rng(), DType::F32, contiguous(shape)).upload(memory)
    };
    let output =
        |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(memory);
    let (x, gate, up, down) = (
        input(&[2, 4]),
        input(&[3, 4]),
        input(&[3, 4]),
        input(&[5, 3]),
    );
    let (bias, dout, kept) = (input(&[5]), input(&[2, 5]), input(&[2, 6]));
    let (dx, dgate, dup) = (output(&[2, 4]), output(&[3, 4]), output(&[3, 4]));
    let (ddown, dbias, workspace) = (output(&[5, 3]), output(&[5]), output(&[192]));
    // SAFETY: integers, floats and pointers, size first.
    let mut forward: unsloth_mlp_params = unsafe { abi::zeroed_params() };
    (forward.x, forward.gate_weight) = (c_tensor(&x), c_tensor(&gate));
    (forward.up_weight, forward.down_weight) = (c_tensor(&up), c_tensor(&down));
    forward.down_bias = c_tensor(&bias);
    // SAFETY: as above.
    let mut good: unsloth_mlp_backward_params = unsafe { abi::zeroed_params() };
    good.forward = &forward;
    (good.gate_up, good.dout, good.dx) = (c_tensor(&kept), c_tensor(&dout), c_tensor(&dx));
    (good.dgate_weight, good.dup_weight) = (c_tensor(&dgate), c_tensor(&dup));
    (good.ddown_weight, good.ddown_bias) = (c_tensor(&ddown), c_tensor(&dbias));
    (good.workspace, good.workspace_size) = (workspace.data(), 768);
    let operation = Operation {
        name: "mlp_backward",
        supported: unsloth_mlp_backward_supported,
        forward: unsloth_mlp_backward,
    };
    operation.check(good, MISUSE, &[&dx, &dgate, &dup, &ddown, &dbias]);
}
