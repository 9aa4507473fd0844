//! Whole training steps against their estimate, by what a context counts.

use proptest::prelude::*;
use unsloth::estimate::{
    Checkpointing, Master, Model, OptimizerKind, Training, training_step_memory,
};
use unsloth::{Buffer, Context, DType};

use crate::common::contexts;
use crate::llama::{Llama, Update};

/// Hidden states are of multiples of 256 bytes, as an estimate has them.
const MODEL: Model = Model {
    vocab_size: 64,
    hidden_size: 32,
    intermediate_size: 48,
    num_layers: 3,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 8,
    v_head_dim: 8,
    tied_embeddings: true,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};

const POLICIES: [Checkpointing; 6] = [
    Checkpointing::None,
    Checkpointing::Selective,
    Checkpointing::Elementwise,
    Checkpointing::Mlp,
    Checkpointing::Projections,
    Checkpointing::Full,
];

/// Makes a step; gives the bytes that were held at the most, and the loss.
fn run(ctx: &Context, t: &Training) -> (u64, f32) {
    let before = ctx.memory_stats();
    ctx.reset_memory_peak();
    let update = Update {
        rate: 1e-3,
        max_norm: 1.0,
    };
    let mut llama = Llama::new(ctx, t, update, Buffer::new).unwrap();
    let ids: Vec<i32> = (0..32).map(|i| i * 37 % 64).collect();
    let targets: Vec<i32> = (0..32)
        .map(|i| if i % 5 == 0 { -100 } else { i * 11 % 64 })
        .collect();
    let loss = llama.step(&ids, &targets).unwrap();
    if t.checkpointing == Checkpointing::Full {
        // And it learned from it.
        let next = llama.step(&ids, &targets).unwrap();
        assert!(next < loss, "{loss} {next}");
    }
    (ctx.memory_stats().peak - before.in_use, loss)
}

#[test]
fn a_step_takes_what_it_says() {
    let base = Training::new(MODEL, 2, 16, DType::F32);
    let bf16 = Training {
        master: Master::Remainder,
        ..Training::new(MODEL, 2, 16, DType::Bf16)
    };
    let cases = [
        base,
        Training {
            vector_dtype: DType::F32,
            ..Training::new(MODEL, 2, 16, DType::F16)
        },
        Training {
            packed_sequences: Some(3),
            ..bf16
        },
        Training {
            segment_layers: Some(2),
            chunk_tokens: 12,
            ..bf16
        },
        Training {
            model: Model {
                tied_embeddings: false,
                qkv_bias: true,
                output_bias: true,
                mlp_bias: true,
                qk_norm: true,
                ..MODEL
            },
            gradient_dtype: DType::Bf16,
            chunk_tokens: 20,
            weight_dtype: DType::F32,
            vector_dtype: DType::F32,
            segment_layers: Some(1),
            ..bf16
        },
    ];
    for ctx in contexts() {
        for case in cases {
            let mut losses = Vec::new();
            for checkpointing in POLICIES {
                let t = Training {
                    checkpointing,
                    ..case
                };
                let estimate = training_step_memory(&ctx, &t).unwrap();
                let (peak, loss) = run(&ctx, &t);
                losses.push(loss.to_bits());
                assert_eq!(estimate.total, peak, "{t:?} {estimate:?}");
            }
            losses.dedup();
            assert_eq!(losses.len(), 1, "policies agree to the bit");
        }
    }
}

/// A layer's matrices with their adapters lie in memory of one layer, and so do their gradients.
#[test]
fn adapters_are_of_one_layer_at_a_time() {
    let n = MODEL.parameters().unwrap().total;
    for ctx in contexts() {
        let full = Training::new(MODEL, 2, 16, DType::Bf16);
        let lora = Training {
            adapter_parameters: Some(1024),
            adapter_dtype: DType::F32,
            adapted_parameters: 3000,
            ..full
        };
        let [full, m] = [full, lora].map(|t| training_step_memory(&ctx, &t).unwrap());
        assert_eq!(m.weights, 2 * n + 4 * 1024 + 2 * 3000);
        assert_eq!(m.gradients, 4 * 1024 + 4 * 3000);
        assert_eq!(m.master_weights, 0);
        assert!((8 * 1024..8 * 1024 + 2048).contains(&m.optimizer_state));
        assert_eq!(m.saved_activations, full.saved_activations);
        assert!(m.workspace <= full.workspace);
        let thrice = Training {
            micro_batches: 3,
            ..lora
        };
        let thrice = training_step_memory(&ctx, &thrice).unwrap();
        assert_eq!(m.inputs, 2 * 32 * 4 + 4 + 4);
        assert_eq!(thrice.inputs, 3 * (2 * 32 * 4 + 4) + 4);
    }
}

fn any_size() -> impl Strategy<Value = u64> {
    let power = (0..64u32, -1..=1i64).prop_map(|(n, more)| (1u64 << n).wrapping_add_signed(more));
    prop_oneof![6 => 1..65u64, 1 => any::<u64>(), 1 => power]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the sizes, the answer is a sum or says what is wrong.
    #[test]
    fn sizes_of_any_kind_are_answered(
        sizes in prop::array::uniform15(any_size()),
        choices in any::<[bool; 10]>(),
        (policy, optimizer, group) in (0..6u32, 0..4u32, 1..4u64),
    ) {
        let [v, h, i, layers, kv, dim, v_dim, b, s, chunk, packed, segment, n, adapted, micro] =
            sizes;
        let float = |wide: bool| if wide { DType::F32 } else { DType::Bf16 };
        let when = |there: bool, value: u64| there.then_some(value);
        let model = Model {
            vocab_size: v,
            hidden_size: h,
            intermediate_size: i,
            num_layers: layers,
            num_heads: kv.saturating_mul(group),
            num_kv_heads: kv,
            head_dim: dim,
            v_head_dim: v_dim,
            tied_embeddings: choices[0],
            qkv_bias: choices[1],
            output_bias: choices[1],
            mlp_bias: choices[1],
            qk_norm: choices[2],
        };
        let t = Training {
            weight_dtype: float(choices[3]),
            gradient_dtype: float(choices[4]),
            checkpointing: Checkpointing::from_raw(policy).unwrap(),
            optimizer: OptimizerKind::from_raw(optimizer).unwrap(),
            chunk_tokens: if choices[5] { chunk } else { 0 },
            adapter_parameters: when(choices[6], n),
            adapted_parameters: if choices[6] { adapted } else { 0 },
            packed_sequences: when(choices[7], packed),
            segment_layers: when(choices[8], segment),
            micro_batches: if choices[9] { micro } else { 1 },
            ..Training::new(model, b, s, DType::Bf16)
        };
        let ctx = Context::cpu().unwrap();
        if let Ok(m) = training_step_memory(&ctx, &t) {
            let parts = [
                m.weights,
                m.master_weights,
                m.gradients,
                m.optimizer_state,
                m.saved_activations,
                m.inputs,
                m.activation_gradients,
                m.workspace,
            ];
            prop_assert_eq!(parts.iter().sum::<u64>(), m.total);
        }
    }
}
