//! Linear layers through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, contexts, rng};
use unsloth::ffi::linear::{
    unsloth_linear_forward, unsloth_linear_params, unsloth_linear_supported,
    unsloth_linear_workspace_size,
};
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_tensor;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// A tensor of as many elements as a row of another one has, in its memory.
fn row_of(t: &unsloth_tensor) -> unsloth_tensor {
    let mut row = *t;
    let last = t.rank as usize - 1;
    (row.rank, row.shape[0], row.strides[0]) = (1, t.shape[last], 1);
    row
}

const MISUSE: &[Misuse<unsloth_linear_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "linear: struct_size is 100, at least 888 is needed",
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
        "linear: weight has dtype i32, allowed: f32, f16, bf16, \
         q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, tq1_0, tq2_0, q2_0, i8, ternary, f8e4m3",
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
        |p| (p.x.dtype, p.out.dtype) = (DType::F16 as u32, DType::Bf16 as u32),
        INVALID,
        "linear: out has dtype bf16, x has f16; allowed: that or f32",
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
        |p| (p.x_norm, p.x_norm.dtype) = (p.x, DType::I32 as u32),
        INVALID,
        "linear: x_norm has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| (p.x_norm, p.norm_weight_offset) = (row_of(&p.x), f32::INFINITY),
        INVALID,
        "linear: norm_weight_offset is inf, a finite number is needed",
    ),
    (
        |p| p.x_norm = row_of(&p.x),
        INVALID,
        "linear: norm_epsilon is 0, it must be above 0",
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
    (
        |p| (p.workspace, p.workspace_size) = (std::ptr::without_provenance_mut(256), usize::MAX),
        INVALID,
        "linear: workspace_size 18446744073709551615 from 0x100 overflows the address space",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let input = |shape: &[usize]| {
            TestTensor::normal(&mut rng(), DType::F32, Layout::contiguous(shape).unwrap())
                .upload(memory)
        };
        let (x, weight, bias, residual) =
            (input(&[2, 4]), input(&[3, 4]), input(&[3]), input(&[2, 3]));
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
        operation.check_on(&ctx, good, MISUSE, &[&out]);
    }
}

/// What a caller knew before there were workspaces.
#[test]
fn the_query_needs_neither_data_nor_workspace() {
    let ctx = abi::Handle::cpu();
    let described = |shape: &[usize]| {
        let layout = Layout::contiguous(shape).unwrap();
        abi::described(std::ptr::null_mut(), DType::F32, &layout)
    };
    // SAFETY: integers and pointers, size first.
    let mut p: unsloth_linear_params = unsafe { abi::zeroed_params() };
    (p.x, p.weight, p.out) = (described(&[64, 8]), described(&[5, 8]), described(&[64, 5]));
    let mut size = 99;
    // SAFETY: pointers to live locals, or NULL.
    unsafe {
        let got = unsloth_linear_workspace_size(ctx.0, &p, std::ptr::null_mut());
        let message = "linear: workspace_size is NULL";
        abi::assert_fails(got, UNSLOTH_STATUS_NULL_POINTER, message);
        let mut bad = p;
        bad.x.rank = 0;
        let got = unsloth_linear_workspace_size(ctx.0, &bad, &mut size);
        assert_eq!((got, size), (INVALID, 99));
        let got = unsloth_linear_workspace_size(ctx.0, &p, &mut size);
        assert_eq!((got, size), (UNSLOTH_STATUS_SUCCESS, 0));
    }
}

#[test]
fn without_products_there_are_bias_and_residual() {
    let ctx = abi::Handle::cpu();
    let memory = &contexts()[0];
    for rows in [2, 40] {
        let layout = Layout::contiguous(&[rows, 3]).unwrap();
        let bias = TestTensor::of(DType::F32, &[3], &[1.0, 2.0, 3.0]).upload(memory);
        let out = TestTensor::from_values(DType::F32, layout, &vec![10.0; 3 * rows]).upload(memory);
        // SAFETY: integers and pointers, size first.
        let mut p: unsloth_linear_params = unsafe { abi::zeroed_params() };
        let empty = |n| {
            let layout = Layout::contiguous(&[n, 0]).unwrap();
            abi::described(std::ptr::null_mut(), DType::F32, &layout)
        };
        (p.x, p.weight, p.bias) = (empty(rows), empty(3), c_tensor(&bias));
        (p.residual, p.out) = (c_tensor(&out), c_tensor(&out));
        // SAFETY: tensors with elements lie in memory made above.
        let status = unsafe { unsloth_linear_forward(ctx.0, &p, std::ptr::null_mut()) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", abi::last_message());
        assert_eq!(
            out.download_output().values(),
            [11.0, 12.0, 13.0].repeat(rows)
        );
    }
}
