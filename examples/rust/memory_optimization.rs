//! Training within a budget: `cargo run --release --example memory_optimization -- 4000000`.
//!
//! Before anything is allocated, the estimate of a step says which policies of checkpointing would
//! fit into so many bytes; the first that does, which computes the least twice, is chosen. The
//! context then refuses whatever would pass the budget, memory comes from its pool, and what a step
//! has really held is beside the estimate at the end.

mod llama;

use llama::{Llama, Update};
use unsloth::estimate::{
    Checkpointing, Master, Model, Training, TrainingMemory, format_bytes, training_step_memory,
};
use unsloth::{Buffer, Context, DType, Result, Stream};

const TOKENS: u64 = 256;
const BUDGET: u64 = 3_900_000;

const MODEL: Model = Model {
    vocab_size: 128,
    hidden_size: 64,
    intermediate_size: 128,
    num_layers: 4,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 16,
    v_head_dim: 16,
    tied_embeddings: true,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};

/// From that which computes nothing twice to that which keeps the least; segments of one layer are
/// plans by which each layer but the last runs twice as a whole.
const POLICIES: [(&str, Checkpointing, Option<u64>); 6] = [
    ("none", Checkpointing::None, None),
    ("elementwise", Checkpointing::Elementwise, None),
    ("mlp", Checkpointing::Mlp, None),
    ("projections", Checkpointing::Projections, None),
    ("segments", Checkpointing::None, Some(1)),
    ("full", Checkpointing::Full, None),
];

/// Memory of the pool, which is there again for whoever asks next when a buffer is dropped.
fn from_pool(ctx: &Context, size: usize) -> Result<Buffer> {
    // SAFETY: everything runs in the order of the default stream.
    unsafe { Buffer::new_async(ctx, size, Stream::DEFAULT) }
}

fn print(name: &str, bytes: u64) {
    println!("  {name:22} {:>10}", format_bytes(bytes));
}

fn main() -> Result<()> {
    let budget = match std::env::args().nth(1) {
        Some(bytes) => bytes.parse().expect("the budget is a number of bytes"),
        None => BUDGET,
    };
    let ctx = Context::cpu()?;
    let mut chosen: Option<(&str, Training, TrainingMemory)> = None;
    for (name, checkpointing, segment_layers) in POLICIES {
        let training = Training {
            checkpointing,
            segment_layers,
            master: Master::Remainder,
            ..Training::new(MODEL, 1, TOKENS, DType::Bf16)
        };
        let memory = training_step_memory(&ctx, &training)?;
        let fits = memory.total <= budget;
        let note = if fits { "fits" } else { "" };
        println!("{name:12} {:>10} {note}", format_bytes(memory.total));
        if fits && chosen.is_none() {
            chosen = Some((name, training, memory));
        }
    }
    let Some((name, training, memory)) = chosen else {
        eprintln!("nothing fits into {}", format_bytes(budget));
        std::process::exit(1);
    };
    println!("{name} in {}:", format_bytes(budget));
    print("weights", memory.weights);
    print("gradients", memory.gradients);
    print("optimizer", memory.optimizer_state + memory.master_weights);
    print("saved activations", memory.saved_activations);
    print("gradient of states", memory.activation_gradients);
    print("inputs", memory.inputs);
    print("workspace", memory.workspace);

    // What the estimate leaves out would show here as an error.
    ctx.set_memory_limit(Some(budget));
    let update = Update {
        rate: 3e-3,
        max_norm: 1.0,
    };
    let mut llama = Llama::new(&ctx, &training, update, from_pool)?;
    let vocab = MODEL.vocab_size as i32;
    let ids: Vec<i32> = (0..TOKENS as i32).map(|i| i * i % vocab).collect();
    let targets: Vec<i32> = (1..=TOKENS as i32).map(|i| i * i % vocab).collect();
    let first = llama.step(&ids, &targets)?;
    let mut last = first;
    for _ in 0..4 {
        last = llama.step(&ids, &targets)?;
    }
    assert!(last < first);

    let real = ctx.memory_stats().peak;
    print("estimated", memory.total);
    print("real", real);
    assert!(real <= budget);
    assert!(real.abs_diff(memory.total) * 20 <= memory.total, "5 %");
    drop(llama);
    ctx.trim_memory_pool(0)?;
    Ok(())
}
