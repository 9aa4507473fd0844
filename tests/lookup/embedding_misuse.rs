//! Embedding through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{TestTensor, rng};
use unsloth::ffi::embedding::{
    unsloth_embedding_forward, unsloth_embedding_params, unsloth_embedding_supported,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_embedding_params>] = &[
    (
        |p| p.struct_size = 0,
        INVALID,
        "embedding: struct_size is 0, at least 488 is needed",
    ),
    (
        |p| p.table = absent(),
        INVALID,
        "embedding: table is absent (rank 0), it is required",
    ),
    (
        |p| p.ids = absent(),
        INVALID,
        "embedding: ids is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "embedding: out is absent (rank 0), it is required",
    ),
    (
        |p| p.table.rank = 3,
        INVALID,
        "embedding: table has rank 3, allowed: 2",
    ),
    (
        |p| p.ids.rank = 6,
        INVALID,
        "embedding: ids has rank 6, allowed: 1, 2, 3, 4, 5",
    ),
    (
        |p| p.table.dtype = DType::I32 as u32,
        INVALID,
        "embedding: table has dtype i32, allowed: f32, f16, bf16, \
         q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, tq1_0, tq2_0, q2_0",
    ),
    (
        |p| p.ids.dtype = DType::F32 as u32,
        INVALID,
        "embedding: ids has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.out.dtype = DType::I32 as u32,
        INVALID,
        "embedding: out has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.shape[0] = 3,
        INVALID,
        "embedding: out has shape [3, 4], expected [2, 4]",
    ),
    (
        |p| p.out.shape[1] = 3,
        INVALID,
        "embedding: out has shape [2, 3], expected [2, 4]",
    ),
    (
        |p| p.table.strides = [1, 5, 0, 0, 0, 0],
        INVALID,
        "embedding: table has stride 5 along its last dimension, allowed: 1",
    ),
    (
        |p| p.out.strides = [1, 1, 0, 0, 0, 0],
        INVALID,
        "embedding: out has shape [2, 4] with strides [1, 1]: elements of an output may not overlap",
    ),
    (
        |p| p.out.data = p.table.data,
        INVALID,
        "embedding: out overlaps table",
    ),
    (
        |p| p.out.data = p.ids.data,
        INVALID,
        "embedding: out overlaps ids",
    ),
    (
        |p| p.ids.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "embedding: data of ids is NULL",
    ),
    (
        |p| p.table.shape[0] = 4,
        INVALID,
        "embedding: ids has 4 at index 1, the table has 4 rows",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let layout = |rows| Layout::contiguous(&[rows, 4]).unwrap();
        let table = TestTensor::normal(&mut rng(), DType::F32, layout(5)).upload(memory);
        let ids = TestTensor::of(DType::I32, &[2], &[0.0, 4.0]).upload(memory);
        let out = TestTensor::poisoned(DType::F32, layout(2)).upload(memory);
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_embedding_params = unsafe { abi::zeroed_params() };
        (good.table, good.ids, good.out) = (c_tensor(&table), c_tensor(&ids), c_tensor(&out));
        let operation = Operation {
            name: "embedding",
            supported: unsloth_embedding_supported,
            forward: unsloth_embedding_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&out]);
    }
}
