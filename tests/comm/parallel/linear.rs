//! Linear layers whose weight ranks divide by rows or by columns.

use unsloth::ops::linear::{self, Output, Params, Weights};
use unsloth::ops::parallel::{Parallel, Partition};
use unsloth::{DType, InOut, Stream, Workspace};

use super::{Rows, columns, columns_of, divided, groups, magnitudes, poisoned, rows, run};
use crate::common::reference::linear::{linear as exact, linear_f32 as plain};
use crate::common::{TestTensor, assert_flash_rule_of_sums, contiguous, rng, rounded};
use crate::group::ranks;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Residual {
    None,
    Apart,
    InPlace,
}

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    rows: Rows,
    partition: Partition,
    dtype: DType,
    bias: bool,
    residual: Residual,
    /// Between rows and columns.
    between: Vec<usize>,
}

const OUT_FEATURES: usize = 19;
const IN_FEATURES: usize = 45;

/// A rank's part of what an output is of: its columns, or its rows.
fn of_output(case: &Case, t: &TestTensor, rank: usize) -> TestTensor {
    match case.partition {
        Partition::Row => rows(t, case.rows.of(rank)),
        _ => columns(t, divided(OUT_FEATURES, case.size, rank)),
    }
}

fn check(case: &Case) {
    println!("case {case:?}");
    let rng = &mut rng();
    let total = case.rows.total();
    let shape = |last| [&[total], &case.between[..], &[last]].concat();
    let mut normal = |dtype, shape: &[usize]| TestTensor::normal(rng, dtype, contiguous(shape));
    let x = normal(case.dtype, &shape(IN_FEATURES));
    let weight = normal(DType::F32, &[OUT_FEATURES, IN_FEATURES]);
    let bias = case.bias.then(|| normal(DType::F32, &[OUT_FEATURES]));
    let residual = normal(case.dtype, &shape(OUT_FEATURES));
    let is_row = case.partition == Partition::Row;

    let outs = ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let part = |n| divided(n, case.size, rank);
        let (x, weight, bias) = match case.partition {
            Partition::Row => (
                columns(&x, part(IN_FEATURES)),
                columns(&weight, part(IN_FEATURES)),
                bias.clone(),
            ),
            _ => (
                rows(&x, case.rows.of(rank)),
                rows(&weight, part(OUT_FEATURES)),
                bias.as_ref().map(|bias| rows(bias, part(OUT_FEATURES))),
            ),
        };
        let own = of_output(case, &residual, rank);
        let (x, weight) = (x.upload(ctx), weight.upload(ctx));
        let bias = bias.map(|bias| bias.upload(ctx));
        let mut out = poisoned(case.dtype, own.layout.shape()).upload(ctx);
        let mut added = own.upload(ctx);
        let params = |out: Output<'static>, workspace| Params {
            x_norm: None,
            x: x.view(),
            weights: Weights {
                weight: weight.view(),
                bias: bias.as_ref().map(|bias| bias.view()),
            },
            output: out,
            workspace,
            parallel: Some(Parallel {
                partition: case.partition,
                ..case.rows.parallel(comm)
            }),
        };
        let mut output = || -> Output<'static> {
            // SAFETY: described once for each call, and alive while it runs.
            unsafe {
                match case.residual {
                    Residual::None => Output::Write(super::unbound(&mut out)),
                    Residual::Apart => Output::Add(InOut::Apart {
                        input: super::unbound_ref(&added),
                        output: super::unbound(&mut out),
                    }),
                    Residual::InPlace => Output::Add(InOut::InPlace(super::unbound(&mut added))),
                }
            }
        };
        let asked = params(output(), Workspace::none());
        linear::supported(ctx, &asked).unwrap();
        let size = linear::workspace_size(ctx, &asked);
        run(ctx, "linear", size, |workspace| {
            linear::forward(ctx, &params(output(), workspace), Stream::DEFAULT)
        });
        match case.residual {
            Residual::InPlace => added.download_output(),
            _ => out.download_output(),
        }
    });

    let (x, weight) = (x.values(), weight.values());
    let bias = bias.map(|bias| bias.values());
    let residual = (case.residual != Residual::None).then(|| residual.values());
    let sizes = (x.len() / IN_FEATURES, IN_FEATURES, OUT_FEATURES);
    let (bias, residual) = (bias.as_deref(), residual.as_deref());
    let expected = exact(&x, &weight, sizes, bias, residual);
    let plain = rounded(case.dtype, &plain(&x, &weight, sizes, bias, residual));
    let terms = exact(
        &magnitudes(&x),
        &magnitudes(&weight),
        sizes,
        bias.map(magnitudes).as_deref(),
        residual.map(magnitudes).as_deref(),
    );
    let mut most = super::greatest(&terms);
    let mut got = outs
        .iter()
        .map(TestTensor::values)
        .collect::<Vec<_>>()
        .concat();
    let (mut exact, mut by_plain) = (Vec::new(), Vec::new());
    if is_row {
        got = case.rows.joined(&outs);
        most = super::of_parts(most, case.dtype, case.size, &expected);
        (exact, by_plain) = (expected, plain);
    } else {
        for rank in 0..case.size {
            let range = divided(OUT_FEATURES, case.size, rank);
            exact.extend(columns_of(&expected, OUT_FEATURES, range.clone()));
            by_plain.extend(columns_of(&plain, OUT_FEATURES, range));
        }
    }
    assert_flash_rule_of_sums("out", case.dtype, &got, &exact, &by_plain, most);
}

#[test]
fn forward_is_that_of_one_rank() {
    for (size, rows, dtype) in groups() {
        for partition in [Partition::Column, Partition::Row] {
            for (bias, residual) in [
                (false, Residual::None),
                (true, Residual::Apart),
                (true, Residual::InPlace),
                (false, Residual::Apart),
                (true, Residual::None),
            ] {
                check(&Case {
                    size,
                    rows: rows.clone(),
                    partition,
                    dtype,
                    bias,
                    residual,
                    between: if bias { vec![] } else { vec![2] },
                });
            }
        }
    }
}
