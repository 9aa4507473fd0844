//! RMSNorm of hidden states, against candle's fused one.

mod common;

use common::{Storage, compare, random, tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use unsloth::ops::rms_norm::{Params, forward};
use unsloth::{Context, InOut, Stream, TensorMut, TensorRef};

fn case<T: Storage>(c: &mut Criterion, rows: usize, dim: usize) {
    let ctx = Context::cpu().unwrap();
    let (x, weight) = (random::<T>(rows * dim, 1), random::<T>(dim, 2));
    let mut out = x.clone();
    let (their_x, their_weight) = (tensor(&x, &[rows, dim]), tensor(&weight, &[dim]));
    compare(
        c,
        "rms_norm",
        &format!("{} {rows}x{dim}", T::dtype()),
        || {
            let params = Params {
                x: InOut::Apart {
                    input: TensorRef::from_slice(&x, &[rows, dim]).unwrap(),
                    output: TensorMut::from_slice(&mut out, &[rows, dim]).unwrap(),
                },
                residual: None,
                weight: Some(TensorRef::from_slice(&weight, &[dim]).unwrap()),
                weight_offset: 0.0,
                epsilon: 1e-5,
            };
            forward(&ctx, &params, Stream::DEFAULT).unwrap();
        },
        || candle_nn::ops::rms_norm(&their_x, &their_weight, 1e-5),
    );
}

fn bench(c: &mut Criterion) {
    for rows in [1, 512] {
        for dim in [576, 4096] {
            case::<f32>(c, rows, dim);
            case::<bf16>(c, rows, dim);
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
