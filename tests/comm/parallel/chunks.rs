//! Sums in chunks of rows, exactly: of integers that f32 has, in whatever order they are added.

use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::parallel::{Parallel, Partition};
use unsloth::ops::swiglu::Activation;
use unsloth::{DType, InOut, Layout, Stream, Workspace};

use super::{columns, divided, poisoned, rows, run, unbound, unbound_ref};
use crate::common::{TestTensor, contiguous, rng};
use crate::group::ranks;

const SIZE: usize = 2;
/// Rows in two dimensions.
const ROWS: [usize; 2] = [2, 3];
const FEATURES: usize = 5;
const INTERMEDIATE: usize = 6;

/// What a rank has lie so that rows of the first dimension are not as far from each other as others are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Apart {
    Nothing,
    /// Of the second rank.
    Input,
    /// Of the first, which adds it.
    Residual,
}

fn shape(columns: usize) -> [usize; 3] {
    [ROWS[0], ROWS[1], columns]
}

/// As it is, or with a gap behind each entry of the first dimension.
fn laid(t: &TestTensor, apart: bool) -> TestTensor {
    if !apart {
        return t.clone();
    }
    let columns = t.layout.dim(2);
    let strides = [ROWS[1] * columns + 3, columns, 1];
    let layout = Layout::strided(t.layout.shape(), &strides).unwrap();
    TestTensor::from_values(t.dtype, layout, &t.values())
}

fn integers(shape: &[usize]) -> TestTensor {
    let t = TestTensor::integers(&mut rng(), DType::F32, contiguous(shape), 5);
    let values: Vec<f64> = t.values().iter().map(|v| v - 2.0).collect();
    TestTensor::of(DType::F32, shape, &values)
}

/// `x Wᵀ + bias`.
fn product(x: &[f64], weight: &TestTensor, bias: &[f64]) -> Vec<f64> {
    let (weight, k) = (weight.values(), weight.layout.dim(1));
    let of_row = |row: &[f64]| -> Vec<f64> {
        let columns = weight.chunks(k).zip(bias);
        let dot = |w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
        columns.map(|(w, bias)| dot(w) + bias).collect()
    };
    x.chunks(k).flat_map(of_row).collect()
}

fn sum(a: Vec<f64>, b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Runs with every number of chunks, and with rows that a rank has otherwise.
fn cases(check: impl Fn(Apart, usize)) {
    for apart in [Apart::Nothing, Apart::Input, Apart::Residual] {
        for chunk_rows in [0, 1, 2, 3, 6, usize::MAX] {
            println!("case {apart:?}, {chunk_rows} rows");
            check(apart, chunk_rows);
        }
    }
}

#[test]
fn products_are_exact() {
    let weight = integers(&[4, FEATURES]);
    let (x, residual, bias) = (
        integers(&shape(FEATURES)),
        integers(&shape(4)),
        integers(&[4]),
    );
    let expected = sum(
        product(&x.values(), &weight, &bias.values()),
        &residual.values(),
    );
    cases(|apart, chunk_rows| {
        let outs = ranks(SIZE, |ctx, comm| {
            let rank = comm.rank();
            let own = divided(FEATURES, SIZE, rank);
            let x = laid(
                &columns(&x, own.clone()),
                apart == Apart::Input && rank == 1,
            );
            let residual = laid(&residual, apart == Apart::Residual && rank == 0);
            let (x, residual) = (x.upload(ctx), residual.upload(ctx));
            let (weight, bias) = (columns(&weight, own).upload(ctx), bias.upload(ctx));
            let mut out = poisoned(DType::F32, &shape(4)).upload(ctx);
            let mut params = |workspace| linear::Params {
                x_norm: None,
                x: x.view(),
                weights: Weights {
                    weight: weight.view(),
                    bias: Some(bias.view()),
                },
                // SAFETY: described once for each call, and alive while it runs.
                output: Output::Add(unsafe {
                    InOut::Apart {
                        input: unbound_ref(&residual),
                        output: unbound(&mut out),
                    }
                }),
                workspace,
                parallel: Some(Parallel {
                    partition: Partition::Row,
                    chunk_rows,
                    ..Parallel::new(comm)
                }),
            };
            let size = linear::workspace_size(ctx, &params(Workspace::none()));
            run(ctx, "linear", size, |workspace| {
                linear::forward(ctx, &params(workspace), Stream::DEFAULT)
            });
            out.download_output().values()
        });
        assert!(outs.iter().all(|out| *out == expected));
    });
}

#[test]
fn blocks_are_exact() {
    let [gate, up] = [0; 2].map(|_| integers(&[INTERMEDIATE, FEATURES]));
    let down = integers(&[FEATURES, INTERMEDIATE]);
    let [x, residual] = [0; 2].map(|_| integers(&shape(FEATURES)));
    let bias = integers(&[FEATURES]);
    let zeros = [0.0; INTERMEDIATE];
    let [gated, plain] = [&gate, &up].map(|weight| product(&x.values(), weight, &zeros));
    let activated: Vec<f64> = gated
        .iter()
        .zip(&plain)
        .map(|(g, u)| g.max(0.0) * g.max(0.0) * u)
        .collect();
    let expected = sum(
        product(&activated, &down, &bias.values()),
        &residual.values(),
    );
    for keeps in [false, true] {
        cases(|apart, chunk_rows| {
            let outs = ranks(SIZE, |ctx, comm| {
                let rank = comm.rank();
                let own = divided(INTERMEDIATE, SIZE, rank);
                let x = laid(&x, apart == Apart::Input && rank == 1).upload(ctx);
                let residual = laid(&residual, apart == Apart::Residual && rank == 0).upload(ctx);
                let [gate, up] = [&gate, &up].map(|w| rows(w, own.clone()).upload(ctx));
                let (down, bias) = (columns(&down, own.clone()).upload(ctx), bias.upload(ctx));
                let mut out = poisoned(DType::F32, &shape(FEATURES)).upload(ctx);
                let mut kept = poisoned(DType::F32, &shape(2 * own.len())).upload(ctx);
                let weights = |weight, bias| Weights { weight, bias };
                // SAFETY: described once for each call, and alive while it runs.
                let mut params = |workspace| unsafe {
                    mlp::Params {
                        x_norm: None,
                        x: x.view(),
                        gate_up: GateUp::Apart {
                            gate: weights(gate.view(), None),
                            up: weights(up.view(), None),
                        },
                        activation: Activation::ReluSquared,
                        intermediate_norm: None,
                        down: weights(down.view(), Some(bias.view())),
                        output: Output::Add(InOut::Apart {
                            input: unbound_ref(&residual),
                            output: unbound(&mut out),
                        }),
                        workspace,
                        gate_up_out: keeps.then(|| unbound(&mut kept)),
                        parallel: Some(Parallel {
                            chunk_rows,
                            ..Parallel::new(comm)
                        }),
                    }
                };
                let size = mlp::workspace_size(ctx, &params(Workspace::none()));
                run(ctx, "mlp", size, |workspace| {
                    mlp::forward(ctx, &params(workspace), Stream::DEFAULT)
                });
                let gate_up = kept.download_output().values();
                let range = if keeps { own } else { 0..0 };
                let of = |t: &[f64]| super::columns_of(t, INTERMEDIATE, range.clone());
                let both = gate_up.chunks(2 * range.len().max(1));
                let both: Vec<&[f64]> = both.filter(|_| keeps).collect();
                let halves = [of(&gated), of(&plain)];
                for (i, half) in halves.iter().enumerate() {
                    let found = both.iter().flat_map(|row| {
                        let n = range.len();
                        row[i * n..(i + 1) * n].to_vec()
                    });
                    assert!(found.eq(half.iter().copied()));
                }
                out.download_output().values()
            });
            assert!(outs.iter().all(|out| *out == expected));
        });
    }
}
