//! What gradients of the attention block refuse.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{TestTensor, rng};
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::status::*;
use unsloth::{Context, DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// Spoils the forward's arguments.
fn spoil(
    p: &mut unsloth_attention_block_backward_params,
    change: fn(&mut unsloth_attention_block_params),
) {
    // SAFETY: those of the good arguments, which live as long as the test.
    let mut forward = unsafe { *p.forward };
    change(&mut forward);
    p.forward = Box::leak(Box::new(forward));
}

/// Three tokens of six components, two query heads and one key head of four, a norm of queries,
/// five components of the output.
const MISUSE: &[Misuse<unsloth_attention_block_backward_params>] = &[
    (
        |p| p.forward = std::ptr::null(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: forward is NULL",
    ),
    (
        |p| spoil(p, |f| f.struct_size = 8),
        INVALID,
        "attention_block_backward: forward.struct_size is 8, at least 3912 is needed",
    ),
    (
        |p| spoil(p, |f| f.cache = std::ptr::without_provenance_mut(0x7777)),
        INVALID,
        "attention_block_backward: forward.cache is there: the backward pass is of attention without a cache",
    ),
    (
        |p| spoil(p, |f| f.attended_norm = f.q_norm),
        UNSLOTH_STATUS_UNSUPPORTED,
        "attention_block_backward: attended_norm is there: gradients are those of a block without it",
    ),
    (
        |p| spoil(p, |f| f.num_heads = 0),
        INVALID,
        "attention_block_backward: num_heads is 0 (not set), allowed: 1 to 1048576",
    ),
    (
        |p| spoil(p, |f| f.rotate = 2),
        INVALID,
        "attention_block_backward: rotate is 2, allowed: 0, 1",
    ),
    (
        |p| spoil(p, |f| f.softcap = -1.0),
        INVALID,
        "attention_block_backward: softcap is -1, at least 0 is needed",
    ),
    (
        |p| spoil(p, |f| f.norm_epsilon = 0.0),
        INVALID,
        "attention_block_backward: norm_epsilon is 0, it must be above 0",
    ),
    (
        |p| spoil(p, |f| f.q_norm.shape[0] = 3),
        INVALID,
        "attention_block_backward: q_norm has shape [3], allowed: [4] or [8]",
    ),
    (
        |p| spoil(p, |f| f.k_weight.shape[1] = 5),
        INVALID,
        "attention_block_backward: k_weight has shape [4, 5], expected [4, 6]",
    ),
    (
        |p| spoil(p, |f| f.x.rank = 1),
        INVALID,
        "attention_block_backward: x has rank 1, allowed: 2, 3",
    ),
    (
        |p| spoil(p, |f| f.out_weight.dtype = DType::Q8_0 as u32),
        UNSLOTH_STATUS_UNSUPPORTED,
        "attention_block_backward: out_weight has dtype q8_0, allowed: f32, f16, bf16",
    ),
    (
        |p| p.accumulate = 2,
        INVALID,
        "attention_block_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "attention_block_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.dout.shape[1] = 6,
        INVALID,
        "attention_block_backward: dout has shape [3, 6], expected [3, 5]",
    ),
    (
        |p| p.dout.dtype = DType::F16 as u32,
        INVALID,
        "attention_block_backward: dout has dtype f16, x has f32",
    ),
    (
        |p| p.qkv.shape[1] = 12,
        INVALID,
        "attention_block_backward: qkv has shape [3, 12], expected [3, 16]",
    ),
    (
        |p| p.qkv.strides[0] = 17,
        INVALID,
        "attention_block_backward: qkv has shape [3, 16] with strides [17, 1], it must be contiguous",
    ),
    (
        |p| p.attended = absent(),
        INVALID,
        "attention_block_backward: lse is there without attended",
    ),
    (
        |p| p.lse = absent(),
        INVALID,
        "attention_block_backward: attended is there without lse",
    ),
    (
        |p| p.lse.shape = [3, 2, 0, 0, 0, 0],
        INVALID,
        "attention_block_backward: lse has shape [3, 2], expected [2, 3]",
    ),
    (
        |p| p.lse.dtype = DType::Bf16 as u32,
        INVALID,
        "attention_block_backward: lse has dtype bf16, allowed: f32",
    ),
    (
        |p| p.dx.shape[1] = 5,
        INVALID,
        "attention_block_backward: dx has shape [3, 5], x has [3, 6]",
    ),
    (
        |p| p.dq_weight.shape[0] = 4,
        INVALID,
        "attention_block_backward: dq_weight has shape [4, 6], expected [8, 6]",
    ),
    (
        |p| p.dv_bias = p.dq_norm,
        INVALID,
        "attention_block_backward: dv_bias is there, without v_bias it has no use",
    ),
    (
        |p| p.dqkv_weight = p.dq_weight,
        INVALID,
        "attention_block_backward: dqkv_weight is there, without qkv_weight it has no use",
    ),
    (
        |p| p.dk_norm = p.dq_norm,
        INVALID,
        "attention_block_backward: dk_norm is there, without k_norm it has no use",
    ),
    (
        |p| p.dsinks = p.dq_norm,
        INVALID,
        "attention_block_backward: dsinks is there, without sinks it has no use",
    ),
    (
        |p| {
            spoil(p, |f| {
                f.sinks = f.out_bias;
                f.sinks.shape[0] = 2;
            });
            p.dsinks = p.dq_norm;
            p.dsinks.shape[0] = 2;
            p.dsinks.dtype = DType::F16 as u32;
        },
        INVALID,
        "attention_block_backward: dsinks has dtype f16, allowed: f32",
    ),
    (
        |p| {
            p.accumulate = 1;
            p.dq_norm.dtype = DType::Bf16 as u32;
        },
        INVALID,
        "attention_block_backward: dq_norm has dtype bf16, allowed with accumulate: f32",
    ),
    (
        |p| {
            (p.dx, p.dq_weight, p.dq_norm) = (absent(), absent(), absent());
            p.dout_weight = absent();
        },
        INVALID,
        "attention_block_backward: dx is absent, as are all other gradients: nothing is asked for",
    ),
    (
        |p| p.dx.data = p.dout.data,
        INVALID,
        "attention_block_backward: dx overlaps dout",
    ),
    (
        |p| p.dq_weight.data = p.qkv.data,
        INVALID,
        "attention_block_backward: dq_weight overlaps qkv",
    ),
    (
        |p| p.workspace_size = 255,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "attention_block_backward: workspace_size is 255 bytes, 1152 are required",
    ),
    (
        |p| p.workspace = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: workspace is NULL",
    ),
    (
        |p| p.attended.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: data of attended is NULL",
    ),
    // What only the data tells is found before anything is written.
    (
        |p| {
            spoil(p, |f| {
                f.cu_seqlens = f.out_bias;
                f.cu_seqlens.dtype = DType::I32 as u32;
            });
        },
        INVALID,
        "attention_block_backward: cu_seqlens has 7 at index 1, allowed: 0 to the 3 tokens of q",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &Context::cpu().unwrap();
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let input = |shape: &[usize]| {
        TestTensor::normal(&mut rng(), DType::F32, contiguous(shape)).upload(memory)
    };
    let output =
        |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(memory);
    let (x, q, k, v) = (
        input(&[3, 6]),
        input(&[8, 6]),
        input(&[4, 6]),
        input(&[4, 6]),
    );
    let (out, norm, dout) = (input(&[5, 8]), input(&[4]), input(&[3, 5]));
    let starts = TestTensor::of(DType::I32, &[5], &[0.0, 7.0, 3.0, 3.0, 3.0]).upload(memory);
    let (qkv, attended, lse) = (input(&[3, 16]), input(&[3, 8]), input(&[2, 3]));
    let (dx, dq, dnorm, d_out) = (
        output(&[3, 6]),
        output(&[8, 6]),
        output(&[4]),
        output(&[5, 8]),
    );
    let workspace = output(&[1024]);
    // SAFETY: integers, floats and pointers, size first.
    let mut forward: unsloth_attention_block_params = unsafe { abi::zeroed_params() };
    (forward.num_heads, forward.num_kv_heads, forward.head_dim) = (2, 1, 4);
    (forward.x, forward.q_weight) = (c_tensor(&x), c_tensor(&q));
    (forward.k_weight, forward.v_weight) = (c_tensor(&k), c_tensor(&v));
    (forward.out_weight, forward.q_norm) = (c_tensor(&out), c_tensor(&norm));
    forward.norm_epsilon = 1e-5;
    // A bias that no gradient needs stands for starts of sequences.
    forward.out_bias = c_tensor(&starts);
    forward.out_bias.dtype = DType::F32 as u32;
    // SAFETY: as above.
    let mut good: unsloth_attention_block_backward_params = unsafe { abi::zeroed_params() };
    good.forward = &forward;
    (good.qkv, good.attended) = (c_tensor(&qkv), c_tensor(&attended));
    (good.lse, good.dout, good.dx) = (c_tensor(&lse), c_tensor(&dout), c_tensor(&dx));
    (good.dq_weight, good.dq_norm) = (c_tensor(&dq), c_tensor(&dnorm));
    good.dout_weight = c_tensor(&d_out);
    (good.workspace, good.workspace_size) = (workspace.data(), 4096);
    let operation = Operation {
        name: "attention_block_backward",
        supported: unsloth_attention_block_backward_supported,
        forward: unsloth_attention_block_backward,
    };
    operation.check(good, MISUSE, &[&dx, &dq, &dnorm, &d_out]);
}
