//! Linear layers, against candle's matrix product; small ones also against three plain loops, since
//! what a call costs beside its arithmetic shows there.

mod common;

use std::hint::black_box;

use common::{Storage, compare, random, tensor};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
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
                x_norm: None,
                parallel: None,
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

/// What anyone writes first: a sum of products for each element, which the compiler may not reorder.
fn loops(x: &[f32], weight: &[f32], out: &mut [f32], n: usize, k: usize) {
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (row, out) in weight.chunks_exact(k).zip(out) {
            *out = x.iter().zip(row).map(|(x, w)| x * w).sum();
        }
    }
}

/// A product of few rows and a square matrix of `n` columns.
fn small(c: &mut Criterion, rows: usize, n: usize) {
    let ctx = Context::cpu().unwrap();
    let (x, weight) = (random::<f32>(rows * n, 1), random::<f32>(n * n, 2));
    let mut out = vec![0.0; rows * n];
    let mut group = c.benchmark_group("linear, small");
    let case = format!("f32 {rows}x{n}x{n}");
    group.bench_function(BenchmarkId::new("unsloth", &case), |b| {
        b.iter(|| {
            let params = Params {
                x_norm: None,
                parallel: None,
                x: TensorRef::from_slice(&x, &[rows, n]).unwrap(),
                weights: Weights {
                    weight: TensorRef::from_slice(&weight, &[n, n]).unwrap(),
                    bias: None,
                },
                output: Output::Write(TensorMut::from_slice(&mut out, &[rows, n]).unwrap()),
                workspace: Workspace::none(),
            };
            forward(&ctx, &params, Stream::DEFAULT).unwrap();
        });
    });
    group.bench_function(BenchmarkId::new("loops", &case), |b| {
        b.iter(|| loops(black_box(&x), black_box(&weight), black_box(&mut out), n, n));
    });
    group.finish();
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

fn bench_small(c: &mut Criterion) {
    for rows in [1, 2, 4, 8] {
        for n in [64, 128, 256, 512] {
            small(c, rows, n);
        }
    }
}

criterion_group!(benches, bench, bench_small);
criterion_main!(benches);
