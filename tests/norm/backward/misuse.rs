//! What gradients of norms refuse.

use super::poisoned;
use crate::common::abi::{self, Misuse, absent, assert_fails, c_tensor};
use crate::common::{TestTensor, contiguous, rng};
use unsloth::DType;
use unsloth::ffi::layer_norm::backward::*;
use unsloth::ffi::rms_norm::backward::*;
use unsloth::ffi::status::*;

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// How good arguments of LayerNorm's gradients are spoiled; what is checked is shared by both.
const MISUSE: &[Misuse<unsloth_layer_norm_backward_params>] = &[
    (
        |p| p.accumulate = 2,
        INVALID,
        "layer_norm_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.reserved = 1,
        INVALID,
        "layer_norm_backward: reserved is 1, allowed: 0",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "layer_norm_backward: x is absent (rank 0), it is required",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "layer_norm_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "layer_norm_backward: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.dout.shape[0] = 1,
        INVALID,
        "layer_norm_backward: dout has shape [1, 8], x has [2, 8]",
    ),
    (
        |p| p.dx.dtype = DType::F16 as u32,
        INVALID,
        "layer_norm_backward: dx has dtype f16, dout has f32",
    ),
    (
        |p| p.dresidual.shape[1] = 7,
        INVALID,
        "layer_norm_backward: dresidual has shape [2, 7], x has [2, 8]",
    ),
    (
        |p| p.weight.shape[0] = 7,
        INVALID,
        "layer_norm_backward: weight has shape [7], expected [8]",
    ),
    (
        |p| p.weight = absent(),
        INVALID,
        "layer_norm_backward: dweight is there, without a weight it has no use",
    ),
    (
        |p| p.dbias.dtype = DType::Bool as u32,
        INVALID,
        "layer_norm_backward: dbias has dtype bool, allowed: f32, f16, bf16",
    ),
    (
        |p| (p.accumulate, p.dweight.dtype) = (1, DType::Bf16 as u32),
        INVALID,
        "layer_norm_backward: dweight has dtype bf16, allowed with accumulate: f32",
    ),
    (
        |p| p.dbias.data = p.dweight.data,
        INVALID,
        "layer_norm_backward: dbias overlaps dweight",
    ),
    (
        |p| p.x.data = p.dx.data,
        INVALID,
        "layer_norm_backward: dx overlaps x",
    ),
    (
        |p| p.workspace = p.dx.data,
        INVALID,
        "layer_norm_backward: workspace overlaps dx",
    ),
    (
        |p| p.workspace_size = 3,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "layer_norm_backward: workspace_size is 3 bytes, 64 are required",
    ),
    (
        |p| p.epsilon = 0.0,
        INVALID,
        "layer_norm_backward: epsilon is 0, it must be above 0",
    ),
    (
        |p| p.dweight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "layer_norm_backward: data of dweight is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let layout = contiguous(&[2, 8]);
        let normal = || TestTensor::normal(&mut rng(), DType::F32, layout).upload(&memory);
        let (x, dout, dresidual) = (normal(), normal(), normal());
        let vector = || TestTensor::poisoned(DType::F32, contiguous(&[8])).upload(&memory);
        let dx = TestTensor::poisoned(DType::F32, layout).upload(&memory);
        let weight = TestTensor::of(DType::F32, &[8], &[1.0; 8]).upload(&memory);
        let (dweight, dbias) = (vector(), vector());
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_layer_norm_backward_params = unsafe { abi::zeroed_params() };
        good.epsilon = 1e-5;
        (good.x, good.dout, good.dx) = (c_tensor(&x), c_tensor(&dout), c_tensor(&dx));
        (good.dresidual, good.weight) = (c_tensor(&dresidual), c_tensor(&weight));
        (good.dweight, good.dbias) = (c_tensor(&dweight), c_tensor(&dbias));
        let mut size = 0;
        // SAFETY: the struct is there, and the size can be written.
        let asked = unsafe { unsloth_layer_norm_backward_workspace_size(ctx.0, &good, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = poisoned(&memory, size);
        (good.workspace, good.workspace_size) = (workspace.as_ptr().cast(), size);
        for (spoil, status, message) in MISUSE {
            let mut bad = good;
            spoil(&mut bad);
            // SAFETY: every tensor that passes validation lies in memory made above.
            let got = unsafe { unsloth_layer_norm_backward(ctx.0, &bad, std::ptr::null_mut()) };
            assert_fails(got, *status, message);
        }
        for untouched in [&dx, &dweight, &dbias] {
            abi::assert_untouched(untouched);
        }
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut rms: unsloth_rms_norm_backward_params = unsafe { abi::zeroed_params() };
        (rms.epsilon, rms.weight_offset) = (1e-5, 1.0);
        (rms.x, rms.dout, rms.dx) = (good.x, good.dout, good.dx);
        // SAFETY: as above.
        let got = unsafe { unsloth_rms_norm_backward(ctx.0, &rms, std::ptr::null_mut()) };
        let message = "rms_norm_backward: weight_offset is 1, without a weight it must be 0";
        assert_fails(got, INVALID, message);
    }
}
