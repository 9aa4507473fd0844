//! What is refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{TestTensor, contiguous, rng};
use unsloth::ffi::linear_logprob::backward::*;
use unsloth::ffi::linear_logprob::*;
use unsloth::ffi::status::*;
use unsloth::{Buffer, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_linear_logprob_params>] = &[
    (
        |p| p.x = absent(),
        INVALID,
        "linear_logprob: x is absent (rank 0), it is required",
    ),
    (
        |p| p.weight.shape[1] = 3,
        INVALID,
        "linear_logprob: weight has shape [8, 3], expected [8, 4]",
    ),
    (
        |p| p.ids.dtype = DType::F32 as u32,
        INVALID,
        "linear_logprob: ids has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.ids.shape[0] = 3,
        INVALID,
        "linear_logprob: ids has shape [3], expected [2]",
    ),
    (
        |p| (p.logprobs, p.entropy, p.lse) = (absent(), absent(), absent()),
        INVALID,
        "linear_logprob: logprobs is absent (rank 0), and so are entropy and lse: one is needed",
    ),
    (
        |p| p.entropy.dtype = DType::F16 as u32,
        INVALID,
        "linear_logprob: entropy has dtype f16, allowed: f32",
    ),
    (
        |p| p.lse.strides[0] = 2,
        INVALID,
        "linear_logprob: lse has shape [2] with strides [2], it must be contiguous",
    ),
    (
        |p| p.temperature = -1.0,
        INVALID,
        "linear_logprob: temperature is -1, it must not be negative",
    ),
    (
        |p| p.softcap = f32::INFINITY,
        INVALID,
        "linear_logprob: softcap is inf, a finite number is needed",
    ),
    (
        |p| p.ignore_index = 5,
        INVALID,
        "linear_logprob: ignore_index is 5, without has_ignore_index",
    ),
    (
        |p| p.chunk_tokens = -7,
        INVALID,
        "linear_logprob: chunk_tokens is -7, at least 0 is needed",
    ),
    (
        |p| p.entropy.data = p.logprobs.data,
        INVALID,
        "linear_logprob: entropy overlaps logprobs",
    ),
    (
        |p| p.has_ignore_index = 1,
        INVALID,
        "linear_logprob: ids has -100 at index 1, allowed: 0 to 7, and 0 to ignore the token",
    ),
];

const BACKWARD_MISUSE: &[Misuse<unsloth_linear_logprob_backward_params>] = &[
    (
        |p| (p.dlogprobs, p.dentropy) = (absent(), absent()),
        INVALID,
        "linear_logprob_backward: dlogprobs is absent (rank 0), and so is dentropy: one is needed",
    ),
    (
        |p| (p.dx, p.dweight, p.dbias) = (absent(), absent(), absent()),
        INVALID,
        "linear_logprob_backward: dx is absent (rank 0), and so are dweight and dbias: one is needed",
    ),
    (
        |p| p.dlogprobs.shape[0] = 1,
        INVALID,
        "linear_logprob_backward: dlogprobs has shape [1], expected [2]",
    ),
    (
        |p| p.dentropy.dtype = DType::Bf16 as u32,
        INVALID,
        "linear_logprob_backward: dentropy has dtype bf16, allowed: f32",
    ),
    (
        |p| p.dx.dtype = DType::F16 as u32,
        INVALID,
        "linear_logprob_backward: dx has dtype f16, x has f32",
    ),
    (
        |p| (p.accumulate, p.dweight.dtype) = (1, DType::F16 as u32),
        INVALID,
        "linear_logprob_backward: dweight has dtype f16, allowed with accumulate: f32",
    ),
    (
        |p| p.accumulate = 2,
        INVALID,
        "linear_logprob_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.reserved = 1,
        INVALID,
        "linear_logprob_backward: reserved is 1, allowed: 0",
    ),
    (
        |p| p.temperature = f32::NAN,
        INVALID,
        "linear_logprob_backward: temperature is NaN, a finite number is needed",
    ),
    (
        |p| p.dx.data = p.x.data,
        INVALID,
        "linear_logprob_backward: dx overlaps x",
    ),
    (
        |p| p.dbias.data = p.dlogprobs.data,
        INVALID,
        "linear_logprob_backward: dbias overlaps dlogprobs",
    ),
    (
        |p| p.has_ignore_index = 1,
        INVALID,
        "linear_logprob_backward: ids has -100 at index 1, allowed: 0 to 7, and 0 to ignore the \
         token",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let rng = &mut rng();
        let mut normal = |shape: &[usize]| {
            TestTensor::normal(rng, DType::F32, contiguous(shape)).upload(&memory)
        };
        let (x, weight, bias) = (normal(&[2, 4]), normal(&[8, 4]), normal(&[8]));
        let (dlogprobs, dentropy) = (normal(&[8]), normal(&[2]));
        let ids = TestTensor::of(DType::I32, &[2], &[1.0, -100.0]).upload(&memory);
        let poisoned =
            |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(&memory);
        let (logprobs, entropy, lse) = (poisoned(&[2]), poisoned(&[2]), poisoned(&[2]));
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_linear_logprob_params = unsafe { abi::zeroed_params() };
        (good.x, good.weight, good.bias) = (c_tensor(&x), c_tensor(&weight), c_tensor(&bias));
        (good.ids, good.logprobs) = (c_tensor(&ids), c_tensor(&logprobs));
        (good.entropy, good.lse) = (c_tensor(&entropy), c_tensor(&lse));
        good.chunk_tokens = 1;
        let mut size = 0;
        // SAFETY: the struct is there, and the size can be written.
        let asked = unsafe { unsloth_linear_logprob_workspace_size(ctx.0, &good, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = Buffer::new(&memory, size).unwrap();
        (good.workspace, good.workspace_size) = (workspace.as_ptr().cast(), size);
        let operation = Operation {
            name: "linear_logprob",
            supported: unsloth_linear_logprob_supported,
            forward: unsloth_linear_logprob_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&logprobs, &entropy, &lse]);

        let (dx, dweight, dbias) = (poisoned(&[2, 4]), poisoned(&[8, 4]), poisoned(&[8]));
        // SAFETY: as above.
        let mut good: unsloth_linear_logprob_backward_params = unsafe { abi::zeroed_params() };
        (good.x, good.weight, good.bias) = (c_tensor(&x), c_tensor(&weight), c_tensor(&bias));
        (good.ids, good.dentropy) = (c_tensor(&ids), c_tensor(&dentropy));
        good.dlogprobs = c_tensor(&dlogprobs);
        good.dlogprobs.shape[0] = 2;
        (good.dx, good.dweight, good.dbias) = (c_tensor(&dx), c_tensor(&dweight), c_tensor(&dbias));
        good.chunk_tokens = 1;
        // SAFETY: as above.
        let asked =
            unsafe { unsloth_linear_logprob_backward_workspace_size(ctx.0, &good, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = Buffer::new(&memory, size).unwrap();
        (good.workspace, good.workspace_size) = (workspace.as_ptr().cast(), size);
        let operation = Operation {
            name: "linear_logprob_backward",
            supported: unsloth_linear_logprob_backward_supported,
            forward: unsloth_linear_logprob_backward,
        };
        operation.check_on(&ctx, good, BACKWARD_MISUSE, &[&dx, &dweight, &dbias]);
    }
}
