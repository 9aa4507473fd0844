//! Gated activations, against candle's activation and product.

mod common;

use common::{Storage, compare, random, tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use unsloth::ops::swiglu::{Activation, Params, Tensors, forward};
use unsloth::{Context, InOut, Stream, TensorMut, TensorRef};

fn case<T: Storage>(c: &mut Criterion, rows: usize, dim: usize, activation: Activation) {
    let ctx = Context::cpu().unwrap();
    let shape = [rows, dim];
    let (gate, up) = (random::<T>(rows * dim, 1), random::<T>(rows * dim, 2));
    let mut out = gate.clone();
    let (their_gate, their_up) = (tensor(&gate, &shape), tensor(&up, &shape));
    let name = match activation {
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu tanh",
        _ => "silu",
    };
    compare(
        c,
        "swiglu",
        &format!("{} {rows}x{dim} {name}", T::dtype()),
        || {
            let params = Params {
                tensors: Tensors::Apart {
                    gate: InOut::Apart {
                        input: TensorRef::from_slice(&gate, &shape).unwrap(),
                        output: TensorMut::from_slice(&mut out, &shape).unwrap(),
                    },
                    up: TensorRef::from_slice(&up, &shape).unwrap(),
                },
                activation,
            };
            forward(&ctx, &params, Stream::DEFAULT).unwrap();
        },
        || {
            let gate = match activation {
                Activation::Gelu => their_gate.gelu_erf(),
                Activation::GeluTanh => their_gate.gelu(),
                _ => their_gate.silu(),
            };
            gate? * &their_up
        },
    );
}

fn bench(c: &mut Criterion) {
    for rows in [1, 512] {
        case::<f32>(c, rows, 1536, Activation::Silu);
        case::<bf16>(c, rows, 1536, Activation::Silu);
        case::<f32>(c, rows, 1536, Activation::Gelu);
        case::<f32>(c, rows, 1536, Activation::GeluTanh);
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
