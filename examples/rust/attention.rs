//! Causal attention of 6 queries with 4 heads over 6 keys with 2 heads: `cargo run --example
//! attention`.

use unsloth::ops::attention::{self, Params};
use unsloth::{Context, Stream, TensorMut, TensorRef};

const SEQ: usize = 6;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

fn main() -> unsloth::Result<()> {
    let q = [0.0f32; SEQ * HEADS * DIM];
    let k = [0.0f32; SEQ * KV_HEADS * DIM];
    // Each key's value is its position.
    let v: Vec<f32> = (0..SEQ * KV_HEADS * DIM)
        .map(|i| (i / (KV_HEADS * DIM)) as f32)
        .collect();
    let mut out = [f32::NAN; SEQ * HEADS * DIM];

    let ctx = Context::cpu()?;
    let mut params = Params::new(
        TensorRef::from_slice(&q, &[1, SEQ, HEADS, DIM])?,
        TensorRef::from_slice(&k, &[1, SEQ, KV_HEADS, DIM])?,
        TensorRef::from_slice(&v, &[1, SEQ, KV_HEADS, DIM])?,
        TensorMut::from_slice(&mut out, &[1, SEQ, HEADS, DIM])?,
    );
    params.causal = true;
    attention::forward(&ctx, &params, Stream::DEFAULT)?;

    // Where all scores are equal, a query averages the values up to its own: 0, 0.5, 1, 1.5, 2,
    // 2.5.
    for (i, row) in out.chunks_exact(HEADS * DIM).enumerate() {
        println!("query {i}: {}", row[0]);
    }
    Ok(())
}
