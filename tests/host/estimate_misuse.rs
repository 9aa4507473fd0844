//! What estimates refuse, and how they say it.

use crate::common::abi::{Handle, assert_fails, zeroed_params};
use unsloth::DType;
use unsloth::ffi::estimate::*;
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::status::*;

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// Two layers of four heads.
fn model() -> unsloth_model_params {
    // SAFETY: a struct of integers.
    let mut model: unsloth_model_params = unsafe { zeroed_params() };
    (model.vocab_size, model.hidden_size, model.intermediate_size) = (100, 48, 96);
    (model.num_layers, model.num_heads) = (2, 4);
    model
}

#[test]
fn bad_models_say_why() {
    // SAFETY: structs of integers and pointers; every pointer is NULL or to a live local.
    unsafe {
        let model = model();
        let mut count: unsloth_parameter_count = zeroed_params();
        type Spoil = fn(&mut unsloth_model_params);
        let cases: [(Spoil, &str); 6] = [
            (
                |m| m.struct_size = 8,
                "estimate: struct_size is 8, at least 88 is needed",
            ),
            (
                |m| m.hidden_size = -1,
                "estimate: hidden_size is -1, at least 0 is needed",
            ),
            (
                |m| m.num_heads = 5,
                "estimate: head_dim is 0, and hidden_size 48 does not divide by num_heads 5",
            ),
            (
                |m| m.num_kv_heads = 3,
                "estimate: num_kv_heads is 3, which does not divide num_heads 4",
            ),
            (|m| m.qk_norm = 2, "estimate: qk_norm is 2, allowed: 0, 1"),
            (
                |m| m.num_heads = 0,
                "estimate: num_heads is 0, at least 1 is needed",
            ),
        ];
        for (spoil, message) in cases {
            let mut bad = model;
            spoil(&mut bad);
            let got = unsloth_model_parameters_count(&bad, &mut count);
            assert_fails(got, INVALID, message);
            assert_eq!(count.total, 0, "nothing is written");
        }
        let got = unsloth_model_parameters_count(std::ptr::null(), &mut count);
        assert_fails(got, UNSLOTH_STATUS_NULL_POINTER, "estimate: model is NULL");
        let got = unsloth_model_parameters_count(&model, std::ptr::null_mut());
        assert_fails(got, UNSLOTH_STATUS_NULL_POINTER, "estimate: memory is NULL");
        let got = unsloth_model_parameters_count(&model, &mut count);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        assert_eq!(count.attention, 2 * 4 * 48 * 48);
    }
}

#[test]
fn bad_training_says_why() {
    let model = model();
    // SAFETY: structs of integers and pointers; every pointer is NULL or to a live local.
    unsafe {
        let mut t: unsloth_training_memory_params = zeroed_params();
        (t.dtype, t.model, t.batch_size, t.sequence_length) = (DType::Bf16 as u32, &model, 1, 8);
        let mut m: unsloth_training_memory = zeroed_params();
        type SpoilTraining = fn(&mut unsloth_training_memory_params);
        let cases: [(SpoilTraining, unsloth_status, &str); 7] = [
            (
                |t| t.optimizer = 4,
                INVALID,
                "estimate: optimizer is 4, allowed: 0 (adam), 1 (adam 8-bit), 2 (sgd), 3 (sgd with momentum)",
            ),
            (
                |t| t.checkpointing = 6,
                INVALID,
                "estimate: checkpointing is 6, allowed: 0 (none), 1 (selective), 2 (full), 3 (elementwise), 4 (mlp), 5 (projections)",
            ),
            (
                |t| t.dtype = DType::I32 as u32,
                INVALID,
                "estimate: dtype is 4, allowed: 1 (f32), 2 (f16), 3 (bf16)",
            ),
            (
                |t| t.gradient_dtype = 99,
                INVALID,
                "estimate: gradient_dtype is 99, allowed: 1 (f32), 2 (f16), 3 (bf16)",
            ),
            (
                |t| t.model = std::ptr::null(),
                UNSLOTH_STATUS_NULL_POINTER,
                "estimate: model is NULL",
            ),
            (
                |t| t.sequence_length = 0,
                INVALID,
                "estimate: sequence_length is 0, at least 1 is needed",
            ),
            (
                |t| t.batch_size = i64::MAX,
                INVALID,
                "estimate: tokens overflows 64 bits",
            ),
        ];
        for (spoil, status, message) in cases {
            let mut bad = t;
            spoil(&mut bad);
            assert_fails(
                unsloth_training_memory_estimate(&bad, &mut m),
                status,
                message,
            );
        }
        let of_a_context = "which asks for the estimate of a context's own step";
        for (spoil, name) in [
            (
                (|t| t.adapted_parameters = 3) as SpoilTraining,
                "adapted_parameters",
            ),
            (|t| t.packed_sequences = 3, "packed_sequences"),
            (|t| t.segment_layers = 3, "segment_layers"),
            (|t| t.micro_batches = 3, "micro_batches"),
        ] {
            let mut bad = t;
            spoil(&mut bad);
            let got = unsloth_training_memory_estimate(&bad, &mut m);
            let message = format!("estimate: {name} is 3, {of_a_context}");
            assert_fails(got, INVALID, &message);
        }
        let got = unsloth_training_memory_estimate(&t, &mut m);
        assert_eq!((got, m.master_weights), (UNSLOTH_STATUS_SUCCESS, 0));
        assert_eq!((m.inputs, m.activation_gradients, m.workspace), (0, 0, 0));
        t.chunk_tokens = 5;
        let got = unsloth_training_memory_estimate(&t, &mut m);
        assert_eq!((got, m.logits), (UNSLOTH_STATUS_SUCCESS, 5 * 100 * 4));
    }
}

/// What this library's own steps have not.
#[test]
fn bad_training_steps_say_why() {
    let (ctx, mut model) = (Handle::cpu(), model());
    model.tied_embeddings = 1;
    // SAFETY: structs of integers and pointers; every pointer is NULL or to a live local.
    unsafe {
        let mut t: unsloth_training_memory_params = zeroed_params();
        (t.dtype, t.model, t.batch_size, t.sequence_length) = (DType::Bf16 as u32, &model, 1, 8);
        (t.gradient_dtype, t.master_weights, t.ctx) = (DType::F32 as u32, 2, ctx.0);
        let mut m: unsloth_training_memory = zeroed_params();
        let odd = unsloth_model_params {
            head_dim: 7,
            ..model
        };
        let deep = unsloth_model_params {
            num_layers: 1 << 20,
            ..model
        };
        type SpoilTraining<'a> = &'a dyn Fn(&mut unsloth_training_memory_params);
        let cases: [(SpoilTraining<'_>, unsloth_status, &str); 12] = [
            (
                &|t| t.naive_attention = 1,
                INVALID,
                "estimate: naive_attention is 1: this library's attention stores no probabilities",
            ),
            (
                &|t| t.optimizer = 1,
                INVALID,
                "estimate: optimizer is 1 (adam 8-bit), which this library's steps do not have",
            ),
            (
                &|t| t.gradient_dtype = 0,
                INVALID,
                "estimate: gradient_dtype is bf16: both gradients of a tied embedding are added \
                 up in f32",
            ),
            (
                &|t| t.master_weights = 4,
                INVALID,
                "estimate: master_weights is 4, allowed: 0 (none), 1 (f32), 2 (remainder), \
                 3 (stochastic)",
            ),
            (
                &|t| t.weight_dtype = DType::F16 as u32,
                UNSLOTH_STATUS_UNSUPPORTED,
                "estimate: weight has dtype f16, allowed with this master: f32, bf16",
            ),
            (
                &|t| t.vector_dtype = 5,
                INVALID,
                "estimate: vector_dtype is 5, allowed: 1 (f32), 2 (f16), 3 (bf16)",
            ),
            (
                &|t| t.adapter_dtype = 5,
                INVALID,
                "estimate: adapter_dtype is 5, allowed: 1 (f32), 2 (f16), 3 (bf16)",
            ),
            (
                &|t| t.chunk_tokens = -1,
                INVALID,
                "estimate: chunk_tokens is -1, at least 0 is needed",
            ),
            (
                &|t| t.segment_layers = -1,
                INVALID,
                "estimate: segment_layers is -1, at least 0 is needed",
            ),
            (
                &|t| (t.segment_layers, t.model) = (2, &raw const deep),
                INVALID,
                "estimate: num_layers is 1048576, allowed: 1 to 65536",
            ),
            (
                &|t| t.model = &raw const odd,
                INVALID,
                "estimate: head_dim is 7: an even number of components is rotated",
            ),
            (
                &|t| t.reserved2 = 1,
                INVALID,
                "estimate: reserved2 is 1, allowed: 0",
            ),
        ];
        for (spoil, status, message) in cases {
            let mut bad = t;
            spoil(&mut bad);
            let got = unsloth_training_memory_estimate(&bad, &mut m);
            assert_fails(got, status, message);
            assert_eq!(m.total, 0, "nothing is written");
        }
        let got = unsloth_training_memory_estimate(&t, &mut m);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        assert!(m.workspace > 0 && m.logits == 0);
    }
}

#[test]
fn bad_inference_says_why() {
    let (ctx, model) = (Handle::cpu(), model());
    // SAFETY: structs of integers and pointers; every pointer is NULL or to a live local.
    unsafe {
        let mut cache: unsloth_kv_cache_params = zeroed_params();
        (cache.dtype, cache.num_layers, cache.num_kv_heads) = (DType::F32 as u32, 2, 4);
        (cache.head_dim, cache.num_pages) = (12, 4);
        let mut i: unsloth_inference_memory_params = zeroed_params();
        (i.weight_dtype, i.dtype) = (DType::F32 as u32, DType::F32 as u32);
        (i.model, i.kv_cache) = (&model, &cache);
        (i.batch_size, i.num_tokens, i.num_logits) = (1, 4, 1);
        let mut m: unsloth_inference_memory = zeroed_params();
        let got = unsloth_inference_memory_estimate(std::ptr::null_mut(), &i, &mut m);
        assert_fails(got, UNSLOTH_STATUS_NULL_POINTER, "estimate: ctx is NULL");
        let bad = unsloth_inference_memory_params {
            kv_cache: std::ptr::null(),
            ..i
        };
        let got = unsloth_inference_memory_estimate(ctx.0, &bad, &mut m);
        assert_fails(
            got,
            UNSLOTH_STATUS_NULL_POINTER,
            "estimate: kv_cache is NULL",
        );
        let mut alone = i;
        alone.parallel.chunk_rows = 16;
        let got = unsloth_inference_memory_estimate(ctx.0, &alone, &mut m);
        let expected = "estimate: chunk_rows is set without comm";
        assert_fails(got, INVALID, expected);
        let mut reserved = i;
        reserved.parallel.reserved[1] = 1;
        let got = unsloth_inference_memory_estimate(ctx.0, &reserved, &mut m);
        let expected = "estimate: parallel.reserved is 1, allowed: 0";
        assert_fails(got, INVALID, expected);
        assert_eq!(m.total, 0, "nothing is written");
        let got = unsloth_inference_memory_estimate(ctx.0, &i, &mut m);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        assert!(m.total > 0);
    }
}

#[test]
fn bad_attention_says_why() {
    let ctx = Handle::cpu();
    // SAFETY: structs of integers and pointers; every pointer is NULL or to a live local.
    unsafe {
        let mut a: unsloth_attention_memory_params = zeroed_params();
        (a.dtype, a.batch_size, a.num_queries) = (DType::F16 as u32, 1, 16);
        (a.num_heads, a.head_dim) = (2, 513);
        let mut m: unsloth_attention_memory = zeroed_params();
        let got = unsloth_attention_memory_estimate(ctx.0, &a, &mut m);
        assert_fails(
            got,
            INVALID,
            "estimate: q has head_dim 513, allowed: 1 to 512",
        );
        a.head_dim = 8;
        let got = unsloth_attention_memory_estimate(ctx.0, &a, &mut m);
        assert_eq!(
            (got, m.naive_scores),
            (UNSLOTH_STATUS_SUCCESS, 2 * 16 * 16 * 2)
        );
    }
}
