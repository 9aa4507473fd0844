//! Estimates: whatever the numbers, an answer whose parts sum to its total, or a refusal.

use std::ptr;

use unsloth::ffi::checkpoint::*;
use unsloth::ffi::estimate::*;
use unsloth::ffi::kv_cache::unsloth_kv_cache_params;
use unsloth::ffi::pipeline::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_dtype;

use crate::input::Input;
use crate::{context, last_message};

/// A struct of which only its size is stated.
///
/// # Safety
/// `P` begins with `struct_size`, and all zero is a value of it.
unsafe fn sized<P>() -> P {
    // SAFETY: the caller's promise.
    unsafe {
        let mut value: P = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<P>() as u32);
        value
    }
}

fn size(input: &mut Input) -> i64 {
    if input.one_in(12) {
        input.number()
    } else {
        1 + input.up_to(63)
    }
}

fn dtype(input: &mut Input) -> unsloth_dtype {
    u32::from(input.byte()) % 4
}

fn flag(input: &mut Input) -> u32 {
    if input.one_in(32) {
        7
    } else {
        u32::from(input.byte()) % 2
    }
}

fn check(status: unsloth_status, sum: impl FnOnce() -> u64, total: impl FnOnce() -> u64) {
    assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
    if status == UNSLOTH_STATUS_SUCCESS {
        assert_eq!(sum(), total());
    }
}

fn model(input: &mut Input) -> unsloth_model_params {
    // SAFETY: a sized struct of the C ABI.
    let mut p: unsloth_model_params = unsafe { sized() };
    p.tied_embeddings = flag(input);
    p.qkv_bias = flag(input);
    p.mlp_bias = flag(input);
    p.vocab_size = size(input);
    p.hidden_size = size(input);
    p.intermediate_size = size(input);
    p.num_layers = size(input);
    p.num_kv_heads = size(input);
    p.num_heads = p.num_kv_heads.saturating_mul(1 + input.up_to(3));
    p.head_dim = size(input);
    p
}

fn cache(input: &mut Input) -> unsloth_kv_cache_params {
    // SAFETY: a sized struct of the C ABI.
    let mut p: unsloth_kv_cache_params = unsafe { sized() };
    p.dtype = dtype(input);
    p.num_layers = size(input);
    p.num_kv_heads = size(input);
    p.head_dim = size(input);
    p.page_size = if input.one_in(12) {
        input.number()
    } else {
        1 << input.up_to(6)
    };
    p.num_pages = size(input);
    p
}

pub fn run(input: &mut Input) {
    let (model, cache) = (model(input), cache(input));
    let shape = if input.one_in(16) {
        ptr::null()
    } else {
        &raw const model
    };
    // SAFETY: every struct is a live local of the size stated, and sized structs of the C ABI may be zero.
    unsafe {
        match input.byte() % 6 {
            0 => {
                let mut p: unsloth_attention_memory_params = sized();
                let mut m: unsloth_attention_memory = sized();
                p.dtype = dtype(input);
                p.causal = flag(input);
                p.batch_size = size(input);
                p.num_queries = size(input);
                p.num_keys = size(input);
                p.num_kv_heads = size(input);
                p.num_heads = p.num_kv_heads.saturating_mul(1 + input.up_to(3));
                p.head_dim = size(input);
                let status = unsloth_attention_memory_estimate(context(), &p, &mut m);
                check(
                    status,
                    || m.inputs + m.output + m.flash_workspace + m.flash_lse,
                    || m.flash_total,
                );
            }
            1 => {
                let mut m: unsloth_kv_cache_memory = sized();
                let status = unsloth_kv_cache_memory_estimate(&cache, &mut m);
                check(status, || m.keys + m.values + m.tables, || m.total);
            }
            2 => {
                let mut p: unsloth_inference_memory_params = sized();
                let mut m: unsloth_inference_memory = sized();
                (p.weight_dtype, p.dtype) = (dtype(input), dtype(input));
                p.model = shape;
                p.kv_cache = if input.one_in(4) { ptr::null() } else { &cache };
                p.batch_size = size(input);
                p.num_tokens = size(input);
                p.num_logits = size(input);
                let status = unsloth_inference_memory_estimate(context(), &p, &mut m);
                let sum = || m.weights + m.kv_cache + m.activations + m.workspace + m.logits;
                check(status, sum, || m.total);
            }
            3 => checkpoint_plan(input),
            4 => pipeline(input),
            _ => {
                let mut p: unsloth_training_memory_params = sized();
                let mut m: unsloth_training_memory = sized();
                (p.dtype, p.gradient_dtype) = (dtype(input), dtype(input));
                p.master_weights = u32::from(input.byte()) % 5;
                p.optimizer = u32::from(input.byte()) % 6;
                p.checkpointing = u32::from(input.byte()) % 7;
                p.naive_attention = flag(input);
                p.model = shape;
                p.batch_size = size(input);
                p.sequence_length = size(input);
                p.adapter_parameters = if input.one_in(4) { input.number() } else { 0 };
                (p.weight_dtype, p.vector_dtype) = (dtype(input), dtype(input));
                p.adapter_dtype = dtype(input);
                p.chunk_tokens = if input.one_in(4) { size(input) } else { 0 };
                if input.one_in(2) {
                    p.ctx = context();
                    p.packed_sequences = if input.one_in(2) { size(input) } else { 0 };
                    p.segment_layers = if input.one_in(2) { size(input) } else { 0 };
                    p.adapted_parameters = if input.one_in(4) { size(input) } else { 0 };
                    p.micro_batches = if input.one_in(4) { size(input) } else { 0 };
                }
                let status = unsloth_training_memory_estimate(&p, &mut m);
                let sum = || {
                    m.weights
                        + m.master_weights
                        + m.gradients
                        + m.optimizer_state
                        + m.saved_activations
                        + m.recomputed_activations
                        + m.logits
                        + m.inputs
                        + m.activation_gradients
                        + m.workspace
                };
                check(status, sum, || m.total);
            }
        }
    }
}

/// Plans, and actions that name only slots that the summary has.
unsafe fn checkpoint_plan(input: &mut Input) {
    const CAPACITY: usize = 64;
    // SAFETY: every struct is a live local of the size stated, and sized structs of the C ABI may be zero.
    unsafe {
        let mut p: unsloth_checkpoint_plan_params = sized();
        let mut summary: unsloth_checkpoint_summary = sized();
        let mut actions: [unsloth_checkpoint_action; CAPACITY] = std::mem::zeroed();
        p.num_layers = size(input);
        p.every = if input.one_in(4) { 0 } else { size(input) };
        p.hidden_bytes = input.number() as u64;
        p.saved_bytes = input.number() as u64;
        let capacity = usize::from(input.byte()) % (CAPACITY + 1);
        let status = unsloth_checkpoint_plan(&p, &mut summary, actions.as_mut_ptr(), capacity);
        if status != UNSLOTH_STATUS_SUCCESS {
            assert!(actions.iter().all(|action| action.step == 0), "written");
            return;
        }
        for action in &actions[..summary.num_actions as usize] {
            assert!((0..p.num_layers).contains(&action.layer.into()));
            assert!((0..summary.num_hidden_slots).contains(&action.input.into()));
            assert!((-1..summary.num_hidden_slots).contains(&action.output.into()));
            assert!((-1..summary.num_saved_slots).contains(&action.saved.into()));
        }
    }
}

/// Schedules whose actions name what there is, and simulations of them.
unsafe fn pipeline(input: &mut Input) {
    const CAPACITY: usize = 128;
    // SAFETY: every struct is a live local of the size stated, and sized structs of the C ABI may be zero.
    unsafe {
        let mut p: unsloth_pipeline_schedule_params = sized();
        let mut summary: unsloth_pipeline_summary = sized();
        let mut actions: [unsloth_pipeline_action; CAPACITY] = std::mem::zeroed();
        p.kind = u32::from(input.byte()) % 5;
        p.stages = input.pick(&[1, 2, 3, 4, 5, 8, 0, -1, 1024, i32::MAX]);
        p.rank = input.pick(&[0, 0, 1, 2, 3, 7, -1, i32::MAX]);
        p.chunks = input.pick(&[0, 1, 2, 3, 4, -1, 1025, i32::MAX]);
        p.micro_batches = match input.one_in(4) {
            // What interleaved ranks divide evenly.
            true => i64::from(p.stages) * (1 + input.up_to(5)),
            false => size(input),
        };
        let capacity = usize::from(input.byte()) % (CAPACITY + 1);
        let status = unsloth_pipeline_schedule(&p, &mut summary, actions.as_mut_ptr(), capacity);
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        if status != UNSLOTH_STATUS_SUCCESS {
            assert!(actions.iter().all(|action| action.step == 0), "written");
        } else {
            for action in &actions[..summary.num_actions as usize] {
                assert!((0..p.micro_batches).contains(&action.micro_batch.into()));
                assert!((0..p.chunks.max(1)).contains(&action.chunk));
                assert!((-1..p.stages).contains(&action.peer) && action.joined <= 1);
                assert!((-1..summary.num_slots).contains(&action.slot.into()));
            }
        }
        let mut s: unsloth_pipeline_simulate_params = sized();
        let mut found: unsloth_pipeline_simulation = sized();
        (s.kind, s.stages, s.chunks) = (p.kind, p.stages, p.chunks);
        s.micro_batches = p.micro_batches;
        s.forward = input.pick(&[0.0, 1.0, 2.5, 1e18, -1.0, f64::NAN]);
        s.backward_input = input.pick(&[0.0, 1.0, 1e-300, f64::INFINITY]);
        s.backward_weight = input.pick(&[0.0, 1.0, 3.0]);
        s.transfer = input.pick(&[0.0, 0.25]);
        s.overlap = flag(input);
        s.activation_bytes = input.number() as u64;
        s.split_bytes = input.number() as u64;
        let status = unsloth_pipeline_simulate(&s, &mut found, ptr::null_mut(), 0);
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        if status == UNSLOTH_STATUS_SUCCESS {
            let passes = s.forward + s.backward_input + s.backward_weight;
            assert!((0.0..=1.0).contains(&found.idle) && found.time.is_finite());
            assert!(found.time >= passes * s.micro_batches as f64 * (1.0 - 1e-9));
        }
    }
}
