//! Steps of training of a whole model: the one of the examples and candle's, from the same weights.

use unsloth::estimate::{Model, Training};
use unsloth::{Buffer, DType};

use crate::candle_llama::CandleLlama;
use crate::common::{contexts, for_each_case};
use crate::llama::{Llama, Update};

const BATCH: usize = 2;
const SEQ: usize = 17;
const STEPS: usize = 4;
const RATE: f32 = 1e-2;

/// Whether the head is the embedding.
fn model(tied_embeddings: bool) -> Model {
    Model {
        vocab_size: 40,
        hidden_size: 32,
        intermediate_size: 48,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        v_head_dim: 8,
        tied_embeddings,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
    }
}

#[test]
fn training_steps() {
    for ctx in contexts() {
        for_each_case(&[true, false], |&tied| {
            let model = model(tied);
            let training = Training::new(model, BATCH as u64, SEQ as u64, DType::F32);
            let update = Update {
                rate: RATE,
                max_norm: 0.0,
            };
            let mut ours = Llama::new(&ctx, &training, update, Buffer::new).unwrap();
            let before = ours.weights().unwrap();
            let rate = f64::from(RATE);
            let mut theirs = CandleLlama::new(&model, (BATCH, SEQ), before.clone(), rate).unwrap();
            let ids: Vec<i32> = (0..34).map(|i| i * 29 % 40).collect();
            let targets: Vec<i32> = (0..34).map(|i| i * i % 40).collect();
            let mut last = f32::INFINITY;
            for _ in 0..STEPS {
                let loss = ours.step(&ids, &targets).unwrap();
                let other = theirs.step(&ids, &targets).unwrap();
                let apart = (loss - other).abs();
                assert!(apart <= 1e-4 * other, "loss {loss}, candle's {other}");
                assert!(loss < last, "it learns: {loss} after {last}");
                last = loss;
            }
            let after = ours.weights().unwrap().into_iter();
            let (mut apart, mut moved) = (0.0, 0.0);
            for (i, ((ours, theirs), before)) in
                after.zip(theirs.weights().unwrap()).zip(before).enumerate()
            {
                assert_eq!((&ours.0, &ours.0), (&theirs.0, &before.0));
                let way = distance(&before.1, &ours.1);
                assert!(way > 0.0, "weight {i} has not changed");
                moved += way;
                apart += distance(&ours.1, &theirs.1);
            }
            // Of a gradient that is next to nothing rounding decides the sign, and AdamW makes a
            // whole step of it: there are a few such elements.
            println!("they moved by {moved}, and are {apart} apart");
            assert!(apart <= 1e-3 * moved);
        });
    }
}

/// The sum of all elements' distances.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum()
}
