//! Fine-tuning with checkpointed layers: `cargo run --release --example finetuning -- mlp`.
//!
//! A small model of decoder layers learns to repeat: of a sequence whose second half is its first
//! half again, it is to say the second half. What a layer keeps for its backward pass is what the
//! policy says that is named (`none`, `elementwise`, `mlp`, `projections` or `full`; or `segments`,
//! by which one layer keeps anything at a time); the rest is computed again, with the same bits. So
//! the losses are equal under every policy, which is shown for the first steps, and memory is not.

mod llama;

use llama::{Llama, Update};
use rand::{Rng, SeedableRng, rngs::StdRng};
use unsloth::estimate::{Checkpointing, Model, Training, format_bytes};
use unsloth::{Buffer, Context, DType, Result};

const BATCH: usize = 8;
const SEQUENCE: usize = 16;
const SYMBOLS: i32 = 12;
const STEPS: usize = 120;
const IGNORED: i32 = -100;

const MODEL: Model = Model {
    vocab_size: SYMBOLS as u64,
    hidden_size: 32,
    intermediate_size: 64,
    num_layers: 3,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 8,
    v_head_dim: 8,
    tied_embeddings: false,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};

/// What layers keep: by a policy for each, or by a plan of segments of one layer.
const POLICIES: [(&str, Checkpointing, Option<u64>); 6] = [
    ("none", Checkpointing::None, None),
    ("elementwise", Checkpointing::Elementwise, None),
    ("mlp", Checkpointing::Mlp, None),
    ("projections", Checkpointing::Projections, None),
    ("full", Checkpointing::Full, None),
    ("segments", Checkpointing::None, Some(1)),
];

/// Ids of a batch, and what is to follow each; nothing is learned of first halves.
fn batch(rng: &mut StdRng) -> (Vec<i32>, Vec<i32>) {
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        let half: Vec<i32> = (0..SEQUENCE / 2)
            .map(|_| rng.random_range(0..SYMBOLS))
            .collect();
        let sequence = [half.as_slice(), &half].concat();
        targets.extend((1..=SEQUENCE).map(|next| match next {
            n if n > SEQUENCE / 2 && n < SEQUENCE => sequence[n],
            _ => IGNORED,
        }));
        ids.extend(sequence);
    }
    (ids, targets)
}

/// Trains for some steps; gives their losses and the most bytes that were held.
fn train(
    checkpointing: Checkpointing,
    segment_layers: Option<u64>,
    steps: usize,
) -> Result<(Vec<f32>, u64)> {
    let ctx = Context::cpu()?;
    let training = Training {
        checkpointing,
        segment_layers,
        packed_sequences: Some(BATCH as u64),
        ..Training::new(MODEL, BATCH as u64, SEQUENCE as u64, DType::F32)
    };
    let update = Update {
        rate: 1e-2,
        max_norm: 1.0,
    };
    let mut llama = Llama::new(&ctx, &training, update, Buffer::new)?;
    let mut rng = StdRng::seed_from_u64(5);
    let mut losses = Vec::new();
    for _ in 0..steps {
        let (ids, targets) = batch(&mut rng);
        losses.push(llama.step(&ids, &targets)?);
    }
    Ok((losses, ctx.memory_stats().peak))
}

fn main() -> Result<()> {
    let named = std::env::args().nth(1).unwrap_or_else(|| "mlp".into());
    let Some(&(name, checkpointing, segments)) = POLICIES.iter().find(|p| p.0 == named) else {
        let names = POLICIES.map(|p| p.0).join(", ");
        eprintln!("'{named}' is no policy; there are {names}");
        std::process::exit(2);
    };
    let (losses, _) = train(checkpointing, segments, STEPS)?;
    for (i, part) in losses.chunks(STEPS / 6).enumerate() {
        let mean = part.iter().sum::<f32>() / part.len() as f32;
        println!("steps {:3} on: loss {mean:.3}", i * STEPS / 6);
    }
    let last = losses[STEPS - 1];
    assert!(last < losses[0] / 2.0, "it learns: {last}");

    let first = &losses[..3];
    for (policy, checkpointing, segments) in POLICIES {
        let (again, peak) = train(checkpointing, segments, first.len())?;
        println!("{policy:12} {}", format_bytes(peak));
        assert_eq!(again, first, "{policy} and {name} agree to the bit");
    }
    Ok(())
}
