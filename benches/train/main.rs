//! Steps of training beside candle's on the CPU: forward, backward and AdamW of one model of
//! SmolLM2-135M's shape, in f32, from the same weights on the same tokens, by turns in one process
//! with as many threads. Losses are asserted to agree. Arguments name cases, as `1x256`; without
//! one all are measured, for which 13 GB are enough.
//!
//! Writes `train.json` beside criterion's results: medians of a step's time, and the most bytes
//! that each needed, of everything. Of ours a context counts its memory and the allocator the rest.

mod candle_llama;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../examples/rust/llama/mod.rs"]
mod llama;

use std::time::Instant;

use candle_llama::CandleLlama;
use common::heap::{Counting, peak_of};
use common::{random, results};
use llama::{Llama, Update};
use serde_json::{Value, json};
use unsloth::estimate::{Model, Training};
use unsloth::{Backend, Buffer, Context, ContextOptions, DType};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SMOLLM2: Model = Model {
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

/// Sequences and tokens of each.
const CASES: [(u64, u64); 2] = [(1, 256), (2, 512)];
/// Both without a limit of the gradients' norm, which candle's optimizer does not have.
const UPDATE: Update = Update {
    rate: 1e-4,
    max_norm: 0.0,
};
/// The first steps are not timed: they fault memory in.
const WARM_UP: usize = 2;
const ROUNDS: usize = 5;
/// Losses differ by less of themselves. What rounding leaves of the smallest gradients AdamW makes
/// full steps of.
const TOLERANCE: f32 = 1e-5;

/// Ids, and what follows each.
fn batch(tokens: usize, seed: u64) -> (Vec<i32>, Vec<i32>) {
    let half = SMOLLM2.vocab_size as f32 / 2.0;
    let ids: Vec<i32> = random::<f32>(tokens + 1, seed)
        .into_iter()
        .map(|x| ((x + 1.0) * half) as i32)
        .collect();
    (ids[..tokens].to_vec(), ids[1..].to_vec())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn case(threads: usize, (sequences, seq): (u64, u64)) -> Value {
    let options = ContextOptions {
        backend: Backend::Cpu,
        device: 0,
        num_threads: threads,
        memory_limit: None,
    };
    let tokens = (sequences * seq) as usize;
    let training = Training::new(SMOLLM2, sequences, seq, DType::F32);
    let ctx = Context::new(&options).unwrap();
    let (mut losses, mut times) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let (ids, targets) = batch(tokens, 1);
    let mut ours = Llama::new(&ctx, &training, UPDATE, Buffer::new).unwrap();
    let weights = ours.weights().unwrap();
    let (loss, heap) = peak_of(|| ours.step(&ids, &targets).unwrap());
    losses[0].push(loss);
    let our_peak = ctx.memory_stats().peak + heap as u64;
    let shape = (sequences as usize, seq as usize);
    let ((mut theirs, loss), their_peak) = peak_of(|| {
        let rate = f64::from(UPDATE.rate);
        let mut theirs = CandleLlama::new(&SMOLLM2, shape, weights.clone(), rate).unwrap();
        let loss = theirs.step(&ids, &targets).unwrap();
        (theirs, loss)
    });
    losses[1].push(loss);
    drop(weights);

    for step in 1..WARM_UP + ROUNDS {
        let (ids, targets) = batch(tokens, 1 + step as u64);
        let mut contenders: [&mut dyn FnMut() -> f32; 2] =
            [&mut || ours.step(&ids, &targets).unwrap(), &mut || {
                theirs.step(&ids, &targets).unwrap()
            }];
        for (i, contender) in contenders.iter_mut().enumerate() {
            let started = Instant::now();
            losses[i].push(contender());
            times[i].push(started.elapsed().as_secs_f64());
        }
    }
    for (a, b) in losses[0].iter().zip(&losses[1]) {
        let error = (a - b).abs();
        assert!(error <= TOLERANCE * b.abs(), "losses {losses:?} differ");
    }
    let [ours, theirs] = times.map(|mut times| median(&mut times[WARM_UP - 1..]));
    json!({
        "tokens": tokens,
        "seconds": { "unsloth": ours, "candle": theirs },
        "peak_bytes": { "unsloth": our_peak, "candle": their_peak },
        "losses": { "unsloth": losses[0], "candle": losses[1] },
    })
}

fn main() {
    let threads = candle_core::utils::get_num_threads();
    let named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let mut steps = serde_json::Map::new();
    for (sequences, seq) in CASES {
        let name = format!("{sequences}x{seq}");
        if named.is_empty() || named.contains(&name) {
            let measured = case(threads, (sequences, seq));
            println!("{name} {measured}");
            steps.insert(name, measured);
        }
    }
    let record = json!({
        "threads": threads,
        "dtype": "f32",
        "layers": SMOLLM2.num_layers,
        "hidden": SMOLLM2.hidden_size,
        "vocab": SMOLLM2.vocab_size,
        "rounds": ROUNDS,
        "steps": steps,
    });
    results("train.json", &format!("{record:#}\n"));
}
