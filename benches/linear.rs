//! Linear layers, against candle's matrix product.

mod common;

use common::{Storage, compare, random, tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use half::{bf16, f16};
use unsloth::ops::linear::{Output, Params, Weights, forward};
use unsloth::{Context, Stream, TensorMut, TensorRef, Workspace};

/// Activations of type `X`, weights of type `W`; candle, which wants them alike, multiplies in `C`.
fn case<X: Storage, W: Storage, C: Storage>(c: &mut Criterion, rows: usize, n: usize, k: usize) {
    let ctx = Context::cpu().unwrap();
    let (x, weight) = (random::<X>(rows * k, 1), random::<W>(n * k, 2));
    let mut out = vec![X::from_f32(0.0); rows * n];
    let their_x = tensor(&random::<C>(rows * k, 1), &[rows, k]);
    let their_weight = tensor(&random::<C>(n * k, 2), &[n, k]).t().unwrap();
    compare(
        c,
        "linear",
        &format!("{} by {} {rows}x{k}x{n}", X::dtype(), W::dtype()),
        || {
            let params = Params {
                x: TensorRef::from_slice(&x, &[rows, k]).unwrap(),
                weights: Weights {
                    weight: TensorRef::from_slice(&weight, &[n, k]).unwrap(),
                    bias: None,
                },
                output: Output::Write(TensorMut::from_slice(&mut out, &[rows, n]).unwrap()),
                workspace: Workspace::none(),
            };
            forward(&ctx, &params, Stream::DEFAULT).unwrap();
        },
        || their_x.matmul(&their_weight),
    );
}

fn bench(c: &mut Criterion) {
    for rows in [1, 4, 32, 512] {
        for (n, k) in [(1536, 576), (2048, 2048)] {
            case::<f32, f32, f32>(c, rows, n, k);
            case::<f16, f16, f16>(c, rows, n, k);
            case::<f32, bf16, f32>(c, rows, n, k);
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
