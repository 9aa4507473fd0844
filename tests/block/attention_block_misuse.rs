//! The attention block through the C ABI with arguments that must be refused.

use crate::common::abi::{
    Handle, Misuse, Operation, absent, assert_fails, backends, c_tensor, shifted, zeroed_params,
};
use crate::common::{TestTensor, rng};
use unsloth::ffi::attention_block::*;
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::kv_cache_sequence::unsloth_kv_cache_sequence_create;
use unsloth::ffi::status::*;
use unsloth::{Buffer, Context, DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const NULL: unsloth_status = UNSLOTH_STATUS_NULL_POINTER;

const MISUSE: &[Misuse<unsloth_attention_block_params>] = &[
    (
        |p| p.qkv_out = p.residual,
        INVALID,
        "attention_block: qkv_out has shape [3, 6], expected [3, 16]",
    ),
    (
        |p| {
            p.qkv_out = p.x;
            p.qkv_out.shape[1] = 16;
            p.qkv_out.strides[0] = 17;
        },
        INVALID,
        "attention_block: qkv_out has shape [3, 16] with strides [17, 1], it must be contiguous",
    ),
    (
        |p| p.lse_out = p.x,
        INVALID,
        "attention_block: lse_out is there without attended_out",
    ),
    (
        |p| p.attended_out = p.x,
        INVALID,
        "attention_block: attended_out is there without lse_out",
    ),
    (
        |p| (p.attended_out, p.lse_out) = (p.x, p.x),
        INVALID,
        "attention_block: lse_out has shape [3, 6], expected [2, 3]",
    ),
    (
        |p| p.x_norm = p.x,
        INVALID,
        "attention_block: x_norm has shape [3, 6], expected [6]",
    ),
    (
        |p| p.attended_norm = p.x,
        INVALID,
        "attention_block: attended_norm has shape [3, 6], expected [8]",
    ),
    (
        |p| p.rotate = 2,
        INVALID,
        "attention_block: rotate is 2, allowed: 0, 1",
    ),
    (
        |p| p.bidirectional = 9,
        INVALID,
        "attention_block: bidirectional is 9, allowed: 0, 1",
    ),
    (
        |p| p.num_heads = -2,
        INVALID,
        "attention_block: num_heads is -2, at least 0 is needed",
    ),
    (
        |p| p.num_heads = i64::MAX,
        INVALID,
        "attention_block: num_heads is 9223372036854775807, allowed: 1 to 1048576",
    ),
    (
        |p| p.num_kv_heads = 0,
        INVALID,
        "attention_block: k_weight has 4 rows, 8 are needed",
    ),
    (
        |p| p.head_dim = 0,
        INVALID,
        "attention_block: head_dim is 0 (not set), allowed: 1 to 512",
    ),
    (
        |p| p.window = -1,
        INVALID,
        "attention_block: window is -1, at least 0 is needed",
    ),
    (
        |p| p.scale = f32::NAN,
        INVALID,
        "attention_block: scale is NaN, a finite number is needed",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "attention_block: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.rank = 1,
        INVALID,
        "attention_block: x has rank 1, allowed: 2, 3",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "attention_block: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        NULL,
        "attention_block: data of x is NULL",
    ),
    (
        |p| p.q_weight = absent(),
        INVALID,
        "attention_block: q_weight and qkv_weight are absent, one is required",
    ),
    (
        |p| p.qkv_weight = p.q_weight,
        INVALID,
        "attention_block: q_weight and qkv_weight are both there: set one",
    ),
    (
        |p| p.qkv_bias = p.q_norm,
        INVALID,
        "attention_block: qkv_bias is there without qkv_weight",
    ),
    (
        |p| p.v_weight = absent(),
        INVALID,
        "attention_block: v_weight is absent (rank 0), it is required",
    ),
    (
        |p| p.k_weight.shape[1] = 5,
        INVALID,
        "attention_block: k_weight has shape [4, 5], expected [4, 6]",
    ),
    (
        |p| p.v_weight.data = std::ptr::null_mut(),
        NULL,
        "attention_block: data of v_weight is NULL",
    ),
    (
        |p| p.q_norm.shape[0] = 3,
        INVALID,
        "attention_block: q_norm has shape [3], allowed: [4] or [8]",
    ),
    (
        |p| p.q_norm.data = std::ptr::null_mut(),
        NULL,
        "attention_block: data of q_norm is NULL",
    ),
    (
        |p| (p.rotate, p.rotation.rotary_dim) = (1, 6),
        INVALID,
        "attention_block: rotary_dim is 6, above the head_dim 4",
    ),
    (
        |p| p.out_weight.shape[1] = 7,
        INVALID,
        "attention_block: out_weight has shape [6, 7], expected [6, 8]",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "attention_block: out is absent (rank 0), it is required",
    ),
    (
        |p| p.out.shape[0] = 2,
        INVALID,
        "attention_block: out has shape [2, 6], expected [3, 6]",
    ),
    (
        |p| p.residual.dtype = DType::F16 as u32,
        INVALID,
        "attention_block: residual has dtype f16, out has f32",
    ),
    (
        |p| p.residual = shifted(&p.out),
        INVALID,
        "attention_block: out overlaps residual",
    ),
    (
        |p| p.out.data = p.x.data,
        INVALID,
        "attention_block: out overlaps x",
    ),
    (
        |p| p.out.data = p.workspace,
        INVALID,
        "attention_block: workspace overlaps out",
    ),
    (
        |p| p.x.data = p.workspace,
        INVALID,
        "attention_block: workspace overlaps x",
    ),
    (
        |p| p.workspace_size -= 1,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "attention_block: workspace_size is 511 bytes, 512 are required",
    ),
    (
        |p| p.workspace = std::ptr::null_mut(),
        NULL,
        "attention_block: workspace is NULL",
    ),
    (
        |p| p.cu_seqlens = p.q_norm,
        INVALID,
        "attention_block: cu_seqlens has dtype f32, allowed: i32",
    ),
    (
        |p| p.sinks = p.q_norm,
        INVALID,
        "attention_block: sinks has shape [4], expected [2]",
    ),
    (
        |p| p.cache = std::ptr::without_provenance_mut(0x7777),
        UNSLOTH_STATUS_INVALID_HANDLE,
        "attention_block: cache is not a live unsloth_kv_cache handle (0x7777)",
    ),
];

struct Good {
    params: unsloth_attention_block_params,
    out: crate::common::DeviceTensor,
    _tensors: Vec<crate::common::DeviceTensor>,
    _workspace: Buffer,
}

/// Three tokens of six components, two query heads and one key head of four.
fn good(ctx: &Context) -> Good {
    let rng = &mut rng();
    let mut normal = |shape: &[usize]| {
        TestTensor::normal(rng, DType::F32, Layout::contiguous(shape).unwrap()).upload(ctx)
    };
    let tensors = vec![
        normal(&[3, 6]),
        normal(&[8, 6]),
        normal(&[4, 6]),
        normal(&[4, 6]),
        normal(&[6, 8]),
        normal(&[4]),
        normal(&[3, 6]),
    ];
    let out = TestTensor::poisoned(DType::F32, Layout::contiguous(&[3, 6]).unwrap()).upload(ctx);
    let workspace = Buffer::new(ctx, 512).unwrap();
    // SAFETY: zero is a value of the struct.
    let mut p: unsloth_attention_block_params = unsafe { zeroed_params() };
    (p.num_heads, p.num_kv_heads, p.head_dim) = (2, 1, 4);
    p.x = c_tensor(&tensors[0]);
    p.q_weight = c_tensor(&tensors[1]);
    p.k_weight = c_tensor(&tensors[2]);
    p.v_weight = c_tensor(&tensors[3]);
    p.out_weight = c_tensor(&tensors[4]);
    p.q_norm = c_tensor(&tensors[5]);
    p.norm_epsilon = 1e-5;
    p.residual = c_tensor(&tensors[6]);
    p.out = c_tensor(&out);
    p.workspace = workspace.as_ptr().cast();
    p.workspace_size = 512;
    Good {
        params: p,
        out,
        _tensors: tensors,
        _workspace: workspace,
    }
}

#[test]
fn misuse() {
    for (memory, ctx) in backends() {
        let good = good(&memory);
        let operation = Operation {
            name: "attention_block",
            supported: unsloth_attention_block_supported,
            forward: unsloth_attention_block_forward,
        };
        operation.check_on(&ctx, good.params, MISUSE, &[&good.out]);
    }
}

#[test]
fn the_query_is_exact_and_looks_at_no_data() {
    for (memory, ctx) in backends() {
        let mut p = good(&memory).params;
        for t in [
            &mut p.x,
            &mut p.q_weight,
            &mut p.k_weight,
            &mut p.v_weight,
            &mut p.out_weight,
            &mut p.out,
            &mut p.q_norm,
            &mut p.residual,
        ] {
            t.data = std::ptr::null_mut();
        }
        (p.workspace, p.workspace_size) = (std::ptr::null_mut(), 0);
        let mut size = 0;
        // SAFETY: queries do not look at data.
        unsafe {
            let got = unsloth_attention_block_workspace_size(ctx.0, &p, &mut size);
            // 3 tokens of 16 and of 8 components, each rounded up.
            assert_eq!((got, size), (UNSLOTH_STATUS_SUCCESS, 512));
            let got = unsloth_attention_block_workspace_size(ctx.0, &p, std::ptr::null_mut());
            assert_fails(got, NULL, "attention_block: workspace_size is NULL");
            // Tokens broadcast by a stride of zero: shapes beyond all memory are refused by arithmetic.
            (p.x.shape[0], p.x.strides) = (1 << 58, [0, 1, 0, 0, 0, 0]);
            let got = unsloth_attention_block_workspace_size(ctx.0, &p, &mut size);
            assert_eq!((got, size), (INVALID, 512));
        }
    }
}

#[test]
fn caches() {
    for (memory, ctx) in backends() {
        let other = Handle::on(memory.backend());
        let good = good(&memory);
        let mut p = good.params;
        let stream = std::ptr::null_mut();
        // SAFETY: structs of integers; pointers to live locals; tensors in live memory.
        unsafe {
            let mut shape: unsloth_kv_cache_params = zeroed_params();
            (shape.dtype, shape.num_layers, shape.num_kv_heads) = (DType::F32 as u32, 1, 1);
            (shape.head_dim, shape.num_pages) = (4, 2);
            let mut caches = [std::ptr::null_mut(); 2];
            for (ctx, cache) in [&ctx, &other].into_iter().zip(&mut caches) {
                let got = unsloth_kv_cache_create(ctx.0, &shape, cache);
                assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
            }
            p.cache = caches[1];
            let mut id = 0;
            assert_eq!(unsloth_kv_cache_sequence_create(p.cache, &mut id), 0);
            assert_eq!(unsloth_kv_cache_extend(p.cache, &id, &3, 1, stream), 0);
            assert_fails(
                unsloth_attention_block_forward(ctx.0, &p, stream),
                INVALID,
                "attention_block: cache belongs to another context",
            );
            p.cache = caches[0];
            p.layer = -1;
            assert_fails(
                unsloth_attention_block_forward(ctx.0, &p, stream),
                INVALID,
                "attention_block: layer is -1, at least 0 is needed",
            );
            p.layer = 0;
            let mut size = 0;
            let got = unsloth_attention_block_workspace_size(ctx.0, &p, &mut size);
            assert_eq!(
                got,
                UNSLOTH_STATUS_SUCCESS,
                "{}",
                crate::common::abi::last_message()
            );
            assert!(size >= 512);
            let few = p.x.shape[0];
            (p.x.shape[0], p.out.shape[0], p.residual.shape[0]) = (8193, 8193, 8193);
            assert_fails(
                unsloth_attention_block_workspace_size(ctx.0, &p, &mut size),
                INVALID,
                "attention_block: x has 8193 tokens, above max_batch_tokens 8192 of the cache",
            );
            (p.x.shape[0], p.out.shape[0], p.residual.shape[0]) = (few, few, few);
            assert_fails(
                unsloth_attention_block_forward(ctx.0, &p, stream),
                INVALID,
                "attention_block: cache has no current batch: it must be extended first, and again after its sequences changed",
            );
            assert_eq!(unsloth_kv_cache_sequence_create(p.cache, &mut id), 0);
            assert_eq!(unsloth_kv_cache_extend(p.cache, &id, &3, 1, stream), 0);
            let (mut k, mut v) = (p.x, p.x);
            assert_eq!(unsloth_kv_cache_layer_get(p.cache, 0, &mut k, &mut v), 0);
            p.out.data = v.data;
            assert_fails(
                unsloth_attention_block_forward(ctx.0, &p, stream),
                INVALID,
                "attention_block: out overlaps the pages of the layer",
            );
            p.out.data = good.params.out.data;
            let got = unsloth_attention_block_forward(ctx.0, &p, stream);
            assert_eq!(
                got,
                UNSLOTH_STATUS_SUCCESS,
                "{}",
                crate::common::abi::last_message()
            );
            for cache in caches {
                assert_eq!(unsloth_kv_cache_destroy(cache), UNSLOTH_STATUS_SUCCESS);
            }
        }
    }
}
