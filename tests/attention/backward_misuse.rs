//! The backward pass of attention through the C ABI with arguments that must be refused.

use std::ptr;

use crate::common::abi::{
    Handle, absent, assert_fails, assert_untouched, backends, c_tensor, last_message, zeroed_params,
};
use crate::common::{DeviceTensor, TestTensor, contexts, rng};
use unsloth::ffi::attention::backward::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_tensor;
use unsloth::{Buffer, Context, DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const NULL: unsloth_status = UNSLOTH_STATUS_NULL_POINTER;

type Params = unsloth_attention_backward_params;
type Misuse = (fn(&mut Params), unsloth_status, &'static str);

/// Good arguments, and the gradients that nothing may be written to.
struct Arguments {
    tensors: Vec<DeviceTensor>,
    gradients: Vec<DeviceTensor>,
    workspace: Buffer,
    params: Params,
}

impl Arguments {
    fn new(memory: &Context) -> Self {
        Arguments {
            tensors: Vec::new(),
            gradients: Vec::new(),
            workspace: Buffer::new(memory, 1024).unwrap(),
            // SAFETY: a struct of integers, floats and pointers.
            params: unsafe { zeroed_params() },
        }
    }

    fn add(&mut self, t: TestTensor, memory: &Context) -> unsloth_tensor {
        let t = t.upload(memory);
        let c = c_tensor(&t);
        self.tensors.push(t);
        c
    }

    fn normal(&mut self, shape: &[usize], memory: &Context) -> unsloth_tensor {
        let layout = Layout::contiguous(shape).unwrap();
        self.add(TestTensor::normal(&mut rng(), DType::F32, layout), memory)
    }

    fn output(&mut self, shape: &[usize], memory: &Context) -> unsloth_tensor {
        let layout = Layout::contiguous(shape).unwrap();
        let t = TestTensor::poisoned(DType::F32, layout).upload(memory);
        let c = c_tensor(&t);
        self.gradients.push(t);
        c
    }

    /// Two sequences of 3 queries and 5 keys, 4 heads on 2, head dimension 8, every optional tensor given.
    fn batched(memory: &Context) -> Self {
        let mut a = Self::new(memory);
        let (q, k, lse) = ([2, 3, 4, 8], [2, 5, 2, 8], [2, 4, 3]);
        a.params.q = a.normal(&q, memory);
        a.params.k = a.normal(&k, memory);
        a.params.v = a.normal(&k, memory);
        a.params.out = a.normal(&q, memory);
        a.params.lse = a.normal(&lse, memory);
        a.params.dout = a.normal(&q, memory);
        a.params.dlse = a.normal(&lse, memory);
        a.params.bias = a.normal(&[1, 4, 3, 5], memory);
        let mask = TestTensor::of(DType::Bool, &[2, 1, 1, 5], &[1.0; 10]);
        a.params.mask = a.add(mask, memory);
        a.params.alibi_slopes = a.normal(&[4], memory);
        a.params.sinks = a.normal(&[4], memory);
        let lens = TestTensor::of(DType::I32, &[2], &[5.0, 4.0]);
        a.params.seq_lens_k = a.add(lens, memory);
        a.params.dq = a.output(&q, memory);
        a.params.dk = a.output(&k, memory);
        a.params.dv = a.output(&k, memory);
        a.params.dbias = a.output(&[1, 4, 3, 5], memory);
        a.params.dsinks = a.output(&[4], memory);
        a.params.workspace = a.workspace.as_ptr().cast();
        a.params.workspace_size = 96;
        a
    }

    /// Sequences of 2 and 1 queries (4 tokens in all) and 3 and 4 keys (7 tokens).
    fn packed(memory: &Context) -> Self {
        let mut a = Self::new(memory);
        let (q, k) = ([4, 4, 8], [7, 2, 8]);
        a.params.q = a.normal(&q, memory);
        a.params.k = a.normal(&k, memory);
        a.params.v = a.normal(&k, memory);
        a.params.out = a.normal(&q, memory);
        a.params.lse = a.normal(&[4, 4], memory);
        a.params.dout = a.normal(&q, memory);
        let cu = |values: &[f64]| TestTensor::of(DType::I32, &[3], values);
        a.params.cu_seqlens_q = a.add(cu(&[0.0, 2.0, 3.0]), memory);
        a.params.cu_seqlens_k = a.add(cu(&[0.0, 3.0, 7.0]), memory);
        a.params.dq = a.output(&q, memory);
        a.params.dk = a.output(&k, memory);
        a.params.workspace = a.workspace.as_ptr().cast();
        a.params.workspace_size = 128;
        a
    }

    /// Every misuse is refused with its message, and nothing is written. Then the good arguments are accepted.
    fn check(&self, cases: &[Misuse], ctx: &Handle) {
        let run = backward(ctx);
        for (spoil, status, message) in cases {
            let mut params = self.params;
            spoil(&mut params);
            assert_fails(run(&params), *status, message);
            self.gradients.iter().for_each(assert_untouched);
        }
        let mut params = self.params;
        // SAFETY: pointers to live locals; a query reads no tensor data.
        unsafe {
            unsloth_attention_backward_workspace_size(ctx.0, &params, &mut params.workspace_size)
        };
        assert!(params.workspace_size <= self.workspace.size());
        assert_eq!(run(&params), UNSLOTH_STATUS_SUCCESS, "{}", last_message());
    }
}

fn backward(ctx: &Handle) -> impl Fn(&Params) -> unsloth_status {
    // SAFETY: every tensor that passes validation lies in memory that outlives the call.
    |params| unsafe { unsloth_attention_backward(ctx.0, params, ptr::null_mut()) }
}

// A row a line reads better than what rustfmt makes of them.
#[rustfmt::skip]
const BATCHED: &[Misuse] = &[
    (|p| p.struct_size = 8, INVALID, "attention_backward: struct_size is 8, at least 2656 is needed"),
    (|p| p.deterministic = 2, INVALID, "attention_backward: deterministic is 2, allowed: 0, 1"),
    (|p| p.causal = 2, INVALID, "attention_backward: causal is 2, allowed: 0, 1"),
    (|p| p.accumulate = 3, INVALID, "attention_backward: accumulate is 3, allowed: 0, 1"),
    (|p| p.scale = f32::NAN, INVALID, "attention_backward: scale is NaN, a finite number is needed"),
    (|p| p.softcap = -2.0, INVALID, "attention_backward: softcap is -2, at least 0 is needed"),
    (|p| p.window_left = -1, INVALID, "attention_backward: window_left is -1, at least 0 is needed"),
    (|p| p.window_right = -1, INVALID, "attention_backward: window_right is -1, at least 0 is needed"),
    (|p| p.max_seqlen_q = -1, INVALID, "attention_backward: max_seqlen_q is -1, at least 0 is needed"),
    (|p| p.max_seqlen_k = -1, INVALID, "attention_backward: max_seqlen_k is -1, at least 0 is needed"),
    (|p| p.q = absent(), INVALID, "attention_backward: q is absent (rank 0), it is required"),
    (|p| p.k = absent(), INVALID, "attention_backward: k is absent (rank 0), it is required"),
    (|p| p.v = absent(), INVALID, "attention_backward: v is absent (rank 0), it is required"),
    (|p| p.out = absent(), INVALID, "attention_backward: out is absent (rank 0), it is required"),
    (|p| p.lse = absent(), INVALID, "attention_backward: lse is absent (rank 0), it is required"),
    (|p| p.dout = absent(), INVALID, "attention_backward: dout is absent (rank 0), it is required"),
    (|p| p.bias = absent(), INVALID, "attention_backward: dbias is given without bias"),
    (|p| p.sinks = absent(), INVALID, "attention_backward: dsinks is given without sinks"),
    (|p| { for t in [&mut p.dq, &mut p.dk, &mut p.dv, &mut p.dbias, &mut p.dsinks] { *t = absent(); } }, INVALID,
     "attention_backward: dq is absent, as are dk, dv, dbias and dsinks: nothing is asked for"),
    (|p| p.q.rank = 3, INVALID, "attention_backward: q has rank 3, allowed: 4, because q is batched: cu_seqlens_q is absent"),
    (|p| p.k.shape[3] = 4, INVALID, "attention_backward: k has head_dim 4, q has 8"),
    (|p| p.q.shape[2] = 3, INVALID, "attention_backward: q has 3 heads, a multiple of the 2 of k is needed"),
    (|p| p.v.shape[1] = 4, INVALID, "attention_backward: v has shape [2, 4, 2, 8], expected [2, 5, 2, 8]"),
    (|p| p.out.shape[1] = 2, INVALID, "attention_backward: out has shape [2, 2, 4, 8], expected [2, 3, 4, 8]"),
    (|p| (p.k.dtype, p.v.dtype) = (7, 7), UNSLOTH_STATUS_UNSUPPORTED, "attention_backward: k has dtype f8e4m3, allowed: f32, f16, bf16"),
    (|p| p.out.dtype = DType::F16 as u32, INVALID, "attention_backward: out has dtype f16, allowed: f32"),
    (|p| p.lse.shape = [2, 3, 4, 0, 0, 0], INVALID, "attention_backward: lse has shape [2, 3, 4], expected [2, 4, 3]"),
    (|p| p.lse.dtype = DType::F16 as u32, INVALID, "attention_backward: lse has dtype f16, allowed: f32"),
    (|p| p.dout.shape[3] = 7, INVALID, "attention_backward: dout has shape [2, 3, 4, 7], out has [2, 3, 4, 8]"),
    (|p| p.dout.dtype = DType::Bf16 as u32, INVALID, "attention_backward: dout has dtype bf16, allowed: f32"),
    (|p| p.dout.strides = [96, 32, 1, 4, 0, 0], INVALID, "attention_backward: dout has stride 4 along its last dimension, allowed: 1"),
    (|p| p.dlse.shape[2] = 2, INVALID, "attention_backward: dlse has shape [2, 4, 2], lse has [2, 4, 3]"),
    (|p| p.dlse.dtype = DType::F16 as u32, INVALID, "attention_backward: dlse has dtype f16, allowed: f32"),
    (|p| p.dq.shape[1] = 2, INVALID, "attention_backward: dq has shape [2, 2, 4, 8], q has [2, 3, 4, 8]"),
    (|p| p.dq.dtype = DType::F16 as u32, INVALID, "attention_backward: dq has dtype f16, q has f32"),
    (|p| p.dk.dtype = DType::Bf16 as u32, INVALID, "attention_backward: dk has dtype bf16, k has f32"),
    (|p| p.dv.shape[3] = 4, INVALID, "attention_backward: dv has shape [2, 5, 2, 4], v has [2, 5, 2, 8]"),
    (|p| p.dv.strides = [80, 16, 1, 2, 0, 0], INVALID, "attention_backward: dv has stride 2 along its last dimension, allowed: 1"),
    (|p| p.dk.strides = [0, 16, 8, 1, 0, 0], INVALID, "attention_backward: dk has shape [2, 5, 2, 8] with strides [0, 16, 8, 1]: elements of an output may not overlap"),
    (|p| p.dbias.shape[0] = 2, INVALID, "attention_backward: dbias has shape [2, 4, 3, 5], bias has [1, 4, 3, 5]"),
    (|p| p.dbias.dtype = DType::F16 as u32, INVALID, "attention_backward: dbias has dtype f16, allowed: f32"),
    (|p| p.dbias.strides = [60, 15, 1, 3, 0, 0], INVALID, "attention_backward: dbias has stride 3 along its last dimension, allowed: 1"),
    (|p| p.dsinks.shape[0] = 2, INVALID, "attention_backward: dsinks has shape [2], sinks has [4]"),
    (|p| p.dsinks.dtype = DType::F16 as u32, INVALID, "attention_backward: dsinks has dtype f16, allowed: f32"),
    (|p| p.dsinks.strides[0] = 2, INVALID, "attention_backward: dsinks has shape [4] with strides [2], it must be contiguous"),
];

/// What only a call finds, for which there has to be an implementation.
#[rustfmt::skip]
const DATA: &[Misuse] = &[
    (|p| p.workspace_size = 95, UNSLOTH_STATUS_WORKSPACE_TOO_SMALL, "attention_backward: workspace_size is 95 bytes, 96 are required"),
    (|p| p.dout.data = ptr::null_mut(), NULL, "attention_backward: data of dout is NULL"),
    (|p| p.lse.data = ptr::null_mut(), NULL, "attention_backward: data of lse is NULL"),
    (|p| p.dsinks.data = ptr::null_mut(), NULL, "attention_backward: data of dsinks is NULL"),
    (|p| p.dq.data = p.q.data, INVALID, "attention_backward: dq overlaps q"),
    (|p| p.dv.data = p.dout.data, INVALID, "attention_backward: dv overlaps dout"),
    (|p| p.dv.data = p.dk.data, INVALID, "attention_backward: dv overlaps dk"),
    (|p| p.workspace = p.dbias.data, INVALID, "attention_backward: workspace overlaps dbias"),
];

#[test]
fn batched() {
    for (memory, ctx) in backends() {
        Arguments::batched(&memory).check(BATCHED, &ctx);
    }
    let memory = &contexts()[0];
    Arguments::batched(memory).check(DATA, &Handle::cpu());
}

#[test]
fn packed() {
    #[rustfmt::skip]
    let cases: &[Misuse] = &[
        (|p| p.cu_seqlens_q.dtype = DType::I64 as u32, INVALID, "attention_backward: cu_seqlens_q has dtype i64, allowed: i32"),
        (|p| p.cu_seqlens_k.shape[0] = 2, INVALID, "attention_backward: cu_seqlens_k has batch size 1, cu_seqlens_q has 2"),
        (|p| p.seq_lens_k = p.cu_seqlens_q, INVALID, "attention_backward: cu_seqlens_k is given together with seq_lens_k: only one of them is allowed"),
        (|p| p.lse.shape[1] = 3, INVALID, "attention_backward: lse has shape [4, 3], expected [4, 4]"),
        (|p| p.dq.rank = 2, INVALID, "attention_backward: dq has shape [4, 4], q has [4, 4, 8]"),
    ];
    for (memory, ctx) in backends() {
        Arguments::packed(&memory).check(cases, &ctx);
    }
    // Lengths in memory, which only the CPU backend looks at.
    #[rustfmt::skip]
    let lengths: &[Misuse] = &[
        (|p| p.max_seqlen_q = 1, INVALID, "attention_backward: cu_seqlens_q has a sequence of 2 at index 0, above max_seqlen_q 1"),
        (|p| p.max_seqlen_k = 3, INVALID, "attention_backward: cu_seqlens_k has a sequence of 4 at index 1, above max_seqlen_k 3"),
    ];
    let memory = &contexts()[0];
    Arguments::packed(memory).check(lengths, &Handle::cpu());
}

#[test]
fn queries() {
    let ctx = Handle::cpu();
    let arguments = Arguments::batched(&contexts()[0]);
    let mut params = arguments.params;
    params.q.data = ptr::null_mut();
    let (mut implementation, mut size) = (77, 77);
    // SAFETY: pointers to live locals; queries read no tensor data.
    unsafe {
        let status = unsloth_attention_backward_supported(ctx.0, &params, &mut implementation);
        assert_eq!((status, implementation), (UNSLOTH_STATUS_SUCCESS, 1));
        let status = unsloth_attention_backward_workspace_size(ctx.0, &params, &mut size);
        // An f32 for every query and head.
        assert_eq!((status, size), (UNSLOTH_STATUS_SUCCESS, 2 * 3 * 4 * 4));
        // The gradient of the values needs none.
        for t in [
            &mut params.dq,
            &mut params.dk,
            &mut params.dbias,
            &mut params.dsinks,
        ] {
            *t = absent();
        }
        unsloth_attention_backward_workspace_size(ctx.0, &params, &mut size);
        assert_eq!(size, 0);
        let status = unsloth_attention_backward_workspace_size(ctx.0, &params, ptr::null_mut());
        assert_fails(status, NULL, "attention_backward: workspace_size is NULL");
    }
}
