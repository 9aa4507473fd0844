//! RMSNorm through the C ABI with arguments that must be refused.

use std::ptr;

use crate::common::abi::{self, Handle, Misuse, Operation, absent, assert_fails, c_tensor};
use crate::common::{TestTensor, rng};
use unsloth::ffi::context::{unsloth_context_create, unsloth_context_destroy};
use unsloth::ffi::rms_norm::{
    unsloth_rms_norm_forward, unsloth_rms_norm_params, unsloth_rms_norm_supported,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const MISUSE: &[Misuse<unsloth_rms_norm_params>] = &[
    (
        |p| p.struct_size = 8,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: struct_size is 8, at least 696 is needed",
    ),
    (
        |p| p.struct_size = 1 << 20,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: struct_size is 1048576, above the maximum 65536",
    ),
    (
        |p| p.x = absent(),
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.rank = 7,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has rank 7, above the maximum 6",
    ),
    (
        |p| p.x.data = ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "rms_norm: data of x is NULL",
    ),
    (
        |p| p.x.shape[0] = -1,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has size -1 in dimension 0, negative",
    ),
    (
        |p| p.x.strides[0] = -8,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has stride -8 in dimension 0, negative",
    ),
    (
        |p| p.x.shape[0] = i64::MAX,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has shape [9223372036854775807, 8] with strides [8, 1]: it overflows the address space",
    ),
    (
        |p| p.x.strides = [16, 2, 0, 0, 0, 0],
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.x.dtype = 0,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has dtype 0, which does not exist",
    ),
    (
        |p| p.x.dtype = 8,
        UNSLOTH_STATUS_UNSUPPORTED,
        "rms_norm: x has dtype f8e5m2, which no operation of this version takes",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: out has dtype f16, x has f32",
    ),
    (
        |p| p.out.shape[0] = 3,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: out has shape [3, 8], x has [2, 8]",
    ),
    (
        |p| p.out.strides = [0, 1, 0, 0, 0, 0],
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: out has shape [2, 8] with strides [0, 1]: elements of an output may not overlap",
    ),
    (
        |p| p.out = overlapping(&p.x),
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: out overlaps x",
    ),
    (
        |p| p.weight.shape[0] = 7,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: weight has shape [7], expected [8]",
    ),
    (
        |p| p.weight = p.out,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: weight has shape [2, 8], expected [8]",
    ),
    (
        |p| p.weight.data = p.out.data,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: out overlaps weight",
    ),
    (
        |p| {
            p.residual = absent();
            p.residual_out = p.weight;
        },
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: residual is absent (rank 0), it is required",
    ),
    (
        |p| p.residual_out = p.out,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: residual_out overlaps out",
    ),
    (
        |p| p.epsilon = f32::NAN,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: epsilon is NaN, a finite number is needed",
    ),
    (
        |p| p.epsilon = -1.0,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: epsilon is -1, it must be above 0",
    ),
    (
        |p| p.weight_offset = f32::INFINITY,
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "rms_norm: weight_offset is inf, a finite number is needed",
    ),
];

/// The same memory, four bytes further on.
fn overlapping(t: &unsloth::ffi::tensor::unsloth_tensor) -> unsloth::ffi::tensor::unsloth_tensor {
    let mut shifted = *t;
    shifted.data = t.data.wrapping_byte_add(4);
    shifted
}

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let layout = Layout::contiguous(&[2, 8]).unwrap();
        let input = || TestTensor::normal(&mut rng(), DType::F32, layout).upload(memory);
        let output = || TestTensor::poisoned(DType::F32, layout).upload(memory);
        let (x, residual, out, sum) = (input(), input(), output(), output());
        let weight = TestTensor::of(DType::F32, &[8], &[1.0; 8]).upload(memory);
        let good = unsloth_rms_norm_params {
            struct_size: size_of::<unsloth_rms_norm_params>() as u32,
            epsilon: 1e-5,
            weight_offset: 0.0,
            reserved: 0,
            x: c_tensor(&x),
            out: c_tensor(&out),
            weight: c_tensor(&weight),
            residual: c_tensor(&residual),
            residual_out: c_tensor(&sum),
        };
        let mut misaligned = good;
        misaligned.x.data = misaligned.x.data.wrapping_byte_add(1);
        // SAFETY: every tensor that passes validation lies in memory made above.
        let status = unsafe { unsloth_rms_norm_forward(ctx.0, &misaligned, ptr::null_mut()) };
        assert_eq!(status, UNSLOTH_STATUS_INVALID_ARGUMENT);
        assert!(abi::last_message().ends_with("which is not aligned to the 4 bytes of f32"));
        let operation = Operation {
            name: "rms_norm",
            supported: unsloth_rms_norm_supported,
            forward: unsloth_rms_norm_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&out, &sum]);
    }
}

#[test]
fn bad_handles_and_pointers() {
    let ctx = Handle::cpu();
    let mut dead = ptr::null_mut();
    // SAFETY: valid for a write; NULL params mean the defaults.
    unsafe { unsloth_context_create(ptr::null(), &mut dead) };
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_context_destroy(dead) },
        UNSLOTH_STATUS_SUCCESS
    );
    // SAFETY: NULL and destroyed handles are what is tested; NULL params are refused.
    unsafe {
        let forward = |ctx| unsloth_rms_norm_forward(ctx, ptr::null(), ptr::null_mut());
        assert_fails(
            forward(ptr::null_mut()),
            UNSLOTH_STATUS_NULL_POINTER,
            "rms_norm: ctx is NULL",
        );
        assert_fails(
            forward(ctx.0),
            UNSLOTH_STATUS_NULL_POINTER,
            "rms_norm: params is NULL",
        );
        assert_eq!(forward(dead), UNSLOTH_STATUS_INVALID_HANDLE);
        assert!(abi::last_message().starts_with("rms_norm: ctx is not a live unsloth_context"));
        let odd = ptr::without_provenance(0x1001);
        let status = unsloth_rms_norm_forward(ctx.0, odd, ptr::null_mut());
        assert_fails(
            status,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "rms_norm: params 0x1001 is not aligned to 8 bytes",
        );
    }
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_context_destroy(dead) },
        UNSLOTH_STATUS_INVALID_HANDLE
    );
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_context_destroy(ptr::null_mut()) },
        UNSLOTH_STATUS_SUCCESS
    );
}

#[test]
fn queries_ignore_data() {
    let ctx = Handle::cpu();
    let layout = Layout::contiguous(&[2, 8]).unwrap();
    let mut params = unsloth_rms_norm_params {
        struct_size: size_of::<unsloth_rms_norm_params>() as u32,
        epsilon: 1e-5,
        weight_offset: 0.0,
        reserved: 0,
        x: abi::described(ptr::null_mut(), DType::Bf16, &layout),
        out: abi::described(ptr::null_mut(), DType::Bf16, &layout),
        weight: absent(),
        residual: absent(),
        residual_out: absent(),
    };
    let mut implementation = 0;
    // SAFETY: pointers to live locals; queries read no tensor data.
    unsafe {
        let status = unsloth_rms_norm_supported(ctx.0, &params, &mut implementation);
        assert_eq!((status, implementation), (UNSLOTH_STATUS_SUCCESS, 1));
        assert_eq!(
            unsloth_rms_norm_supported(ctx.0, &params, ptr::null_mut()),
            UNSLOTH_STATUS_SUCCESS
        );
        params.out.shape[1] = 9;
        implementation = 77;
        let status = unsloth_rms_norm_supported(ctx.0, &params, &mut implementation);
        assert_eq!(
            (status, implementation),
            (UNSLOTH_STATUS_INVALID_ARGUMENT, 77)
        );
    }
}
