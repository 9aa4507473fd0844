//! Collectives that add up.

use super::{INVALID, NEGATIVE, NONE};
use crate::common::abi::{Misuse, absent, shifted};
use unsloth::DType;
use unsloth::ffi::all_reduce::*;
use unsloth::ffi::all_reduce_rms_norm::*;
use unsloth::ffi::comm::*;
use unsloth::ffi::reduce_scatter::*;
use unsloth::ffi::status::*;

const ALL_REDUCE: &[Misuse<unsloth_all_reduce_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "all_reduce: struct_size is 100, at least 288 is needed",
    ),
    (
        |p| p.op = 5,
        INVALID,
        "all_reduce: op is 5, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)",
    ),
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: comm is NULL",
    ),
    (
        |p| p.comm = std::ptr::without_provenance_mut(77),
        UNSLOTH_STATUS_INVALID_HANDLE,
        "all_reduce: comm is not a live unsloth_comm handle (0x4d)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "all_reduce: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::Bool as u32,
        INVALID,
        "all_reduce: x has dtype bool, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| p.x.dtype = DType::Q4_0 as u32,
        INVALID,
        "all_reduce: x has dtype q4_0, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| {
            p.op = UNSLOTH_REDUCE_OP_AVG;
            p.x.dtype = DType::I32 as u32;
            p.out.dtype = DType::I32 as u32;
        },
        INVALID,
        "all_reduce: x has dtype i32, allowed with avg: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_reduce: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "all_reduce: out has dtype f16, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "all_reduce: out has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.out.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "all_reduce: out has shape [2, 4] with strides [1, 2], it must be contiguous",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "all_reduce: out overlaps x",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: data of x is NULL",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: data of out is NULL",
    ),
];

const ALL_REDUCE_RMS_NORM: &[Misuse<unsloth_all_reduce_rms_norm_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce_rms_norm: comm is NULL",
    ),
    (
        |p| p.comm = std::ptr::without_provenance_mut(77),
        UNSLOTH_STATUS_INVALID_HANDLE,
        "all_reduce_rms_norm: comm is not a live unsloth_comm handle (0x4d)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "all_reduce_rms_norm: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "all_reduce_rms_norm: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_reduce_rms_norm: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "all_reduce_rms_norm: out has dtype f16, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "all_reduce_rms_norm: out has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.out.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "all_reduce_rms_norm: out has shape [2, 4] with strides [1, 2], it must be contiguous",
    ),
    (
        |p| {
            p.residual = p.out;
            p.residual.shape[0] = 1;
        },
        INVALID,
        "all_reduce_rms_norm: residual has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.residual_out = p.x,
        INVALID,
        "all_reduce_rms_norm: residual is absent (rank 0), it is required",
    ),
    (
        |p| p.residual = p.out,
        INVALID,
        "all_reduce_rms_norm: residual_out overlaps out",
    ),
    (
        |p| {
            p.weight = p.x;
            p.weight.rank = 1;
            p.weight.shape[0] = 2;
        },
        INVALID,
        "all_reduce_rms_norm: weight has shape [2], expected [4]",
    ),
    (
        |p| p.weight_offset = 1.0,
        INVALID,
        "all_reduce_rms_norm: weight_offset is 1, without a weight it must be 0",
    ),
    (
        |p| p.epsilon = 0.0,
        INVALID,
        "all_reduce_rms_norm: epsilon is 0, it must be above 0",
    ),
    (
        |p| p.sequence = 2,
        INVALID,
        "all_reduce_rms_norm: sequence is 2, allowed: 0, 1",
    ),
    (
        |p| {
            p.sequence = 1;
            p.residual = p.out;
            p.residual.shape[0] = 3;
        },
        INVALID,
        "all_reduce_rms_norm: residual has shape [3, 4], expected [2, 4]",
    ),
    (
        |p| {
            p.sequence = 1;
            for x in [&mut p.x, &mut p.out] {
                x.rank = 1;
                x.shape[0] = 4;
            }
        },
        INVALID,
        "all_reduce_rms_norm: x has rank 1, at least 2 is needed",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "all_reduce_rms_norm: out overlaps x",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce_rms_norm: data of x is NULL",
    ),
];

const REDUCE_SCATTER: &[Misuse<unsloth_reduce_scatter_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "reduce_scatter: comm is NULL",
    ),
    (
        |p| p.op = 9,
        INVALID,
        "reduce_scatter: op is 9, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "reduce_scatter: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::Bool as u32,
        INVALID,
        "reduce_scatter: x has dtype bool, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| p.out.dtype = DType::I32 as u32,
        INVALID,
        "reduce_scatter: out has dtype i32, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "reduce_scatter: out has shape [1, 4], expected [2, 4]",
    ),
    (
        |p| p.counts = NEGATIVE.as_ptr(),
        INVALID,
        "reduce_scatter: counts has -1 for rank 0, allowed: 0 to 2",
    ),
    (
        |p| p.counts = NONE.as_ptr(),
        INVALID,
        "reduce_scatter: counts add up to 0, x has 2 rows",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "reduce_scatter: out overlaps x",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "reduce_scatter: data of out is NULL",
    ),
];

#[test]
fn misuse_of_reductions_is_refused_and_writes_nothing() {
    check!(
        "all_reduce",
        unsloth_all_reduce_params,
        unsloth_all_reduce_supported,
        unsloth_all_reduce_forward,
        ALL_REDUCE
    );
    check!(
        "reduce_scatter",
        unsloth_reduce_scatter_params,
        unsloth_reduce_scatter_supported,
        unsloth_reduce_scatter_forward,
        REDUCE_SCATTER
    );
    check!(
        "all_reduce_rms_norm",
        unsloth_all_reduce_rms_norm_params,
        unsloth_all_reduce_rms_norm_supported,
        unsloth_all_reduce_rms_norm_forward,
        ALL_REDUCE_RMS_NORM,
        epsilon = 1e-5
    );
}
