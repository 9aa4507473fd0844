//! QK-norm and RoPE in one pass, and their gradients, through the C ABI with arguments that must be
//! refused.

use crate::common::abi::{self, Misuse, Operation, absent, assert_fails, c_tensor, shifted};
use crate::common::{TestTensor, contiguous, rng};
use unsloth::ffi::qk_norm_rope::backward::*;
use unsloth::ffi::qk_norm_rope::*;
use unsloth::ffi::status::*;
use unsloth::{Buffer, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// How good arguments are spoiled. What is checked for RoPE too, and by its functions, is tested there.
const MISUSE: &[Misuse<unsloth_qk_norm_rope_params>] = &[
    (
        |p| p.reserved = 1,
        INVALID,
        "qk_norm_rope: reserved is 1, allowed: 0",
    ),
    (
        |p| (p.q, p.q_out, p.k, p.k_out) = (absent(), absent(), absent(), absent()),
        INVALID,
        "qk_norm_rope: q and k are absent, one is required",
    ),
    (
        |p| p.q.rank = 2,
        INVALID,
        "qk_norm_rope: q has rank 2, allowed: 3, 4",
    ),
    (
        |p| p.q_out.dtype = DType::F16 as u32,
        INVALID,
        "qk_norm_rope: q_out has dtype f16, q has f32",
    ),
    (
        |p| (p.k.shape[2], p.k_out.shape[2]) = (6, 6),
        INVALID,
        "qk_norm_rope: k has shape [2, 1, 6], q has [2, 2, 8]: only the heads may differ",
    ),
    (
        |p| p.q_out = shifted(&p.q),
        INVALID,
        "qk_norm_rope: q_out overlaps q",
    ),
    (
        |p| p.k_out.data = p.q_out.data,
        INVALID,
        "qk_norm_rope: k_out overlaps q_out",
    ),
    (
        |p| p.q_weight.dtype = DType::I32 as u32,
        INVALID,
        "qk_norm_rope: q_weight has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.k_weight.shape[0] = 7,
        INVALID,
        "qk_norm_rope: k_weight has shape [7], expected [8]",
    ),
    (
        |p| p.q_weight.strides[0] = 2,
        INVALID,
        "qk_norm_rope: q_weight has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| (p.k, p.k_out) = (absent(), absent()),
        INVALID,
        "qk_norm_rope: k_weight is there, without k it has no use",
    ),
    (
        |p| p.q_weight.data = p.q_out.data,
        INVALID,
        "qk_norm_rope: q_out overlaps q_weight",
    ),
    (
        |p| p.weight_offset = f32::NAN,
        INVALID,
        "qk_norm_rope: weight_offset is NaN, a finite number is needed",
    ),
    (
        |p| (p.weight_offset, p.q_weight, p.k_weight) = (1.0, absent(), absent()),
        INVALID,
        "qk_norm_rope: weight_offset is 1, without a weight it must be 0",
    ),
    (
        |p| p.epsilon = 0.0,
        INVALID,
        "qk_norm_rope: epsilon is 0, it must be above 0",
    ),
    (
        |p| p.rotation.rotary_dim = 3,
        INVALID,
        "qk_norm_rope: rotary_dim is 3: an even number of components is rotated",
    ),
    (
        |p| p.position_offset = 1,
        INVALID,
        "qk_norm_rope: position_offset is 1 and positions are there: set one",
    ),
    (
        |p| p.positions.shape[0] = 3,
        INVALID,
        "qk_norm_rope: positions has shape [3], expected [2]",
    ),
    (
        |p| p.k_weight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "qk_norm_rope: data of k_weight is NULL",
    ),
];

/// As [`MISUSE`], of the gradients.
const BACKWARD_MISUSE: &[Misuse<unsloth_qk_norm_rope_backward_params>] = &[
    (
        |p| p.accumulate = 2,
        INVALID,
        "qk_norm_rope_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.q = absent(),
        INVALID,
        "qk_norm_rope_backward: dq_out is there, without q it has no use",
    ),
    (
        |p| (p.dk_out, p.dk) = (absent(), absent()),
        INVALID,
        "qk_norm_rope_backward: dk_out is absent, k is there",
    ),
    (
        |p| {
            (p.q, p.dq_out, p.dq) = (absent(), absent(), absent());
            (p.k, p.dk_out, p.dk) = (absent(), absent(), absent());
        },
        INVALID,
        "qk_norm_rope_backward: dq_out and dk_out are absent, one is required",
    ),
    (
        |p| p.q.shape[1] = 1,
        INVALID,
        "qk_norm_rope_backward: q has shape [2, 1, 8], dq_out has [2, 2, 8]",
    ),
    (
        |p| p.k.dtype = DType::F16 as u32,
        INVALID,
        "qk_norm_rope_backward: k has dtype f16, dk_out has f32",
    ),
    (
        |p| p.dq.shape[0] = 1,
        INVALID,
        "qk_norm_rope_backward: dq has shape [1, 2, 8], dq_out has [2, 2, 8]",
    ),
    (
        |p| p.q_weight = absent(),
        INVALID,
        "qk_norm_rope_backward: dq_weight is there, without q_weight it has no use",
    ),
    (
        |p| p.dk_weight.shape[0] = 7,
        INVALID,
        "qk_norm_rope_backward: dk_weight has shape [7], expected [8]",
    ),
    (
        |p| (p.accumulate, p.dq_weight.dtype) = (1, DType::Bf16 as u32),
        INVALID,
        "qk_norm_rope_backward: dq_weight has dtype bf16, allowed with accumulate: f32",
    ),
    (
        |p| p.dk_weight.data = p.dq_weight.data,
        INVALID,
        "qk_norm_rope_backward: dk_weight overlaps dq_weight",
    ),
    (
        |p| p.q.data = p.dq.data,
        INVALID,
        "qk_norm_rope_backward: dq overlaps q",
    ),
    (
        |p| p.epsilon = -1.0,
        INVALID,
        "qk_norm_rope_backward: epsilon is -1, it must be above 0",
    ),
    (
        |p| p.workspace = p.dq.data,
        INVALID,
        "qk_norm_rope_backward: workspace overlaps dq",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let layout = |heads| contiguous(&[2, heads, 8]);
        let input =
            |heads| TestTensor::normal(&mut rng(), DType::F32, layout(heads)).upload(&memory);
        let output = |heads| TestTensor::poisoned(DType::F32, layout(heads)).upload(&memory);
        let weight = || TestTensor::of(DType::F32, &[8], &[1.0; 8]).upload(&memory);
        let (q, k, q_out, k_out) = (input(2), input(1), output(2), output(1));
        let (q_weight, k_weight) = (weight(), weight());
        let positions = TestTensor::of(DType::I32, &[2], &[0.0, 3.0]).upload(&memory);
        // SAFETY: integers, floats and pointers, size first.
        let mut good: unsloth_qk_norm_rope_params = unsafe { abi::zeroed_params() };
        good.epsilon = 1e-5;
        (good.q, good.q_out) = (c_tensor(&q), c_tensor(&q_out));
        (good.k, good.k_out) = (c_tensor(&k), c_tensor(&k_out));
        (good.q_weight, good.k_weight) = (c_tensor(&q_weight), c_tensor(&k_weight));
        good.positions = c_tensor(&positions);
        let operation = Operation {
            name: "qk_norm_rope",
            supported: unsloth_qk_norm_rope_supported,
            forward: unsloth_qk_norm_rope_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&q_out, &k_out]);

        let (dq_out, dk_out, dq, dk) = (input(2), input(1), output(2), output(1));
        let gradient = || TestTensor::poisoned(DType::F32, contiguous(&[8])).upload(&memory);
        let (dq_weight, dk_weight) = (gradient(), gradient());
        // SAFETY: as above.
        let mut back: unsloth_qk_norm_rope_backward_params = unsafe { abi::zeroed_params() };
        back.epsilon = 1e-5;
        (back.q, back.dq_out, back.dq) = (good.q, c_tensor(&dq_out), c_tensor(&dq));
        (back.k, back.dk_out, back.dk) = (good.k, c_tensor(&dk_out), c_tensor(&dk));
        (back.q_weight, back.k_weight) = (good.q_weight, good.k_weight);
        (back.dq_weight, back.dk_weight) = (c_tensor(&dq_weight), c_tensor(&dk_weight));
        back.positions = good.positions;
        let mut size = 0;
        // SAFETY: the struct is there, and the size can be written.
        let asked =
            unsafe { unsloth_qk_norm_rope_backward_workspace_size(ctx.0, &back, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = Buffer::from_slice(&memory, &vec![f32::NAN; size / 4]).unwrap();
        assert_eq!(workspace.size(), size);
        (back.workspace, back.workspace_size) = (workspace.as_ptr().cast(), size);
        let outputs = [&dq, &dk, &dq_weight, &dk_weight];
        let mut short = back;
        short.workspace_size = size - 1;
        // SAFETY: all tensors lie in live memory.
        let got = unsafe { unsloth_qk_norm_rope_backward(ctx.0, &short, std::ptr::null_mut()) };
        let message = format!(
            "qk_norm_rope_backward: workspace_size is {} bytes, {size} are required",
            size - 1
        );
        assert_fails(got, UNSLOTH_STATUS_WORKSPACE_TOO_SMALL, &message);
        let operation = Operation {
            name: "qk_norm_rope_backward",
            supported: unsloth_qk_norm_rope_backward_supported,
            forward: unsloth_qk_norm_rope_backward,
        };
        operation.check_on(&ctx, back, BACKWARD_MISUSE, &outputs);
    }
}
