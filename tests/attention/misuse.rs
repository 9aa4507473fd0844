//! Attention through the C ABI with arguments that must be refused.

use std::ptr;

use crate::common::abi::{
    Handle, absent, assert_fails, assert_untouched, backends, c_tensor, described, last_message,
    zeroed_params,
};
use crate::common::{DeviceTensor, TestTensor, contexts, rng};
use unsloth::ffi::attention::*;
use unsloth::ffi::context::{unsloth_context_create, unsloth_context_destroy};
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_tensor;
use unsloth::{Backend, Context, DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const NULL: unsloth_status = UNSLOTH_STATUS_NULL_POINTER;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

type Spoil = fn(&mut unsloth_attention_params);
type Misuse = (Spoil, unsloth_status, &'static str);

/// Good arguments in three forms, and the outputs that nothing may be written to.
struct Arguments {
    tensors: Vec<DeviceTensor>,
    out: DeviceTensor,
    lse: DeviceTensor,
    params: unsloth_attention_params,
}

impl Arguments {
    fn empty(out: &[usize], lse: &[usize], memory: &Context) -> Self {
        let output = |shape: &[usize]| {
            TestTensor::poisoned(DType::F32, Layout::contiguous(shape).unwrap()).upload(memory)
        };
        let (out, lse) = (output(out), output(lse));
        // SAFETY: a struct of integers, floats and pointers.
        let mut params: unsloth_attention_params = unsafe { zeroed_params() };
        (params.out, params.lse) = (c_tensor(&out), c_tensor(&lse));
        Arguments {
            tensors: Vec::new(),
            out,
            lse,
            params,
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

    fn ints(&mut self, shape: &[usize], values: &[f64], memory: &Context) -> unsloth_tensor {
        self.add(TestTensor::of(DType::I32, shape, values), memory)
    }

    /// Two sequences of 3 queries and 5 keys, 4 heads on 2, head dimension 8, every optional tensor given.
    fn batched(memory: &Context) -> Self {
        let mut a = Self::empty(&[2, 3, 4, 8], &[2, 4, 3], memory);
        a.params.q = a.normal(&[2, 3, 4, 8], memory);
        a.params.k = a.normal(&[2, 5, 2, 8], memory);
        a.params.v = a.normal(&[2, 5, 2, 8], memory);
        a.params.bias = a.normal(&[1, 4, 3, 5], memory);
        let mask = TestTensor::of(DType::Bool, &[2, 1, 1, 5], &[1.0; 10]);
        a.params.mask = a.add(mask, memory);
        a.params.alibi_slopes = a.normal(&[4], memory);
        a.params.sinks = a.normal(&[4], memory);
        a.params.seq_lens_k = a.ints(&[2], &[5.0, 4.0], memory);
        a
    }

    /// Sequences of 2 and 1 queries (4 tokens in all) and 3 and 4 keys (7 tokens).
    fn packed(memory: &Context) -> Self {
        let mut a = Self::empty(&[4, 4, 8], &[4, 4], memory);
        a.params.q = a.normal(&[4, 4, 8], memory);
        a.params.k = a.normal(&[7, 2, 8], memory);
        a.params.v = a.normal(&[7, 2, 8], memory);
        a.params.cu_seqlens_q = a.ints(&[3], &[0.0, 2.0, 3.0], memory);
        a.params.cu_seqlens_k = a.ints(&[3], &[0.0, 3.0, 7.0], memory);
        a
    }

    /// Two decoding sequences of 5 and 0 keys in 6 pages of 4.
    fn paged(memory: &Context) -> Self {
        let mut a = Self::empty(&[2, 1, 4, 8], &[2, 4, 1], memory);
        a.params.q = a.normal(&[2, 1, 4, 8], memory);
        a.params.k = a.normal(&[6, 4, 2, 8], memory);
        a.params.v = a.normal(&[6, 4, 2, 8], memory);
        a.params.seq_lens_k = a.ints(&[2], &[5.0, 0.0], memory);
        a.params.block_table = a.ints(&[2, 3], &[5.0, 0.0, -1.0, -1.0, -1.0, -1.0], memory);
        a
    }

    /// Every misuse is refused with its message by `run`, and then the good arguments are still accepted. What only index tensors
    /// would tell is not asked of a GPU, where the host does not read them.
    fn check(&self, cases: &[Misuse], run: impl Fn(&unsloth_attention_params) -> unsloth_status) {
        let of_cpu = self.out.backend() == Backend::Cpu;
        for (spoil, status, message) in cases {
            if !of_cpu && message.contains(" at index ") {
                continue;
            }
            let mut params = self.params;
            spoil(&mut params);
            assert_fails(run(&params), *status, message);
            assert_untouched(&self.out);
            assert_untouched(&self.lse);
        }
        assert_eq!(
            run(&self.params),
            UNSLOTH_STATUS_SUCCESS,
            "{}",
            last_message()
        );
    }
}

fn forward(ctx: &Handle) -> impl Fn(&unsloth_attention_params) -> unsloth_status {
    // SAFETY: every tensor that passes validation lies in memory that outlives the call.
    |params| unsafe { unsloth_attention_forward(ctx.0, params, ptr::null_mut()) }
}

/// Overwrites entry `index` of an index tensor in host memory.
fn set(t: &unsloth_tensor, index: usize, value: i32) {
    // SAFETY: the tests' index tensors are i32 in host memory, and `index` is inside.
    unsafe { *t.data.cast::<i32>().add(index) = value };
}

// A row a line reads better than what rustfmt makes of them.
#[rustfmt::skip]
const BATCHED: &[Misuse] = &[
    (|p| p.struct_size = 8, INVALID, "attention: struct_size is 8, at least 1840 is needed"),
    (|p| p.struct_size = 1 << 20, INVALID, "attention: struct_size is 1048576, above the maximum 65536"),
    (|p| p.causal = 2, INVALID, "attention: causal is 2, allowed: 0, 1"),
    (|p| p.page_layout = 9, INVALID, "attention: page_layout is 9, allowed: 0, 1"),
    (|p| p.scale = f32::NAN, INVALID, "attention: scale is NaN, a finite number is needed"),
    (|p| p.softcap = f32::INFINITY, INVALID, "attention: softcap is inf, a finite number is needed"),
    (|p| p.softcap = -2.0, INVALID, "attention: softcap is -2, at least 0 is needed"),
    (|p| p.window_left = -1, INVALID, "attention: window_left is -1, at least 0 is needed"),
    (|p| p.window_right = i64::MIN, INVALID, "attention: window_right is -9223372036854775808, at least 0 is needed"),
    (|p| p.max_seqlen_q = -1, INVALID, "attention: max_seqlen_q is -1, at least 0 is needed"),
    (|p| p.max_seqlen_k = -1, INVALID, "attention: max_seqlen_k is -1, at least 0 is needed"),
    (|p| p.q = absent(), INVALID, "attention: q is absent (rank 0), it is required"),
    (|p| p.k = absent(), INVALID, "attention: k is absent (rank 0), it is required"),
    (|p| p.v = absent(), INVALID, "attention: v is absent (rank 0), it is required"),
    (|p| p.out = absent(), INVALID, "attention: out is absent (rank 0), it is required"),
    (|p| p.lse.rank = 0, INVALID, "attention: lse has data but rank 0, allowed: 1 to 6"),
    (|p| p.q.rank = 7, INVALID, "attention: q has rank 7, above the maximum 6"),
    (|p| p.q.rank = 3, INVALID, "attention: q has rank 3, allowed: 4, because q is batched: cu_seqlens_q is absent"),
    (|p| p.k.rank = 3, INVALID, "attention: k has rank 3, allowed: 4, because keys are batched: cu_seqlens_k is absent"),
    (|p| p.v.rank = 5, INVALID, "attention: v has rank 5, allowed: 4, because keys are batched: cu_seqlens_k is absent"),
    (|p| p.q.dtype = 0, INVALID, "attention: q has dtype 0, which does not exist"),
    (|p| p.k.dtype = 8, UNSUPPORTED, "attention: k has dtype f8e5m2, which no operation of this version takes"),
    (|p| p.q.dtype = 7, UNSUPPORTED, "attention: q has dtype f8e4m3, allowed: f32, f16, bf16"),
    (|p| p.k.dtype = 7, INVALID, "attention: v has dtype f32, k has f8e4m3: both are f8e4m3, or neither"),
    (|p| p.q.dtype = DType::I32 as u32, INVALID, "attention: q has dtype i32, allowed: f32, f16, bf16"),
    (|p| p.v.dtype = DType::Bool as u32, INVALID, "attention: v has dtype bool, allowed: f32, f16, bf16, f8e4m3"),
    (|p| p.out.dtype = DType::F16 as u32, INVALID, "attention: out has dtype f16, allowed: f32"),
    (|p| p.lse.dtype = DType::F16 as u32, INVALID, "attention: lse has dtype f16, allowed: f32"),
    (|p| p.bias.dtype = DType::I32 as u32, INVALID, "attention: bias has dtype i32, allowed: f32, f16, bf16"),
    (|p| p.mask.dtype = DType::F32 as u32, INVALID, "attention: mask has dtype f32, allowed: bool"),
    (|p| p.alibi_slopes.dtype = DType::F16 as u32, INVALID, "attention: alibi_slopes has dtype f16, allowed: f32"),
    (|p| p.sinks.dtype = DType::F16 as u32, INVALID, "attention: sinks has dtype f16, allowed: f32"),
    (|p| p.seq_lens_k.dtype = DType::I64 as u32, INVALID, "attention: seq_lens_k has dtype i64, allowed: i32"),
    (|p| p.q.shape[1] = -3, INVALID, "attention: q has size -3 in dimension 1, negative"),
    (|p| p.q.strides[2] = -8, INVALID, "attention: q has stride -8 in dimension 2, negative"),
    (|p| p.q.shape[0] = i64::MAX, INVALID, "attention: q has shape [9223372036854775807, 3, 4, 8] with strides [96, 32, 8, 1]: it overflows the address space"),
    (|p| p.q.shape[3] = 513, INVALID, "attention: q has head_dim 513, allowed: 1 to 512"),
    (|p| p.q.shape[3] = 0, INVALID, "attention: q has head_dim 0, allowed: 1 to 512"),
    (|p| p.v.shape[3] = 600, INVALID, "attention: v has head_dim 600, allowed: 1 to 512"),
    (|p| p.k.shape[3] = 4, INVALID, "attention: k has head_dim 4, q has 8"),
    (|p| p.q.shape[2] = 3, INVALID, "attention: q has 3 heads, a multiple of the 2 of k is needed"),
    (|p| p.q.shape[2] = 0, INVALID, "attention: q has 0 heads, a multiple of the 2 of k is needed"),
    (|p| p.k.shape[2] = 0, INVALID, "attention: k has 0 heads, at least 1 is needed"),
    (|p| p.k.shape[0] = 1, INVALID, "attention: v has shape [2, 5, 2, 8], expected [1, 5, 2, 8]"),
    (|p| { p.k.shape[0] = 1; p.v.shape[0] = 1; }, INVALID, "attention: k has batch size 1, q has 2"),
    (|p| p.v.shape[1] = 4, INVALID, "attention: v has shape [2, 4, 2, 8], expected [2, 5, 2, 8]"),
    (|p| p.v.shape[2] = 1, INVALID, "attention: v has shape [2, 5, 1, 8], expected [2, 5, 2, 8]"),
    (|p| p.out.shape[1] = 2, INVALID, "attention: out has shape [2, 2, 4, 8], expected [2, 3, 4, 8]"),
    (|p| p.v.shape[3] = 7, INVALID, "attention: out has shape [2, 3, 4, 8], expected [2, 3, 4, 7]"),
    (|p| p.lse.shape = [2, 3, 4, 0, 0, 0], INVALID, "attention: lse has shape [2, 3, 4], expected [2, 4, 3]"),
    (|p| p.bias.shape[3] = 4, INVALID, "attention: bias has shape [1, 4, 3, 4], allowed: [2, 4, 3, 5] or 1 in place of any size"),
    (|p| p.mask.shape[2] = 2, INVALID, "attention: mask has shape [2, 1, 2, 5], allowed: [2, 4, 3, 5] or 1 in place of any size"),
    (|p| p.mask.rank = 2, INVALID, "attention: mask has rank 2, allowed: 4"),
    (|p| p.alibi_slopes.shape[0] = 3, INVALID, "attention: alibi_slopes has shape [3], expected [4]"),
    (|p| p.sinks.shape[0] = 2, INVALID, "attention: sinks has shape [2], expected [4]"),
    (|p| p.seq_lens_k.shape[0] = 3, INVALID, "attention: seq_lens_k has shape [3], expected [2]"),
    (|p| p.q.strides = [96, 32, 1, 4, 0, 0], INVALID, "attention: q has stride 4 along its last dimension, allowed: 1"),
    (|p| p.k.strides = [80, 16, 1, 2, 0, 0], INVALID, "attention: k has stride 2 along its last dimension, allowed: 1"),
    (|p| p.bias.strides = [60, 15, 1, 3, 0, 0], INVALID, "attention: bias has stride 3 along its last dimension, allowed: 1"),
    (|p| p.out.strides = [0, 32, 8, 1, 0, 0], INVALID, "attention: out has shape [2, 3, 4, 8] with strides [0, 32, 8, 1]: elements of an output may not overlap"),
    (|p| p.lse.strides = [12, 1, 1, 0, 0, 0], INVALID, "attention: lse has shape [2, 4, 3] with strides [12, 1, 1]: elements of an output may not overlap"),
    (|p| p.seq_lens_k.strides[0] = 2, INVALID, "attention: seq_lens_k has shape [2] with strides [2], it must be contiguous"),
    (|p| p.q.data = ptr::null_mut(), NULL, "attention: data of q is NULL"),
    (|p| p.v.data = ptr::null_mut(), NULL, "attention: data of v is NULL"),
    (|p| p.out.data = ptr::null_mut(), NULL, "attention: data of out is NULL"),
    (|p| p.lse.data = ptr::null_mut(), NULL, "attention: data of lse is NULL"),
    (|p| p.mask.data = ptr::null_mut(), NULL, "attention: data of mask is NULL"),
    (|p| p.seq_lens_k.data = ptr::null_mut(), NULL, "attention: data of seq_lens_k is NULL"),
    (|p| p.q.data = p.out.data, INVALID, "attention: out overlaps q"),
    (|p| p.k.data = p.out.data.wrapping_byte_sub(4), INVALID, "attention: out overlaps k"),
    (|p| p.sinks.data = p.lse.data, INVALID, "attention: lse overlaps sinks"),
    (|p| p.lse.data = p.out.data, INVALID, "attention: lse overlaps out"),
    (|p| p.block_table = p.seq_lens_k, INVALID, "attention: block_table has rank 1, allowed: 2"),
    (|p| p.cu_seqlens_k = p.seq_lens_k, INVALID, "attention: cu_seqlens_k is given together with seq_lens_k: only one of them is allowed"),
    (|p| p.cu_seqlens_q = p.seq_lens_k, INVALID, "attention: q has rank 4, allowed: 3, because q is packed: cu_seqlens_q is there"),
];

#[test]
fn batched() {
    for (memory, ctx) in backends() {
        Arguments::batched(&memory).check(BATCHED, forward(&ctx));
    }
}

#[test]
fn packed() {
    let cases: &[Misuse] = &[
        (
            |p| p.cu_seqlens_q.dtype = DType::I64 as u32,
            INVALID,
            "attention: cu_seqlens_q has dtype i64, allowed: i32",
        ),
        (
            |p| p.cu_seqlens_q.rank = 2,
            INVALID,
            "attention: cu_seqlens_q has rank 2, allowed: 1",
        ),
        (
            |p| p.cu_seqlens_q.shape[0] = 0,
            INVALID,
            "attention: cu_seqlens_q has 0 entries, at least 1 is needed",
        ),
        (
            |p| p.cu_seqlens_k.shape[0] = 2,
            INVALID,
            "attention: cu_seqlens_k has batch size 1, cu_seqlens_q has 2",
        ),
        (
            |p| p.cu_seqlens_q.strides[0] = 3,
            INVALID,
            "attention: cu_seqlens_q has shape [3] with strides [3], it must be contiguous",
        ),
        (
            |p| p.max_seqlen_q = 1,
            INVALID,
            "attention: cu_seqlens_q has a sequence of 2 at index 0, above max_seqlen_q 1",
        ),
        (
            |p| p.max_seqlen_k = 3,
            INVALID,
            "attention: cu_seqlens_k has a sequence of 4 at index 1, above max_seqlen_k 3",
        ),
        (
            |p| p.lse.shape = [4, 3, 0, 0, 0, 0],
            INVALID,
            "attention: lse has shape [4, 3], expected [4, 4]",
        ),
        (
            |p| p.out.rank = 2,
            INVALID,
            "attention: out has shape [4, 4], expected [4, 4, 8]",
        ),
    ];
    for (memory, ctx) in backends() {
        Arguments::packed(&memory).check(cases, forward(&ctx));
    }
}

/// Contents of index tensors, which the CPU backend checks before it writes.
#[test]
fn index_contents() {
    let ctx = Handle::cpu();
    let run = forward(&ctx);
    type Tensor = fn(&unsloth_attention_params) -> &unsloth_tensor;
    let check = |arguments: &Arguments, of: Tensor, cases: &[(usize, i32, &str)]| {
        let t = of(&arguments.params);
        for (index, value, message) in cases {
            // SAFETY: an i32 of the index tensor, in host memory.
            let before = unsafe { *t.data.cast::<i32>().add(*index) };
            set(t, *index, *value);
            assert_fails(run(&arguments.params), INVALID, message);
            assert_untouched(&arguments.out);
            assert_untouched(&arguments.lse);
            set(t, *index, before);
        }
        assert_eq!(
            run(&arguments.params),
            UNSLOTH_STATUS_SUCCESS,
            "{}",
            last_message()
        );
    };
    let memory = &contexts()[0];
    check(
        &Arguments::packed(memory),
        |p| &p.cu_seqlens_q,
        &[
            (
                0,
                -1,
                "attention: cu_seqlens_q has -1 at index 0, allowed: 0 to the 4 tokens of q",
            ),
            (
                2,
                5,
                "attention: cu_seqlens_q has 5 at index 2, allowed: 0 to the 4 tokens of q",
            ),
            (
                1,
                i32::MAX,
                "attention: cu_seqlens_q has 2147483647 at index 1, allowed: 0 to the 4 tokens of q",
            ),
            (1, 4, "attention: cu_seqlens_q falls from 4 to 3 at index 2"),
        ],
    );
    check(
        &Arguments::packed(memory),
        |p| &p.cu_seqlens_k,
        &[
            (
                2,
                8,
                "attention: cu_seqlens_k has 8 at index 2, allowed: 0 to the 7 tokens of k",
            ),
            (0, 4, "attention: cu_seqlens_k falls from 4 to 3 at index 1"),
            (
                0,
                i32::MIN,
                "attention: cu_seqlens_k has -2147483648 at index 0, allowed: 0 to the 7 tokens of k",
            ),
        ],
    );
    check(
        &Arguments::batched(memory),
        |p| &p.seq_lens_k,
        &[
            (
                1,
                -1,
                "attention: seq_lens_k has -1 at index 1, allowed: 0 to 5",
            ),
            (
                0,
                6,
                "attention: seq_lens_k has 6 at index 0, allowed: 0 to 5",
            ),
        ],
    );
    check(
        &Arguments::paged(memory),
        |p| &p.seq_lens_k,
        &[(
            1,
            13,
            "attention: seq_lens_k has 13 at index 1, allowed: 0 to 12",
        )],
    );
    check(
        &Arguments::paged(memory),
        |p| &p.block_table,
        &[
            (
                0,
                6,
                "attention: block_table has page 6 at [0, 0], allowed: 0 to before the 6 pages of k",
            ),
            (
                1,
                -1,
                "attention: block_table has page -1 at [0, 1], allowed: 0 to before the 6 pages of k",
            ),
        ],
    );
}

#[test]
fn paged() {
    let cases: &[Misuse] = &[
        (
            |p| p.seq_lens_k = absent(),
            INVALID,
            "attention: seq_lens_k is absent, block_table needs it",
        ),
        (
            |p| {
                p.k.shape[1] = 3;
                p.v.shape[1] = 3;
            },
            INVALID,
            "attention: k has page size 3, a power of two is needed",
        ),
        (
            |p| {
                p.k.shape[1] = 0;
                p.v.shape[1] = 0;
            },
            INVALID,
            "attention: k has page size 0, a power of two is needed",
        ),
        (
            |p| p.k.shape[0] = 5,
            INVALID,
            "attention: v has shape [6, 4, 2, 8], expected [5, 4, 2, 8]",
        ),
        (
            |p| p.block_table.shape[0] = 1,
            INVALID,
            "attention: block_table has batch size 1, q has 2",
        ),
        (
            |p| p.block_table.dtype = DType::F32 as u32,
            INVALID,
            "attention: block_table has dtype f32, allowed: i32",
        ),
        (
            |p| p.max_seqlen_k = 4,
            INVALID,
            "attention: seq_lens_k has 5 at index 0, allowed: 0 to 4",
        ),
        (
            |p| p.cu_seqlens_k = p.seq_lens_k,
            INVALID,
            "attention: cu_seqlens_k is given together with block_table: only one of them is allowed",
        ),
    ];
    for (memory, ctx) in backends() {
        Arguments::paged(&memory).check(cases, forward(&ctx));
    }
}

#[test]
fn misaligned_data_and_workspace() {
    for (memory, ctx) in backends() {
        let arguments = Arguments::batched(&memory);
        let run = forward(&ctx);
        let mut params = arguments.params;
        params.k.data = params.k.data.wrapping_byte_add(2);
        assert_eq!(run(&params), INVALID);
        assert!(last_message().starts_with("attention: k has data at 0x"));
        assert!(last_message().ends_with("which is not aligned to the 4 bytes of f32"));
        let mut params = arguments.params;
        params.workspace = ptr::without_provenance_mut(16);
        params.workspace_size = usize::MAX;
        let message = format!(
            "attention: workspace_size {} from 0x10 overflows the address space",
            usize::MAX
        );
        assert_fails(run(&params), INVALID, &message);
        assert_untouched(&arguments.out);
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
        let forward = |ctx| unsloth_attention_forward(ctx, ptr::null(), ptr::null_mut());
        assert_fails(forward(ptr::null_mut()), NULL, "attention: ctx is NULL");
        assert_fails(forward(ctx.0), NULL, "attention: params is NULL");
        assert_eq!(forward(dead), UNSLOTH_STATUS_INVALID_HANDLE);
        let odd = ptr::without_provenance(0x1001);
        let status = unsloth_attention_forward(ctx.0, odd, ptr::null_mut());
        assert_fails(
            status,
            INVALID,
            "attention: params 0x1001 is not aligned to 8 bytes",
        );
        let arguments = Arguments::batched(&contexts()[0]);
        let status = unsloth_attention_workspace_size(ctx.0, &arguments.params, ptr::null_mut());
        assert_fails(status, NULL, "attention: workspace_size is NULL");
    }
}

/// Queries answer from shapes, strides and dtypes alone, with the messages of the call itself.
#[test]
fn queries_ignore_data() {
    for (rust, ctx) in backends() {
        let of_cpu = rust.backend() == Backend::Cpu;
        let layout = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        // SAFETY: a struct of integers, floats and pointers.
        let mut params: unsloth_attention_params = unsafe { zeroed_params() };
        let q = described(ptr::null_mut(), DType::Bf16, &layout(&[2, 30, 8, 128]));
        (params.q, params.out) = (q, q);
        params.k = described(ptr::null_mut(), DType::F16, &layout(&[64, 16, 2, 128]));
        params.v = params.k;
        params.block_table = described(ptr::null_mut(), DType::I32, &layout(&[2, 40]));
        params.seq_lens_k = described(ptr::null_mut(), DType::I32, &layout(&[2]));
        let (mut implementation, mut size) = (0, 77);
        // SAFETY: pointers to live locals; queries read no tensor data.
        unsafe {
            let status = unsloth_attention_supported(ctx.0, &params, &mut implementation);
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
            assert_eq!(implementation == 1, of_cpu, "{implementation}");
            let status = unsloth_attention_supported(ctx.0, &params, ptr::null_mut());
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS);
            let status = unsloth_attention_workspace_size(ctx.0, &params, &mut size);
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS);
            assert!(size == 0 || !of_cpu, "{size}");
            params.q.shape[2] = 7;
            (implementation, size) = (77, 77);
            let message = "attention: q has 7 heads, a multiple of the 2 of k is needed";
            let status = unsloth_attention_supported(ctx.0, &params, &mut implementation);
            assert_fails(status, INVALID, message);
            let status = unsloth_attention_workspace_size(ctx.0, &params, &mut size);
            assert_fails(status, INVALID, message);
            assert_eq!((implementation, size), (77, 77));
        }
    }
}
