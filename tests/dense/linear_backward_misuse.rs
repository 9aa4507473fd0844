//! Gradients of linear layers through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, rng};
use unsloth::ffi::linear::backward::{
    unsloth_linear_backward, unsloth_linear_backward_params, unsloth_linear_backward_supported,
    unsloth_linear_backward_workspace_size,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_linear_backward_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "linear_backward: struct_size is 100, at least 880 is needed",
    ),
    (
        |p| p.accumulate = 2,
        INVALID,
        "linear_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "linear_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "linear_backward: x is absent (rank 0), dweight needs it",
    ),
    (
        |p| p.weight = absent(),
        INVALID,
        "linear_backward: weight is absent (rank 0), dx needs it",
    ),
    (
        |p| (p.dx, p.dweight, p.dbias) = (absent(), absent(), absent()),
        INVALID,
        "linear_backward: dx is absent (rank 0), and so are dweight and dbias: one is needed",
    ),
    (
        |p| p.dout.dtype = DType::I32 as u32,
        INVALID,
        "linear_backward: dout has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.dtype = DType::F16 as u32,
        INVALID,
        "linear_backward: x has dtype f16, dout has f32",
    ),
    (
        |p| p.weight.dtype = DType::Q4_0 as u32,
        UNSLOTH_STATUS_UNSUPPORTED,
        "linear_backward: weight has dtype q4_0, allowed: f32, f16, bf16",
    ),
    (
        |p| p.weight.dtype = DType::I64 as u32,
        INVALID,
        "linear_backward: weight has dtype i64, allowed: f32, f16, bf16",
    ),
    (
        |p| p.dx.dtype = DType::Bf16 as u32,
        INVALID,
        "linear_backward: dx has dtype bf16, dout has f32",
    ),
    (
        |p| p.dweight.dtype = DType::Bool as u32,
        INVALID,
        "linear_backward: dweight has dtype bool, allowed: f32, f16, bf16",
    ),
    (
        |p| p.dbias.dtype = DType::I32 as u32,
        INVALID,
        "linear_backward: dbias has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| (p.accumulate, p.dweight.dtype) = (1, DType::F16 as u32),
        INVALID,
        "linear_backward: dweight has dtype f16, allowed: f32",
    ),
    (
        |p| (p.accumulate, p.dbias.dtype) = (1, DType::Bf16 as u32),
        INVALID,
        "linear_backward: dbias has dtype bf16, allowed: f32",
    ),
    (
        |p| p.x.shape[0] = 3,
        INVALID,
        "linear_backward: x has shape [3, 4], expected [2, 4]",
    ),
    (
        |p| p.weight.rank = 1,
        INVALID,
        "linear_backward: weight has rank 1, allowed: 2",
    ),
    (
        |p| p.weight.shape[1] = 5,
        INVALID,
        "linear_backward: weight has shape [3, 5], expected [3, 4]",
    ),
    (
        |p| p.dx.shape[1] = 3,
        INVALID,
        "linear_backward: dx has shape [2, 3], expected [2, 4]",
    ),
    (
        |p| p.dweight.shape[0] = 2,
        INVALID,
        "linear_backward: dweight has shape [2, 4], expected [3, 4]",
    ),
    (
        |p| p.dbias.shape[0] = 4,
        INVALID,
        "linear_backward: dbias has shape [4], expected [3]",
    ),
    (
        |p| p.dout.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dout has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.x.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "linear_backward: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.weight.strides = [1, 3, 0, 0, 0, 0],
        INVALID,
        "linear_backward: weight has stride 3 along its last dimension, allowed: 1",
    ),
    (
        |p| p.dx.strides = [0, 1, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dx has shape [2, 4] with strides [0, 1]: elements of an output may not \
         overlap",
    ),
    (
        |p| p.dweight.strides = [1, 3, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dweight has stride 3 along its last dimension, allowed: 1",
    ),
    (
        |p| p.dweight.strides = [2, 1, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dweight has shape [3, 4] with strides [2, 1]: elements of an output may \
         not overlap",
    ),
    (
        |p| p.dbias.strides = [2, 0, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dbias has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.dx.data = p.dout.data,
        INVALID,
        "linear_backward: dx overlaps dout",
    ),
    (
        |p| p.dx.data = p.x.data,
        INVALID,
        "linear_backward: dx overlaps x",
    ),
    (
        |p| p.dweight = shifted(&p.weight),
        INVALID,
        "linear_backward: dweight overlaps weight",
    ),
    (
        |p| p.dbias.data = p.dout.data,
        INVALID,
        "linear_backward: dbias overlaps dout",
    ),
    (
        |p| p.dbias.data = p.dweight.data,
        INVALID,
        "linear_backward: dbias overlaps dweight",
    ),
    (
        |p| p.dout.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear_backward: data of dout is NULL",
    ),
    (
        |p| p.weight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear_backward: data of weight is NULL",
    ),
    (
        |p| p.dweight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear_backward: data of dweight is NULL",
    ),
    (
        |p| (p.workspace, p.workspace_size) = (std::ptr::without_provenance_mut(256), usize::MAX),
        INVALID,
        "linear_backward: workspace_size 18446744073709551615 from 0x100 overflows the address \
         space",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let layout = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        let input = |shape: &[usize]| {
            TestTensor::normal(&mut rng(), DType::F32, layout(shape)).upload(memory)
        };
        let output =
            |shape: &[usize]| TestTensor::poisoned(DType::F32, layout(shape)).upload(memory);
        let (dout, x, weight) = (input(&[2, 3]), input(&[2, 4]), input(&[3, 4]));
        let (dx, dweight, dbias) = (output(&[2, 4]), output(&[3, 4]), output(&[3]));
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_linear_backward_params = unsafe { abi::zeroed_params() };
        (good.dout, good.x, good.weight) = (c_tensor(&dout), c_tensor(&x), c_tensor(&weight));
        (good.dx, good.dweight, good.dbias) = (c_tensor(&dx), c_tensor(&dweight), c_tensor(&dbias));
        let operation = Operation {
            name: "linear_backward",
            supported: unsloth_linear_backward_supported,
            forward: unsloth_linear_backward,
        };
        // So many rows need no workspace anywhere.
        operation.check_on(&ctx, good, MISUSE, &[&dx, &dweight, &dbias]);
    }
}

#[test]
fn the_query_needs_neither_data_nor_workspace() {
    let ctx = abi::Handle::cpu();
    let described = |shape: &[usize]| {
        let layout = Layout::contiguous(shape).unwrap();
        abi::described(std::ptr::null_mut(), DType::F32, &layout)
    };
    // SAFETY: integers and pointers, size first.
    let mut p: unsloth_linear_backward_params = unsafe { abi::zeroed_params() };
    (p.dout, p.x) = (described(&[64, 5]), described(&[64, 8]));
    p.dweight = described(&[5, 8]);
    let mut size = 99;
    // SAFETY: pointers to live locals, or NULL.
    unsafe {
        let got = unsloth_linear_backward_workspace_size(ctx.0, &p, std::ptr::null_mut());
        let message = "linear_backward: workspace_size is NULL";
        abi::assert_fails(got, UNSLOTH_STATUS_NULL_POINTER, message);
        let mut bad = p;
        bad.x.rank = 0;
        let got = unsloth_linear_backward_workspace_size(ctx.0, &bad, &mut size);
        assert_eq!((got, size), (INVALID, 99));
        let got = unsloth_linear_backward_workspace_size(ctx.0, &p, &mut size);
        assert_eq!((got, size), (UNSLOTH_STATUS_SUCCESS, 0));
    }
}
