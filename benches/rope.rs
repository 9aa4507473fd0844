//! RoPE of queries from given tables (as candle has it), and from positions alone.

mod common;

use common::{Storage, compare, random, tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use unsloth::ops::rope::{Angles, Params, Rotation, Style, forward};
use unsloth::{Context, InOut, Stream, TensorMut, TensorRef};

const HEADS: usize = 32;
const DIM: usize = 128;

fn case<T: Storage>(c: &mut Criterion, seq: usize, style: Style, from_table: bool) {
    let ctx = Context::cpu().unwrap();
    let shape = [1, seq, HEADS, DIM];
    let half = DIM / 2;
    let x = random::<T>(seq * HEADS * DIM, 1);
    let mut out = x.clone();
    let (cos, sin) = (random::<f32>(seq * half, 2), random::<f32>(seq * half, 3));
    let narrow = |t: &[f32]| t.iter().map(|v| T::from_f32(*v)).collect::<Vec<T>>();
    let table = [seq, half];
    let (their_cos, their_sin) = (tensor(&narrow(&cos), &table), tensor(&narrow(&sin), &table));
    // candle's interleaved rotation wants heads before tokens.
    let their_x = match style {
        Style::Interleaved => tensor(&x, &[1, HEADS, seq, DIM]),
        _ => tensor(&x, &shape),
    };
    let name = match (style, from_table) {
        (Style::Interleaved, _) => "interleaved",
        (_, true) => "half-split",
        (_, false) => "half-split, angles computed",
    };
    compare(
        c,
        "rope",
        &format!("{} {seq}x{HEADS}x{DIM} {name}", T::dtype()),
        || {
            let angles = match from_table {
                true => Angles::Table {
                    cos: TensorRef::from_slice(&cos, &table).unwrap(),
                    sin: TensorRef::from_slice(&sin, &table).unwrap(),
                },
                false => Angles::default(),
            };
            let params = Params {
                q: Some(InOut::Apart {
                    input: TensorRef::from_slice(&x, &shape).unwrap(),
                    output: TensorMut::from_slice(&mut out, &shape).unwrap(),
                }),
                rotation: Rotation {
                    style,
                    rotary_dim: 0,
                    angles,
                },
                ..Params::default()
            };
            forward(&ctx, &params, Stream::DEFAULT).unwrap();
        },
        || match style {
            Style::Interleaved => candle_nn::rotary_emb::rope_i(&their_x, &their_cos, &their_sin),
            _ => candle_nn::rotary_emb::rope_thd(&their_x, &their_cos, &their_sin),
        },
    );
}

fn bench(c: &mut Criterion) {
    for seq in [1, 512] {
        case::<f32>(c, seq, Style::HalfSplit, true);
        case::<f32>(c, seq, Style::HalfSplit, false);
        case::<f32>(c, seq, Style::Interleaved, true);
        case::<bf16>(c, seq, Style::HalfSplit, true);
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
