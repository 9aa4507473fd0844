//! Memory estimates against published models, hand counts, and what the library really allocates and asks for.

use crate::common::abi::{Handle, zeroed_params};
use crate::common::contexts;
use proptest::prelude::*;
use unsloth::estimate::{
    AttentionShape, Checkpointing, Inference, Master, Model, OptimizerKind, Training,
    attention_memory, format_bytes, inference_memory, training_memory,
};
use unsloth::ffi::estimate::*;
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::memory::{unsloth_memory_stats, unsloth_memory_stats_get};
use unsloth::ffi::status::*;
use unsloth::kv_cache::{Config, KvCache};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::Positions;
use unsloth::ops::swiglu::Activation;
use unsloth::{Context, DType, Layout, Stream, TensorMut, TensorRef, Workspace};

const SMOLLM2_135M: Model = Model {
    vocab_size: 49_152,
    hidden_size: 576,
    intermediate_size: 1536,
    num_layers: 30,
    num_heads: 9,
    num_kv_heads: 3,
    head_dim: 64,
    v_head_dim: 64,
    tied_embeddings: true,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};

const LLAMA_3_8B: Model = Model {
    vocab_size: 128_256,
    hidden_size: 4096,
    intermediate_size: 14_336,
    num_layers: 32,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    v_head_dim: 128,
    tied_embeddings: false,
    ..SMOLLM2_135M
};

/// The counts are those of the published safetensors files.
#[test]
fn parameters_of_published_models() {
    let models = [
        ("SmolLM2-135M", SMOLLM2_135M, 134_515_008),
        ("Llama-3-8B", LLAMA_3_8B, 8_030_261_248),
        (
            "Llama-3.2-1B",
            Model {
                hidden_size: 2048,
                intermediate_size: 8192,
                num_layers: 16,
                head_dim: 64,
                v_head_dim: 64,
                tied_embeddings: true,
                ..LLAMA_3_8B
            },
            1_235_814_400,
        ),
        (
            "Mistral-7B-v0.1",
            Model {
                vocab_size: 32_000,
                ..LLAMA_3_8B
            },
            7_241_732_096,
        ),
        (
            "Qwen2.5-0.5B",
            Model {
                vocab_size: 151_936,
                hidden_size: 896,
                intermediate_size: 4864,
                num_layers: 24,
                num_heads: 14,
                num_kv_heads: 2,
                qkv_bias: true,
                ..SMOLLM2_135M
            },
            494_032_768,
        ),
        (
            "Qwen3-0.6B",
            Model {
                vocab_size: 151_936,
                hidden_size: 1024,
                intermediate_size: 3072,
                num_layers: 28,
                num_heads: 16,
                num_kv_heads: 8,
                head_dim: 128,
                v_head_dim: 128,
                qk_norm: true,
                ..SMOLLM2_135M
            },
            596_049_920,
        ),
    ];
    for (name, model, published) in models {
        let count = model.parameters().unwrap();
        assert_eq!(count.total, published, "{name}");
        let parts = count.embedding + count.attention + count.mlp + count.norms + count.head;
        assert_eq!(parts, published, "{name}");
    }
}

fn shape(len: u64) -> AttentionShape {
    AttentionShape {
        batch_size: 2,
        num_queries: len,
        num_keys: len,
        num_heads: 8,
        num_kv_heads: 2,
        head_dim: 64,
        v_head_dim: 32,
        dtype: DType::F16,
        causal: true,
    }
}

#[test]
fn naive_attention_is_quadratic_and_ours_is_not() {
    for ctx in contexts() {
        let m = attention_memory(&ctx, &shape(1024)).unwrap();
        assert_eq!(m.inputs, 2 * 1024 * (8 * 64 + 2 * 64 + 2 * 32) * 2);
        assert_eq!(m.output, 2 * 1024 * 8 * 32 * 2);
        assert_eq!(m.naive_scores, 2 * 8 * 1024 * 1024 * 2);
        assert_eq!(m.naive_probabilities, m.naive_scores);
        assert_eq!(m.flash_lse, 2 * 8 * 1024 * 4);
        assert_eq!(
            m.naive_total,
            m.inputs + m.output + m.naive_scores + m.naive_probabilities
        );
        assert_eq!(
            m.flash_total,
            m.inputs + m.output + m.flash_workspace + m.flash_lse
        );
        let longer = attention_memory(&ctx, &shape(4096)).unwrap();
        assert_eq!(longer.naive_scores, 16 * m.naive_scores);
        assert!(longer.flash_total <= 5 * m.flash_total);
    }
}

/// A tensor that is only described.
fn described(dtype: DType, shape: &[usize]) -> TensorRef<'static> {
    // SAFETY: queries do not look at data.
    unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(shape).unwrap()) }
}

fn output(dtype: DType, shape: &[usize]) -> Output<'static> {
    let layout = Layout::contiguous(shape).unwrap();
    // SAFETY: as above.
    Output::Write(unsafe { TensorMut::from_raw(std::ptr::null_mut(), dtype, layout) })
}

fn small_model() -> Model {
    Model {
        vocab_size: 100,
        hidden_size: 48,
        intermediate_size: 96,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        v_head_dim: 8,
        ..SMOLLM2_135M
    }
}

/// The estimate of inference is made of what a cache allocates and what the blocks' queries answer for the same pass.
#[test]
fn inference_takes_what_it_says() {
    for ctx in contexts() {
        for (intermediate_size, batch, tokens) in [(96, 1, 33), (4, 3, 7), (512, 2, 2)] {
            let model = Model {
                intermediate_size,
                ..small_model()
            };
            let config = Config {
                v_head_dim: 8,
                max_batch_size: 4,
                max_batch_tokens: 64,
                ..Config::new(2, 2, 16, 12, DType::F16)
            };
            let estimate = inference_memory(
                &ctx,
                &Inference {
                    model,
                    weight_dtype: DType::Bf16,
                    dtype: DType::F32,
                    cache: config.clone(),
                    batch_size: batch,
                    num_tokens: tokens,
                    num_logits: batch,
                },
            )
            .unwrap();
            assert_eq!(estimate.weights, model.parameters().unwrap().total * 2);
            assert_eq!(estimate.activations, 2 * tokens * 48 * 4);
            assert_eq!(estimate.logits, batch * 100 * 4);

            let before = ctx.memory_stats().in_use;
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            assert_eq!(ctx.memory_stats().in_use - before, estimate.kv_cache);
            // All tokens are one sequence's, but for the others' one: the longest prompt such a pass may have.
            let mut counts = vec![1; batch as usize];
            counts[0] = (tokens - (batch - 1)) as usize;
            let list: Vec<_> = counts
                .into_iter()
                .map(|n| (cache.create_sequence().unwrap(), n))
                .collect();
            cache.extend(&list, Stream::DEFAULT).unwrap();

            let (hidden, tokens) = (48, tokens as usize);
            let weights = |rows, columns| Weights {
                weight: described(DType::Bf16, &[rows, columns]),
                bias: None,
            };
            let block = attention_block::Params {
                x_norm: None,
                parallel: None,
                x: described(DType::F32, &[tokens, hidden]),
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 16,
                v_head_dim: 8,
                projections: Projections::Packed(weights(4 * 16 + 2 * 16 + 2 * 8, hidden)),
                q_norm: None,
                k_norm: None,
                norm_weight_offset: 0.0,
                norm_epsilon: 0.0,
                rotation: None,
                positions: Positions::From(0),
                cache: Some(cache.lend(1).unwrap()),
                cu_seqlens: None,
                max_seqlen: 0,
                scale: 0.0,
                softcap: 0.0,
                bidirectional: false,
                window: 0,
                alibi_slopes: None,
                sinks: None,
                attended_norm: None,
                out_projection: weights(hidden, 4 * 8),
                output: output(DType::F32, &[tokens, hidden]),
                workspace: Workspace::none(),
                qkv_out: None,
                attended_out: None,
                lse_out: None,
            };
            let attention = attention_block::workspace_size(&ctx, &block).unwrap();
            let intermediate = intermediate_size as usize;
            let block = mlp::Params {
                x_norm: None,
                parallel: None,
                x: described(DType::F32, &[tokens, hidden]),
                gate_up: GateUp::Apart {
                    gate: weights(intermediate, hidden),
                    up: weights(intermediate, hidden),
                },
                activation: Activation::default(),
                intermediate_norm: None,
                down: weights(hidden, intermediate),
                output: output(DType::F32, &[tokens, hidden]),
                workspace: Workspace::none(),
                gate_up_out: None,
            };
            let mlp = mlp::workspace_size(&ctx, &block).unwrap();
            assert_eq!(estimate.workspace, attention.max(mlp) as u64);
            let parts = estimate.weights
                + estimate.kv_cache
                + estimate.activations
                + estimate.workspace
                + estimate.logits;
            assert_eq!(estimate.total, parts);
        }
    }
}

/// Weights in blocks take what their files do; what decodes them is in the workspace.
#[test]
fn weights_may_be_in_blocks() {
    for ctx in contexts() {
        let model = Model {
            hidden_size: 64,
            intermediate_size: 96,
            v_head_dim: 16,
            ..small_model()
        };
        let estimate = |model, weight_dtype| {
            let inference = Inference {
                model,
                weight_dtype,
                dtype: DType::F32,
                cache: Config::new(2, 2, 16, 12, DType::F16),
                batch_size: 1,
                num_tokens: 70,
                num_logits: 1,
            };
            inference_memory(&ctx, &inference)
        };
        let counted = model.parameters().unwrap();
        // No biases here.
        let matrices = counted.total - counted.norms;
        let blocks = estimate(model, DType::Q4_1).unwrap();
        assert_eq!(blocks.weights, matrices / 32 * 20 + 4 * counted.norms);
        let floats = estimate(model, DType::F32).unwrap();
        assert_eq!(floats.weights, 4 * counted.total);
        assert_eq!(
            blocks.total - blocks.weights - blocks.workspace,
            floats.total - floats.weights - floats.workspace
        );
        assert!(blocks.workspace >= 4 * 70 * 96);
        let odd = Model {
            intermediate_size: 100,
            ..model
        };
        assert_eq!(
            estimate(odd, DType::Q4_1).unwrap_err().to_string(),
            "estimate: down_weight has rows of 100 elements, allowed for q4_1: multiples of 32"
        );
        assert_eq!(
            estimate(model, DType::I8).unwrap_err().to_string(),
            "estimate: weight_dtype is i8, allowed: f32, f16, bf16"
        );
    }
}

#[test]
fn a_cache_must_suit_its_model() {
    let ctx = Context::cpu().unwrap();
    let error = inference_memory(
        &ctx,
        &Inference {
            model: small_model(),
            weight_dtype: DType::F32,
            dtype: DType::F32,
            cache: Config::new(2, 4, 16, 8, DType::F32),
            batch_size: 1,
            num_tokens: 1,
            num_logits: 1,
        },
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "estimate: num_kv_heads of the cache is 4, the model has 2"
    );
}

fn training() -> Training {
    Training {
        gradient_dtype: DType::Bf16,
        flash_attention: false,
        ..Training::new(small_model(), 3, 10, DType::Bf16)
    }
}

/// Model states are 16 bytes per parameter in mixed precision with Adam (ZeRO, section 3.1).
#[test]
fn model_states_by_optimizer() {
    let n = small_model().parameters().unwrap().total;
    let states = |t: &Training| {
        let m = training_memory(t).unwrap();
        (m.weights, m.master_weights, m.gradients, m.optimizer_state)
    };
    assert_eq!(states(&training()), (2 * n, 4 * n, 2 * n, 8 * n));
    let with = |optimizer| {
        states(&Training {
            optimizer,
            ..training()
        })
    };
    assert_eq!(with(OptimizerKind::Sgd).3, 0);
    assert_eq!(with(OptimizerKind::SgdMomentum).3, 4 * n);
    assert_eq!(with(OptimizerKind::Adam8bit).3, 2 * n + 8 * n.div_ceil(256));
    let f32s = Training::new(small_model(), 3, 10, DType::F32);
    assert_eq!(states(&f32s), (4 * n, 0, 4 * n, 8 * n));
    let adapters = Training {
        adapter_parameters: Some(1000),
        ..training()
    };
    assert_eq!(states(&adapters), (2 * (n + 1000), 4000, 2000, 8000));
    let in_f32 = Training {
        adapter_dtype: DType::F32,
        ..adapters
    };
    assert_eq!(states(&in_f32), (2 * n + 4000, 0, 2000, 8000));
    let gains = 2 * (48 + 48) + 48;
    let remainders = Training {
        master: Master::Remainder,
        vector_dtype: DType::F32,
        ..training()
    };
    let expected = (2 * (n + gains), 2 * (n - gains), 2 * n, 8 * n);
    assert_eq!(states(&remainders), expected);
}

/// One layer counted by hand, tensor by tensor.
#[test]
fn activations_by_policy() {
    let (b, s, h, i) = (3, 10, 48, 96);
    let tokens = b * s;
    let (q, k, v, attended) = (4 * 16, 2 * 16, 2 * 8, 4 * 8);
    let elements = [
        h, // into the first norm
        h, // into the projections
        q, k, v, attended, // attended goes into the output projection
        h,        // into the second norm
        h,        // into gate and up
        i, i, // gate and up
        i, // into down
    ];
    let scales = 2 * 4;
    let linear = tokens * (elements.iter().sum::<u64>() * 2 + scales);
    let scores = b * 4 * s * s * 2;
    let last = tokens * (2 * h * 2 + 4);
    let activations = |checkpointing, flash_attention| {
        let m = training_memory(&Training {
            checkpointing,
            flash_attention,
            ..training()
        })
        .unwrap();
        assert_eq!(m.logits, tokens * 100 * 4);
        let parts = m.weights
            + m.master_weights
            + m.gradients
            + m.optimizer_state
            + m.saved_activations
            + m.recomputed_activations
            + m.logits;
        assert_eq!(m.total, parts);
        (m.saved_activations, m.recomputed_activations)
    };
    use Checkpointing::{Elementwise, Full, Mlp, None, Projections, Selective};
    assert_eq!(activations(None, false), (2 * (linear + scores) + last, 0));
    assert_eq!(activations(Selective, false), (2 * linear + last, scores));
    let input = tokens * h * 2;
    assert_eq!(
        activations(Full, false),
        (2 * input + last, linear + scores)
    );
    let flash = linear + tokens * 4 * 4;
    assert_eq!(activations(None, true), (2 * flash + last, 0));
    assert_eq!(activations(Selective, true), activations(None, true));
    assert_eq!(activations(Full, true), (2 * input + last, flash));
    let mut dropped = 0;
    for (policy, more) in [
        (Elementwise, 2 * h + i),
        (Mlp, 2 * i),
        (Projections, q + k + v),
    ] {
        dropped += tokens * more * 2;
        assert_eq!(
            activations(policy, true),
            (2 * (flash - dropped) + last, dropped),
            "{policy:?}"
        );
        assert_eq!(activations(policy, false).1, dropped + scores);
    }
}

/// The part of a layer's activations that grows with the square of the sequence is 5 a s / h of 34 in the paper's 16-bit GPT with
/// dropout: 2 a s² b without it. GPT-3's shape (arXiv:2205.05198, section 5): it is the greater part of what selective saves.
#[test]
fn selective_checkpointing_saves_the_quadratic_part() {
    let gpt3 = Training {
        model: Model {
            vocab_size: 51_200,
            hidden_size: 12_288,
            intermediate_size: 4 * 12_288,
            num_layers: 96,
            num_heads: 96,
            num_kv_heads: 96,
            head_dim: 128,
            v_head_dim: 128,
            ..LLAMA_3_8B
        },
        batch_size: 1,
        sequence_length: 2048,
        ..training()
    };
    let all = training_memory(&gpt3).unwrap().saved_activations;
    let selective = Training {
        checkpointing: Checkpointing::Selective,
        ..gpt3
    };
    let selective = training_memory(&selective).unwrap().saved_activations;
    assert_eq!(all - selective, 96 * 2 * 96 * 2048 * 2048);
}

#[test]
fn sizes_that_overflow_are_refused() {
    let ctx = Context::cpu().unwrap();
    let huge = Model {
        hidden_size: 1 << 60,
        ..small_model()
    };
    let error = huge.parameters().unwrap_err();
    assert_eq!(error.to_string(), "estimate: attention overflows 64 bits");
    let error = attention_memory(&ctx, &shape(1 << 40)).unwrap_err();
    assert_eq!(error.to_string(), "estimate: scores overflows 64 bits");
    let error = training_memory(&Training {
        sequence_length: u64::MAX,
        ..training()
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "estimate: tokens overflows 64 bits");
    let none = Model {
        num_layers: 0,
        ..small_model()
    };
    assert_eq!(
        none.parameters().unwrap_err().to_string(),
        "estimate: num_layers is 0, at least 1 is needed"
    );
}

fn any_training() -> impl Strategy<Value = Training> {
    let sizes = (1..500u64, 1..200u64, 1..300u64, 1..6u64, 1..5u64, 1..4u64);
    let rest = (1..5u64, 1..100u64, 0..4u32, 0..6u32, any::<[bool; 4]>());
    (sizes, rest).prop_map(|((v, h, i, l, g, kv), (b, s, o, c, flags))| {
        let model = Model {
            vocab_size: v,
            hidden_size: h,
            intermediate_size: i,
            num_layers: l,
            num_heads: g * kv,
            num_kv_heads: kv,
            head_dim: 2 * g,
            v_head_dim: g + 1,
            tied_embeddings: flags[0],
            qkv_bias: flags[1],
            output_bias: flags[1],
            mlp_bias: flags[1],
            qk_norm: flags[2],
        };
        Training {
            master: if flags[3] { Master::F32 } else { Master::None },
            optimizer: OptimizerKind::from_raw(o).unwrap(),
            checkpointing: Checkpointing::from_raw(c).unwrap(),
            flash_attention: flags[3],
            adapter_parameters: flags[0].then_some(v),
            ..Training::new(model, b, s, DType::Bf16)
        }
    })
}

proptest! {
    /// More of anything never takes less.
    #[test]
    fn estimates_are_monotone(t in any_training(), which in 0..9usize, more in 1..50u64) {
        let mut greater = t;
        let m = &mut greater.model;
        match which {
            0 => m.vocab_size += more,
            1 => m.hidden_size += more,
            2 => m.intermediate_size += more,
            3 => m.num_layers += more,
            4 => m.num_heads += m.num_kv_heads * more,
            5 => m.head_dim += more,
            6 => m.v_head_dim += more,
            7 => greater.batch_size += more,
            _ => greater.sequence_length += more,
        }
        let (a, b) = (training_memory(&t).unwrap(), training_memory(&greater).unwrap());
        let parts = |m: unsloth::estimate::TrainingMemory| [
            m.weights,
            m.master_weights,
            m.gradients,
            m.optimizer_state,
            m.saved_activations,
            m.recomputed_activations,
            m.logits,
        ];
        for (a, b) in parts(a).into_iter().zip(parts(b)) {
            prop_assert!(a <= b);
        }
        prop_assert!(a.total < b.total);
        prop_assert_eq!(parts(b).iter().sum::<u64>(), b.total);
    }

    /// Keeping less of the activations never takes more, and flash attention never takes more than a plain one whose sequence
    /// has two tokens or more (a log-sum-exp is as large as two 16-bit probabilities).
    #[test]
    fn policies_are_ordered(t in any_training()) {
        let saved = |checkpointing, flash_attention| {
            training_memory(&Training { checkpointing, flash_attention, ..t })
                .unwrap()
                .saved_activations
        };
        use Checkpointing::{Elementwise, Full, Mlp, None, Projections, Selective};
        let less_and_less = [None, Selective, Elementwise, Mlp, Projections, Full];
        for flash in [false, true] {
            for pair in less_and_less.windows(2) {
                prop_assert!(saved(pair[1], flash) <= saved(pair[0], flash));
            }
        }
        if t.sequence_length >= 2 {
            prop_assert!(saved(None, true) <= saved(None, false));
        }
    }

    #[test]
    fn a_bigger_cache_takes_more(
        sizes in prop::array::uniform5(1..20usize),
        which in 0..8usize,
        more in 1..9usize,
    ) {
        let [layers, heads, dim, pages, batch] = sizes;
        let config = Config {
            max_batch_size: batch,
            ..Config::new(layers, heads, dim, pages, DType::F16)
        };
        let mut greater = config.clone();
        match which {
            0 => greater.num_layers += more,
            1 => greater.num_kv_heads += more,
            2 => greater.head_dim += more,
            3 => greater.v_head_dim += more,
            4 => greater.num_pages += more,
            5 => greater.max_batch_size += more,
            6 => greater.max_batch_tokens += more,
            _ => greater.max_sequence_length += 16 * more,
        }
        prop_assert!(config.size().unwrap().total() < greater.size().unwrap().total());
    }
}

#[test]
fn a_cache_through_the_c_abi_takes_what_it_says() {
    let ctx = Handle::cpu();
    // SAFETY: structs of integers; every pointer is to a live local.
    unsafe {
        let mut p: unsloth_kv_cache_params = zeroed_params();
        (p.dtype, p.num_layers, p.num_kv_heads) = (DType::F16 as u32, 3, 2);
        (p.head_dim, p.page_size, p.num_pages) = (24, 8, 10);
        let mut m: unsloth_kv_cache_memory = zeroed_params();
        assert_eq!(
            unsloth_kv_cache_memory_estimate(&p, &mut m),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_eq!(m.keys, 3 * 10 * 8 * 2 * 24 * 2);
        assert_eq!((m.values, m.total), (m.keys, m.keys + m.values + m.tables));
        assert!(m.host > m.tables && m.page_locked >= 2 * m.tables);
        let in_use = || {
            let mut stats: unsloth_memory_stats = zeroed_params();
            unsloth_memory_stats_get(ctx.0, &mut stats);
            stats.in_use
        };
        let before = in_use();
        let mut cache = std::ptr::null_mut();
        assert_eq!(
            unsloth_kv_cache_create(ctx.0, &p, &mut cache),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_eq!(in_use() - before, m.total);
        assert_eq!(unsloth_kv_cache_destroy(cache), UNSLOTH_STATUS_SUCCESS);
        assert_eq!(in_use(), before);
    }
}

#[test]
fn bytes_through_the_c_abi() {
    let mut buffer = [b'x'; 16];
    // SAFETY: the buffer has the capacities stated.
    unsafe {
        let text = buffer.as_mut_ptr().cast();
        assert_eq!(unsloth_format_bytes(1536, text, 16), 8);
        assert_eq!(&buffer[..9], b"1.50 KiB\0");
        assert_eq!(unsloth_format_bytes(1536, buffer.as_mut_ptr().cast(), 4), 8);
        assert_eq!(&buffer[..4], b"1.5\0");
        assert_eq!(unsloth_format_bytes(1536, std::ptr::null_mut(), 0), 8);
    }
    assert_eq!(
        format_bytes(LLAMA_3_8B.parameters().unwrap().total * 2),
        "15.0 GiB"
    );
}
