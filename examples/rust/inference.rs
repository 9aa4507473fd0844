//! Text generation with a paged KV cache, by a small model with random weights: `cargo run --release
//! --example inference`.
//!
//! The prompt runs through the model in one step, then each new token in a step of its own, which
//! reads the keys and values of all before it from the cache. At the end the whole text runs through
//! the model once more, without what the cache knows: every token has to be the likeliest again.

use rand::{Rng, SeedableRng, rngs::StdRng};
use unsloth::kv_cache::{Config, KvCache, SequenceId};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{argmax, attention_block, embedding, linear, rms_norm};
use unsloth::{Buffer, Context, DType, InOut, Result, Stream, TensorMut, TensorRef, Workspace};

const VOCAB: usize = 256;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 160;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = HIDDEN / HEADS;
const LAYERS: usize = 3;
const QKV: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// Weights of a layer, row-major `[out, in]`.
struct Layer {
    attention_norm: Vec<f32>,
    qkv: Vec<f32>,
    out: Vec<f32>,
    mlp_norm: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

struct Model {
    ctx: Context,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Vec<f32>,
}

fn random(rng: &mut StdRng, rows: usize, columns: usize) -> Vec<f32> {
    let bound = (3.0 / columns as f32).sqrt();
    (0..rows * columns)
        .map(|_| rng.random_range(-bound..bound))
        .collect()
}

fn normalized(ctx: &Context, x: &[f32], weight: &[f32]) -> Result<Vec<f32>> {
    let mut out = vec![0.0; x.len()];
    let shape = [x.len() / HIDDEN, HIDDEN];
    let params = rms_norm::Params {
        x: InOut::Apart {
            input: TensorRef::from_slice(x, &shape)?,
            output: TensorMut::from_slice(&mut out, &shape)?,
        },
        residual: None,
        weight: Some(TensorRef::from_slice(weight, &[HIDDEN])?),
        weight_offset: 0.0,
        epsilon: 1e-5,
    };
    rms_norm::forward(ctx, &params, Stream::DEFAULT)?;
    Ok(out)
}

fn weights(matrix: &[f32], columns: usize) -> Result<Weights<'_>> {
    Ok(Weights {
        weight: TensorRef::from_slice(matrix, &[matrix.len() / columns, columns])?,
        bias: None,
    })
}

impl Model {
    fn new(ctx: Context) -> Model {
        let mut rng = StdRng::seed_from_u64(7);
        let layers = (0..LAYERS).map(|_| Layer {
            attention_norm: vec![1.0; HIDDEN],
            qkv: random(&mut rng, QKV, HIDDEN),
            out: random(&mut rng, HIDDEN, HEADS * HEAD_DIM),
            mlp_norm: vec![1.0; HIDDEN],
            gate_up: random(&mut rng, 2 * INTERMEDIATE, HIDDEN),
            down: random(&mut rng, HIDDEN, INTERMEDIATE),
        });
        let layers = layers.collect();
        Model {
            ctx,
            embedding: random(&mut rng, VOCAB, HIDDEN),
            layers,
            norm: vec![1.0; HIDDEN],
            head: random(&mut rng, VOCAB, HIDDEN),
        }
    }

    /// The likeliest token after each of `tokens`, which are appended to a sequence of the cache.
    fn step(&self, cache: &mut KvCache, id: SequenceId, tokens: &[i32]) -> Result<Vec<i32>> {
        let (ctx, n) = (&self.ctx, tokens.len());
        let shape = [n, HIDDEN];
        cache.extend(&[(id, n)], Stream::DEFAULT)?;
        let mut hidden = vec![0.0f32; n * HIDDEN];
        let params = embedding::Params {
            vocabulary: None,
            workspace: Workspace::none(),
            table: TensorRef::from_slice(&self.embedding, &[VOCAB, HIDDEN])?,
            ids: TensorRef::from_slice(tokens, &[n])?,
            out: TensorMut::from_slice(&mut hidden, &shape)?,
        };
        embedding::forward(ctx, &params, Stream::DEFAULT)?;

        for (i, layer) in self.layers.iter().enumerate() {
            // hidden += attention(norm(hidden))
            let x = normalized(ctx, &hidden, &layer.attention_norm)?;
            let mut params = attention_block::Params {
                x_norm: None,
                parallel: None,
                x: TensorRef::from_slice(&x, &shape)?,
                num_heads: HEADS,
                num_kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                v_head_dim: HEAD_DIM,
                projections: attention_block::Projections::Packed(weights(&layer.qkv, HIDDEN)?),
                q_norm: None,
                k_norm: None,
                norm_weight_offset: 0.0,
                norm_epsilon: 0.0,
                rotation: Some(Rotation::default()),
                positions: Positions::From(0), // the cache knows them
                cache: Some(cache.lend(i)?),
                cu_seqlens: None,
                max_seqlen: 0,
                scale: 0.0, // 1 / sqrt(head_dim)
                softcap: 0.0,
                bidirectional: false,
                window: 0,
                alibi_slopes: None,
                sinks: None,
                attended_norm: None,
                out_projection: weights(&layer.out, HEADS * HEAD_DIM)?,
                output: Output::Add(InOut::InPlace(TensorMut::from_slice(&mut hidden, &shape)?)),
                workspace: Workspace::none(),
                qkv_out: None,
                attended_out: None,
                lse_out: None,
            };
            let mut workspace = Buffer::new(ctx, attention_block::workspace_size(ctx, &params)?)?;
            params.workspace = workspace.workspace();
            attention_block::forward(ctx, &params, Stream::DEFAULT)?;

            // hidden += mlp(norm(hidden))
            let x = normalized(ctx, &hidden, &layer.mlp_norm)?;
            let mut params = mlp::Params {
                x_norm: None,
                parallel: None,
                x: TensorRef::from_slice(&x, &shape)?,
                gate_up: GateUp::Packed {
                    weights: weights(&layer.gate_up, HIDDEN)?,
                    order: GateOrder::GateFirst,
                },
                activation: Activation::Silu,
                intermediate_norm: None,
                down: weights(&layer.down, INTERMEDIATE)?,
                output: Output::Add(InOut::InPlace(TensorMut::from_slice(&mut hidden, &shape)?)),
                workspace: Workspace::none(),
                gate_up_out: None,
            };
            let mut workspace = Buffer::new(ctx, mlp::workspace_size(ctx, &params)?)?;
            params.workspace = workspace.workspace();
            mlp::forward(ctx, &params, Stream::DEFAULT)?;
        }

        let x = normalized(ctx, &hidden, &self.norm)?;
        let mut logits = vec![0.0f32; n * VOCAB];
        let params = linear::Params {
            x_norm: None,
            parallel: None,
            x: TensorRef::from_slice(&x, &shape)?,
            weights: weights(&self.head, HIDDEN)?,
            output: Output::Write(TensorMut::from_slice(&mut logits, &[n, VOCAB])?),
            workspace: Workspace::none(),
        };
        linear::forward(ctx, &params, Stream::DEFAULT)?;
        let mut likeliest = vec![0i32; n];
        let params = argmax::Params {
            x: TensorRef::from_slice(&logits, &[n, VOCAB])?,
            out: TensorMut::from_slice(&mut likeliest, &[n])?,
        };
        argmax::forward(ctx, &params, Stream::DEFAULT)?;
        Ok(likeliest)
    }
}

fn main() -> Result<()> {
    let ctx = Context::cpu()?;
    let model = Model::new(ctx.clone());
    // Room for 16 pages of 16 tokens, in every layer.
    let config = Config::new(LAYERS, KV_HEADS, HEAD_DIM, 16, DType::F32);
    let mut cache = KvCache::new(&ctx, &config)?;

    let prompt: Vec<i32> = "The paged cache".bytes().map(i32::from).collect();
    let sequence = cache.create_sequence()?;
    let mut text = prompt.clone();
    let mut next = model.step(&mut cache, sequence, &prompt)?[prompt.len() - 1];
    while text.len() < prompt.len() + 24 {
        text.push(next);
        next = model.step(&mut cache, sequence, &[next])?[0];
    }
    println!("generated {:?}", &text[prompt.len()..]);
    let info = cache.sequence(sequence)?;
    println!(
        "{} tokens lie in {} pages",
        info.length,
        cache.sequence_pages(sequence)?.len()
    );

    let again = cache.create_sequence()?;
    let all = model.step(&mut cache, again, &text)?;
    assert_eq!(all[prompt.len() - 1..text.len() - 1], text[prompt.len()..]);
    println!("the same tokens without the cache's steps");
    Ok(())
}
