//! The gated feed-forward block through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Handle, Misuse, Operation, absent, assert_fails, c_tensor};
use crate::common::{TestTensor, contexts, rng};
use unsloth::ffi::mlp::{
    unsloth_mlp_forward, unsloth_mlp_params, unsloth_mlp_supported, unsloth_mlp_workspace_size,
};
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// Two tokens, hidden 4, intermediate 3.
const MISUSE: &[Misuse<unsloth_mlp_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "mlp: struct_size is 100, at least 1984 is needed",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "mlp: x is absent (rank 0), it is required",
    ),
    (
        |p| p.gate_weight = absent(),
        INVALID,
        "mlp: gate_weight and gate_up_weight are absent, one is required",
    ),
    (
        |p| p.up_weight = absent(),
        INVALID,
        "mlp: up_weight is absent (rank 0), it is required",
    ),
    (
        |p| p.down_weight = absent(),
        INVALID,
        "mlp: down_weight is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "mlp: out is absent (rank 0), it is required",
    ),
    (
        |p| p.gate_up_weight = p.gate_weight,
        INVALID,
        "mlp: gate_weight and gate_up_weight are both there: set one",
    ),
    (
        |p| {
            p.gate_up_weight = p.gate_weight;
            (p.gate_weight, p.up_weight, p.up_bias) = (absent(), absent(), p.down_bias);
        },
        INVALID,
        "mlp: up_bias and gate_up_weight are both there: set one",
    ),
    (
        |p| p.gate_up_bias = p.down_bias,
        INVALID,
        "mlp: gate_up_bias is there without gate_up_weight",
    ),
    (
        |p| {
            p.gate_up_weight = p.gate_weight;
            (p.gate_weight, p.up_weight) = (absent(), absent());
        },
        INVALID,
        "mlp: gate_up_weight has 3 rows, an even number is needed",
    ),
    (
        |p| p.activation = 8,
        INVALID,
        "mlp: activation is 8, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)",
    ),
    (
        |p| p.gate_order = 8,
        INVALID,
        "mlp: gate_order is 8, allowed: 0 (gate first), 1 (up first)",
    ),
    (
        |p| p.gate_weight.dtype = DType::I64 as u32,
        INVALID,
        "mlp: gate_weight has dtype i64, allowed: f32, f16, bf16, \
         q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, tq1_0, tq2_0, q2_0, i8, ternary, f8e4m3",
    ),
    (
        |p| p.out.dtype = DType::Bf16 as u32,
        INVALID,
        "mlp: out has dtype bf16, x has f32",
    ),
    (
        |p| p.gate_weight.shape[1] = 3,
        INVALID,
        "mlp: gate_weight has shape [3, 3], expected [3, 4]",
    ),
    (
        |p| p.up_weight.shape[0] = 2,
        INVALID,
        "mlp: up_weight has shape [2, 4], gate_weight has [3, 4]",
    ),
    (
        |p| p.down_weight.shape[1] = 2,
        INVALID,
        "mlp: down_weight has shape [4, 2], expected [4, 3]",
    ),
    (
        |p| p.down_bias.shape[0] = 3,
        INVALID,
        "mlp: down_bias has shape [3], expected [4]",
    ),
    (
        |p| p.out.shape[1] = 3,
        INVALID,
        "mlp: out has shape [2, 3], expected [2, 4]",
    ),
    (
        |p| p.residual = p.down_weight,
        INVALID,
        "mlp: residual has shape [4, 3], out has [2, 4]",
    ),
    (
        |p| p.intermediate_norm = p.down_bias,
        INVALID,
        "mlp: intermediate_norm has shape [4], expected [3]",
    ),
    (
        |p| {
            p.intermediate_norm = p.down_bias;
            p.intermediate_norm.shape[0] = 3;
        },
        INVALID,
        "mlp: norm_epsilon is 0, it must be above 0",
    ),
    (
        |p| {
            p.intermediate_norm = p.down_bias;
            p.intermediate_norm.shape[0] = 3;
            p.norm_epsilon = f32::NAN;
        },
        INVALID,
        "mlp: norm_epsilon is NaN, a finite number is needed",
    ),
    (
        |p| p.x_norm = p.x,
        INVALID,
        "mlp: x_norm has shape [2, 4], expected [4]",
    ),
    (
        |p| (p.x_norm, p.x_norm_weight_offset) = (p.down_bias, f32::NAN),
        INVALID,
        "mlp: x_norm_weight_offset is NaN, a finite number is needed",
    ),
    (
        |p| p.x_norm = p.down_bias,
        INVALID,
        "mlp: x_norm_epsilon is 0, it must be above 0",
    ),
    (
        |p| p.gate_up_out = p.x,
        INVALID,
        "mlp: gate_up_out has shape [2, 4], expected [2, 6]",
    ),
    (
        |p| {
            p.gate_up_out = p.x;
            p.gate_up_out.dtype = DType::F16 as u32;
        },
        INVALID,
        "mlp: gate_up_out has dtype f16, x has f32",
    ),
    (
        |p| {
            p.gate_up_out = p.x;
            p.gate_up_out.shape[1] = 6;
            p.gate_up_out.strides = [7, 1, 0, 0, 0, 0];
        },
        INVALID,
        "mlp: gate_up_out has shape [2, 6] with strides [7, 1], it must be contiguous",
    ),
    (
        |p| {
            p.gate_up_out = p.x;
            p.gate_up_out.shape[1] = 6;
            p.gate_up_out.strides = [6, 1, 0, 0, 0, 0];
            p.workspace_size = 512;
        },
        INVALID,
        "mlp: gate_up_out overlaps x",
    ),
    (
        |p| {
            p.gate_up_out = p.x;
            p.gate_up_out.shape[1] = 6;
            p.gate_up_out.strides = [6, 1, 0, 0, 0, 0];
        },
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "mlp: workspace_size is 24 bytes, 256 are required",
    ),
    (|p| p.out.data = p.x.data, INVALID, "mlp: out overlaps x"),
    (
        |p| p.out.data = p.down_weight.data,
        INVALID,
        "mlp: out overlaps down_weight",
    ),
    (
        |p| p.workspace = p.out.data,
        INVALID,
        "mlp: workspace overlaps out",
    ),
    (
        |p| p.workspace = p.x.data,
        INVALID,
        "mlp: workspace overlaps x",
    ),
    (
        |p| p.workspace = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "mlp: workspace is NULL",
    ),
    (
        |p| p.workspace_size = 23,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "mlp: workspace_size is 23 bytes, 24 are required",
    ),
    (
        |p| p.gate_weight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "mlp: data of gate_weight is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let input = |shape: &[usize]| {
        TestTensor::normal(&mut rng(), DType::F32, Layout::contiguous(shape).unwrap())
            .upload(memory)
    };
    let (x, gate, up) = (input(&[2, 4]), input(&[3, 4]), input(&[3, 4]));
    let (down, bias) = (input(&[4, 3]), input(&[4]));
    let out = TestTensor::poisoned(DType::F32, x.layout).upload(memory);
    let workspace =
        TestTensor::poisoned(DType::F32, Layout::contiguous(&[6]).unwrap()).upload(memory);
    // SAFETY: integers, floats and pointers, size first.
    let mut good: unsloth_mlp_params = unsafe { abi::zeroed_params() };
    (good.x, good.gate_weight, good.up_weight) = (c_tensor(&x), c_tensor(&gate), c_tensor(&up));
    (good.down_weight, good.down_bias) = (c_tensor(&down), c_tensor(&bias));
    good.out = c_tensor(&out);
    (good.workspace, good.workspace_size) = (workspace.data(), 24);
    let operation = Operation {
        name: "mlp",
        supported: unsloth_mlp_supported,
        forward: unsloth_mlp_forward,
    };
    operation.check(good, MISUSE, &[&out, &workspace]);

    let ctx = Handle::cpu();
    let mut size = 99;
    // SAFETY: pointers to live locals, or NULL.
    unsafe {
        let got = unsloth_mlp_workspace_size(ctx.0, &good, std::ptr::null_mut());
        assert_fails(
            got,
            UNSLOTH_STATUS_NULL_POINTER,
            "mlp: workspace_size is NULL",
        );
        let mut bad = good;
        bad.x.rank = 0;
        bad.x.data = std::ptr::null_mut();
        let got = unsloth_mlp_workspace_size(ctx.0, &bad, &mut size);
        assert_eq!((got, size), (INVALID, 99));
        // Neither data nor workspace is needed for the answer.
        let mut query = good;
        (query.x.data, query.workspace, query.workspace_size) =
            (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        let got = unsloth_mlp_workspace_size(ctx.0, &query, &mut size);
        assert_eq!((got, size), (UNSLOTH_STATUS_SUCCESS, 24));
    }
}
