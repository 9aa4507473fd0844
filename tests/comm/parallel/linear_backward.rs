//! Gradients of linear layers that ranks divide.

use unsloth::ops::linear::{self, backward::Params};
use unsloth::ops::parallel::{Parallel, Partition};
use unsloth::{DType, Stream, Workspace};

use super::{
    Gradient, Rows, assert_same, columns, columns_of, divided, greatest, groups, magnitudes,
    of_parts, poisoned, rows, run, unbound,
};
use crate::common::reference::linear::{linear_backward as exact, linear_backward_f32 as plain};
use crate::common::{TestTensor, assert_gradient_rule, contiguous, rng, rounded};
use crate::group::ranks;

const OUT_FEATURES: usize = 21;
const IN_FEATURES: usize = 34;

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    rows: Rows,
    partition: Partition,
    dtype: DType,
    /// Gradients of the input, the weight and the bias.
    wanted: [bool; 3],
    accumulate: bool,
}

impl Case {
    /// A rank's columns of a dimension, of which all have all where the other is divided.
    fn part(&self, rank: usize, of: Partition) -> std::ops::Range<usize> {
        let n = match of {
            Partition::Row => IN_FEATURES,
            _ => OUT_FEATURES,
        };
        match self.partition == of {
            true => divided(n, self.size, rank),
            false => 0..n,
        }
    }

    /// A rank's rows of what has the columns of the input or the output: all, where its columns are
    /// divided.
    fn rows(&self, rank: usize, of: Partition) -> std::ops::Range<usize> {
        match self.partition == of {
            true => 0..self.rows.total(),
            false => self.rows.of(rank),
        }
    }
}

fn check(case: &Case) {
    println!("case {case:?}");
    let rng = &mut rng();
    let total = case.rows.total();
    let mut normal = |dtype, shape: &[usize]| TestTensor::normal(rng, dtype, contiguous(shape));
    let dout = normal(case.dtype, &[total, OUT_FEATURES]);
    let x = normal(case.dtype, &[total, IN_FEATURES]);
    let weight = normal(DType::Bf16, &[OUT_FEATURES, IN_FEATURES]);
    let before = normal(DType::F32, &[OUT_FEATURES, IN_FEATURES]);

    let outs = ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let (of_out, of_in) = (
            case.part(rank, Partition::Column),
            case.part(rank, Partition::Row),
        );
        let dout = columns(
            &rows(&dout, case.rows(rank, Partition::Column)),
            of_out.clone(),
        );
        let x = columns(&rows(&x, case.rows(rank, Partition::Row)), of_in.clone());
        let weight = columns(&rows(&weight, of_out.clone()), of_in.clone());
        let before = columns(&rows(&before, of_out.clone()), of_in);
        let (dout_there, x_there, weight) = (dout.upload(ctx), x.upload(ctx), weight.upload(ctx));
        let mut dx = poisoned(case.dtype, x.layout.shape()).upload(ctx);
        let mut dweight = match case.accumulate {
            true => before.upload(ctx),
            false => poisoned(DType::F32, before.layout.shape()).upload(ctx),
        };
        let of_bias = match case.accumulate {
            true => TestTensor::of(DType::F32, &[of_out.len()], &vec![0.5; of_out.len()]),
            false => poisoned(DType::F32, &[of_out.len()]),
        };
        let mut dbias = of_bias.upload(ctx);
        let mut params = |workspace| {
            // SAFETY: described once for each call, and alive while it runs.
            unsafe {
                Params {
                    dout: dout_there.view(),
                    x: case.wanted[1].then(|| x_there.view()),
                    weight: case.wanted[0].then(|| weight.view()),
                    dx: case.wanted[0].then(|| unbound(&mut dx)),
                    dweight: case.wanted[1].then(|| unbound(&mut dweight)),
                    dbias: case.wanted[2].then(|| unbound(&mut dbias)),
                    accumulate: case.accumulate,
                    workspace,
                    parallel: Some(Parallel {
                        partition: case.partition,
                        ..case.rows.parallel(comm)
                    }),
                }
            }
        };
        let asked = params(Workspace::none());
        linear::backward::supported(ctx, &asked).unwrap();
        let size = linear::backward::workspace_size(ctx, &asked);
        run(ctx, "linear_backward", size, |workspace| {
            linear::backward(ctx, &params(workspace), Stream::DEFAULT)
        });
        [dx, dweight, dbias].map(|t| t.download_output())
    });

    let (dout, x, weight) = (dout.values(), x.values(), weight.values());
    let sizes = (total, IN_FEATURES, OUT_FEATURES);
    let expected = exact(&dout, &x, &weight, sizes);
    let plain = plain(&dout, &x, &weight, sizes);
    let terms = exact(
        &magnitudes(&dout),
        &magnitudes(&x),
        &magnitudes(&weight),
        sizes,
    );
    let with = |g: Vec<f64>, before: &[f64]| -> Vec<f64> {
        match case.accumulate {
            true => g.iter().zip(before).map(|(g, b)| g + b).collect(),
            false => g,
        }
    };
    let [dx, dweight, dbias] = [0, 1, 2].map(|i| {
        let of: Vec<TestTensor> = outs.iter().map(|outs| outs[i].clone()).collect();
        of
    });
    if case.wanted[0] {
        let plain = rounded(case.dtype, &plain.dx);
        let most = greatest(&terms.dx);
        match case.partition {
            Partition::Row => {
                let mut gradient = Gradient::default();
                for (rank, dx) in dx.iter().enumerate() {
                    let own =
                        |t: &[f64]| columns_of(t, IN_FEATURES, case.part(rank, Partition::Row));
                    let exact = own(&expected.dx);
                    gradient.push(&dx.values(), exact, [own(&plain), own(&plain)]);
                }
                gradient.check("dx", case.dtype, most);
            }
            _ => {
                let dx = case.rows.joined(&dx);
                let most = of_parts(most, case.dtype, case.size, &expected.dx);
                assert_gradient_rule("dx", case.dtype, &dx, &expected.dx, &plain, most);
            }
        }
    }
    if case.wanted[1] {
        let before = before.values();
        let (expected, plain) = (
            with(expected.dweight, &before),
            with(plain.dweight, &before),
        );
        let most = greatest(&terms.dweight) + greatest(&before);
        let mut gradient = Gradient::default();
        for (rank, dweight) in dweight.iter().enumerate() {
            let own = |t: &[f64]| {
                let rows = case.part(rank, Partition::Column);
                let t = &t[rows.start * IN_FEATURES..rows.end * IN_FEATURES];
                columns_of(t, IN_FEATURES, case.part(rank, Partition::Row))
            };
            let exact = own(&expected);
            gradient.push(&dweight.values(), exact, [own(&plain), own(&plain)]);
        }
        gradient.check("dweight", DType::F32, most);
    }
    if case.wanted[2] {
        let before = vec![0.5; OUT_FEATURES];
        let (expected, plain) = (with(expected.dbias, &before), with(plain.dbias, &before));
        let most = greatest(&terms.dbias) + 0.5;
        let mut gradient = Gradient::default();
        for (rank, dbias) in dbias.iter().enumerate() {
            let own = |t: &[f64]| t[case.part(rank, Partition::Column)].to_vec();
            gradient.push(&dbias.values(), own(&expected), [own(&plain), own(&plain)]);
        }
        gradient.check("dbias", DType::F32, most);
        if case.partition == Partition::Row {
            assert_same(&dbias);
        }
    }
}

#[test]
fn backward_is_that_of_one_rank() {
    for (size, rows, dtype) in groups() {
        for partition in [Partition::Column, Partition::Row] {
            for (wanted, accumulate) in [
                ([true; 3], false),
                ([true; 3], true),
                ([true, false, false], false),
                ([false, true, true], false),
            ] {
                check(&Case {
                    size,
                    rows: rows.clone(),
                    partition,
                    dtype,
                    wanted,
                    accumulate,
                });
            }
        }
    }
}
