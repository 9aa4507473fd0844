//! What is refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor, shifted};
use crate::common::{TestTensor, contiguous, rng};
use unsloth::ffi::linear_cross_entropy::*;
use unsloth::ffi::status::*;
use unsloth::{Buffer, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_linear_cross_entropy_params>] = &[
    (
        |p| p.x = absent(),
        INVALID,
        "linear_cross_entropy: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.rank = 1,
        INVALID,
        "linear_cross_entropy: x has rank 1, at least 2 is needed",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "linear_cross_entropy: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.weight.dtype = DType::Q5_1 as u32,
        UNSLOTH_STATUS_UNSUPPORTED,
        "linear_cross_entropy: weight has dtype q5_1, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.strides[1] = 2,
        INVALID,
        "linear_cross_entropy: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| p.weight.shape[1] = 3,
        INVALID,
        "linear_cross_entropy: weight has shape [8, 3], expected [8, 4]",
    ),
    (
        |p| (p.weight.shape, p.weight.strides) = ([4, 8, 0, 0, 0, 0], [8, 1, 0, 0, 0, 0]),
        INVALID,
        "linear_cross_entropy: weight has shape [4, 8], expected [8, 4] = [out_features, \
         in_features]; looks transposed",
    ),
    (
        |p| p.weight.shape[0] = 0,
        INVALID,
        "linear_cross_entropy: bias has shape [8], expected [0]",
    ),
    (
        |p| (p.weight.shape[0], p.bias) = (0, absent()),
        INVALID,
        "linear_cross_entropy: weight has no rows, there is no target among them",
    ),
    (
        |p| p.bias.shape[0] = 7,
        INVALID,
        "linear_cross_entropy: bias has shape [7], expected [8]",
    ),
    (
        |p| p.dx.dtype = DType::F16 as u32,
        INVALID,
        "linear_cross_entropy: dx has dtype f16, x has f32",
    ),
    (
        |p| p.dx.shape[0] = 1,
        INVALID,
        "linear_cross_entropy: dx has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.dx.strides[0] = 0,
        INVALID,
        "linear_cross_entropy: dx has shape [2, 4] with strides [0, 1]: elements of an output may \
         not overlap",
    ),
    (
        |p| p.dweight.shape[0] = 7,
        INVALID,
        "linear_cross_entropy: dweight has shape [7, 4], expected [8, 4]",
    ),
    (
        |p| p.dweight.dtype = DType::I32 as u32,
        INVALID,
        "linear_cross_entropy: dweight has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| (p.accumulate, p.dbias.dtype) = (1, DType::Bf16 as u32),
        INVALID,
        "linear_cross_entropy: dbias has dtype bf16, allowed with accumulate: f32",
    ),
    (
        |p| p.dbias.shape[0] = 9,
        INVALID,
        "linear_cross_entropy: dbias has shape [9], expected [8]",
    ),
    (
        |p| p.targets.dtype = DType::F32 as u32,
        INVALID,
        "linear_cross_entropy: targets has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.targets.shape[0] = 3,
        INVALID,
        "linear_cross_entropy: targets has shape [3], expected [2]",
    ),
    (
        |p| {
            (p.loss, p.losses, p.lse) = (absent(), absent(), absent());
            (p.dx, p.dweight, p.dbias) = (absent(), absent(), absent());
        },
        INVALID,
        "linear_cross_entropy: loss is absent (rank 0), and so are losses, lse and gradients: one is \
         needed",
    ),
    (
        |p| p.loss.shape[0] = 2,
        INVALID,
        "linear_cross_entropy: loss has shape [2], expected [1]",
    ),
    (
        |p| p.losses.dtype = DType::Bf16 as u32,
        INVALID,
        "linear_cross_entropy: losses has dtype bf16, allowed: f32",
    ),
    (
        |p| p.reduction = 2,
        INVALID,
        "linear_cross_entropy: reduction is 2, allowed: 0 (mean), 1 (sum)",
    ),
    (
        |p| (p.reduction, p.denominator) = (1, p.dloss),
        INVALID,
        "linear_cross_entropy: denominator is there, without a mean it has no use",
    ),
    (
        |p| p.has_ignore_index = 2,
        INVALID,
        "linear_cross_entropy: has_ignore_index is 2, allowed: 0, 1",
    ),
    (
        |p| p.accumulate = 3,
        INVALID,
        "linear_cross_entropy: accumulate is 3, allowed: 0, 1",
    ),
    (
        |p| p.reserved = 1,
        INVALID,
        "linear_cross_entropy: reserved is 1, allowed: 0",
    ),
    (
        |p| p.chunk_tokens = -1,
        INVALID,
        "linear_cross_entropy: chunk_tokens is -1, at least 0 is needed",
    ),
    (
        |p| p.label_smoothing = 1.5,
        INVALID,
        "linear_cross_entropy: label_smoothing is 1.5, allowed: 0 to 1",
    ),
    (
        |p| p.softcap = f32::NAN,
        INVALID,
        "linear_cross_entropy: softcap is NaN, a finite number is needed",
    ),
    (
        |p| p.dx.data = p.x.data,
        INVALID,
        "linear_cross_entropy: dx overlaps x",
    ),
    (
        |p| p.dweight = p.weight,
        INVALID,
        "linear_cross_entropy: dweight overlaps weight",
    ),
    (
        |p| p.x = shifted(&p.dx),
        INVALID,
        "linear_cross_entropy: dx overlaps x",
    ),
    (
        |p| p.workspace = p.dweight.data,
        INVALID,
        "linear_cross_entropy: workspace overlaps dweight",
    ),
    (
        |p| p.targets.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear_cross_entropy: data of targets is NULL",
    ),
    (
        // The second chunk's: nothing of the first was written.
        |p| p.has_ignore_index = 1,
        INVALID,
        "linear_cross_entropy: targets has -100 at index 1, allowed: 0 to 7, and 0 to ignore the \
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
        let targets = TestTensor::of(DType::I32, &[2], &[1.0, -100.0]).upload(&memory);
        let poisoned =
            |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(&memory);
        let (loss, losses, lse) = (poisoned(&[1]), poisoned(&[2]), poisoned(&[2]));
        let (dx, dweight, dbias) = (poisoned(&[2, 4]), poisoned(&[8, 4]), poisoned(&[8]));
        let dloss = TestTensor::of(DType::F32, &[1], &[1.0]).upload(&memory);
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_linear_cross_entropy_params = unsafe { abi::zeroed_params() };
        (good.x, good.weight, good.bias) = (c_tensor(&x), c_tensor(&weight), c_tensor(&bias));
        (good.targets, good.dloss) = (c_tensor(&targets), c_tensor(&dloss));
        (good.loss, good.losses, good.lse) = (c_tensor(&loss), c_tensor(&losses), c_tensor(&lse));
        (good.dx, good.dweight, good.dbias) = (c_tensor(&dx), c_tensor(&dweight), c_tensor(&dbias));
        good.chunk_tokens = 1;
        let mut size = 0;
        // SAFETY: the struct is there, and the size can be written.
        let asked = unsafe { unsloth_linear_cross_entropy_workspace_size(ctx.0, &good, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = Buffer::new(&memory, size).unwrap();
        (good.workspace, good.workspace_size) = (workspace.as_ptr().cast(), size);
        let operation = Operation {
            name: "linear_cross_entropy",
            supported: unsloth_linear_cross_entropy_supported,
            forward: unsloth_linear_cross_entropy_forward,
        };
        let outputs = [&loss, &losses, &lse, &dx, &dweight, &dbias];
        operation.check_on(&ctx, good, MISUSE, &outputs);
    }
}
