//! The gated feed-forward block whose intermediate dimension ranks divide, and its gradients.

use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::backward::{Gradients, Params as Backward};
use unsloth::ops::mlp::{self, GateUp, Params};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::{Context, DType, InOut, Stream, Workspace};

use super::{
    Gradient, Rows, assert_same, columns, divided, greatest, groups, magnitudes, of_parts,
    poisoned, rows, run, unbound, unbound_ref,
};
use crate::common::reference::mlp::{
    Arithmetic, Layer, Layers, Plain, mlp as reference, mlp_backward,
};
use crate::common::{
    DeviceTensor, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, contiguous, rng,
    rounded,
};
use crate::group::ranks;

const HIDDEN: usize = 24;
const INTERMEDIATE: usize = 42;
const ACTIVATION: Activation = Activation::Silu;

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    rows: Rows,
    dtype: DType,
    bias: bool,
    residual: bool,
    packed: bool,
    keeps: bool,
}

/// A matrix and its bias.
type Pair = (TestTensor, Option<TestTensor>);

struct Tensors {
    x: TestTensor,
    residual: TestTensor,
    dout: TestTensor,
    /// Gate, up and down.
    layers: [Pair; 3],
}

impl Tensors {
    fn new(case: &Case) -> Tensors {
        let rng = &mut rng();
        let mut layer = |n: usize, k: usize| {
            let normal = TestTensor::normal(rng, DType::F32, contiguous(&[n, k])).values();
            let scaled: Vec<f64> = normal.iter().map(|v| v / (k as f64).sqrt()).collect();
            let bias = TestTensor::normal(rng, case.dtype, contiguous(&[n]));
            let weight = TestTensor::of(case.dtype, &[n, k], &scaled);
            (weight, case.bias.then_some(bias))
        };
        let layers = [
            layer(INTERMEDIATE, HIDDEN),
            layer(INTERMEDIATE, HIDDEN),
            layer(HIDDEN, INTERMEDIATE),
        ];
        let shape = contiguous(&[case.rows.total(), HIDDEN]);
        let [x, residual, dout] = [0; 3].map(|_| TestTensor::normal(rng, case.dtype, shape));
        Tensors {
            x,
            residual,
            dout,
            layers,
        }
    }

    fn values(&self) -> Layers {
        let [gate, up, down] = self.layers.each_ref().map(|(weight, bias)| Layer {
            weight: weight.values(),
            bias: bias.as_ref().map(TestTensor::values),
        });
        Layers { gate, up, down }
    }
}

/// A rank's part of the layers, up and gate as one if they are packed.
struct Part {
    layers: Vec<(DeviceTensor, Option<DeviceTensor>)>,
}

impl Part {
    fn new(ctx: &Context, case: &Case, tensors: &Tensors, rank: usize) -> Part {
        let range = divided(INTERMEDIATE, case.size, rank);
        let of_rows = |(weight, bias): &Pair| {
            let bias = bias.as_ref().map(|bias| rows(bias, range.clone()));
            (rows(weight, range.clone()), bias)
        };
        let [gate, up] = [0, 1].map(|i| of_rows(&tensors.layers[i]));
        let (down, bias) = &tensors.layers[2];
        let down = (columns(down, range), bias.clone());
        let layers = match case.packed {
            false => vec![gate, up, down],
            true => {
                let bias = up.1.zip(gate.1).map(|(up, gate)| behind(&up, &gate));
                vec![(behind(&up.0, &gate.0), bias), down]
            }
        };
        let upload = |(w, b): Pair| (w.upload(ctx), b.map(|b| b.upload(ctx)));
        Part {
            layers: layers.into_iter().map(upload).collect(),
        }
    }

    fn weights(&self, i: usize) -> Weights<'_> {
        let (weight, bias) = &self.layers[i];
        Weights {
            weight: weight.view(),
            bias: bias.as_ref().map(|bias| bias.view()),
        }
    }

    fn gate_up(&self) -> GateUp<'_> {
        match self.layers.len() {
            2 => GateUp::Packed {
                weights: self.weights(0),
                order: GateOrder::UpFirst,
            },
            _ => GateUp::Apart {
                gate: self.weights(0),
                up: self.weights(1),
            },
        }
    }

    fn down(&self) -> Weights<'_> {
        self.weights(self.layers.len() - 1)
    }
}

/// Rows of one behind those of another.
fn behind(a: &TestTensor, b: &TestTensor) -> TestTensor {
    let mut shape = a.layout.shape().to_vec();
    shape[0] += b.layout.dim(0);
    TestTensor::of(a.dtype, &shape, &[a.values(), b.values()].concat())
}

/// Every rank's output, and gate and up as they are kept.
fn forward(case: &Case, tensors: &Tensors) -> Vec<[TestTensor; 2]> {
    ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let part = Part::new(ctx, case, tensors, rank);
        let own = case.rows.of(rank);
        let x = rows(&tensors.x, own.clone()).upload(ctx);
        let residual = rows(&tensors.residual, own.clone()).upload(ctx);
        let mut out = poisoned(case.dtype, &[own.len(), HIDDEN]).upload(ctx);
        let columns = 2 * divided(INTERMEDIATE, case.size, rank).len();
        let mut kept = poisoned(case.dtype, &[case.rows.total(), columns]).upload(ctx);
        let mut params = |workspace| {
            // SAFETY: described once for each call, and alive while it runs.
            unsafe {
                Params {
                    x_norm: None,
                    x: x.view(),
                    gate_up: part.gate_up(),
                    activation: ACTIVATION,
                    intermediate_norm: None,
                    down: part.down(),
                    output: match case.residual {
                        false => Output::Write(unbound(&mut out)),
                        true => Output::Add(InOut::Apart {
                            input: unbound_ref(&residual),
                            output: unbound(&mut out),
                        }),
                    },
                    workspace,
                    gate_up_out: case.keeps.then(|| unbound(&mut kept)),
                    parallel: Some(case.rows.parallel(comm)),
                }
            }
        };
        let asked = params(Workspace::none());
        mlp::supported(ctx, &asked).unwrap();
        let size = mlp::workspace_size(ctx, &asked);
        run(ctx, "mlp", size, |workspace| {
            mlp::forward(ctx, &params(workspace), Stream::DEFAULT)
        });
        [out.download_output(), kept.download_output()]
    })
}

#[test]
fn forward_is_that_of_one_rank() {
    for (size, rows, dtype) in groups() {
        for (bias, residual, packed, keeps) in [
            (false, false, false, false),
            (true, true, true, false),
            (true, true, false, true),
        ] {
            let case = Case {
                size,
                rows: rows.clone(),
                dtype,
                bias,
                residual,
                packed,
                keeps,
            };
            println!("case {case:?}");
            let tensors = Tensors::new(&case);
            let outs: Vec<_> = forward(&case, &tensors)
                .into_iter()
                .map(|[o, _]| o)
                .collect();
            let got = case.rows.joined(&outs);
            let (x, layers) = (tensors.x.values(), tensors.values());
            let residual = residual.then(|| tensors.residual.values());
            let of = |plain| {
                let sizes = (case.rows.total(), HIDDEN, INTERMEDIATE);
                reference(&x, &layers, sizes, ACTIVATION, residual.as_deref(), plain)
            };
            let plain = rounded(dtype, &of(Some(Plain::Activated(dtype))));
            // Sums of hundreds of terms of about one.
            let exact = of(None);
            let terms = greatest(&exact) + INTERMEDIATE as f64;
            let terms = of_parts(terms, dtype, size, &exact);
            assert_flash_rule_of_sums("out", dtype, &got, &exact, &plain, terms);
        }
    }
}

/// A rank's gradients: of the input, then of weights and biases as [`Part`] has them.
fn backward(
    case: &Case,
    tensors: &Tensors,
    kept: Option<&[TestTensor]>,
    wants_dx: bool,
) -> Vec<Vec<TestTensor>> {
    ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let part = Part::new(ctx, case, tensors, rank);
        let own = case.rows.of(rank);
        let x = rows(&tensors.x, own.clone()).upload(ctx);
        let dout = rows(&tensors.dout, own.clone()).upload(ctx);
        let kept = kept.map(|kept| kept[rank].upload(ctx));
        let mut dx = poisoned(case.dtype, &[own.len(), HIDDEN]).upload(ctx);
        let like = |t: &DeviceTensor| poisoned(DType::F32, t.view().shape()).upload(ctx);
        let mut gradients: Vec<_> = part
            .layers
            .iter()
            .map(|(weight, bias)| (like(weight), bias.as_ref().map(like)))
            .collect();
        let mut params = |workspace| {
            // SAFETY: described once for each call, and alive while it runs.
            let mut all = gradients.iter_mut().map(|(weight, bias)| unsafe {
                (
                    Some(unbound(weight)),
                    bias.as_mut().map(|bias| unbound(bias)),
                )
            });
            let mut of = Gradients::default();
            if case.packed {
                (of.dgate_up_weight, of.dgate_up_bias) = all.next().unwrap();
            } else {
                (of.dgate_weight, of.dgate_bias) = all.next().unwrap();
                (of.dup_weight, of.dup_bias) = all.next().unwrap();
            }
            (of.ddown_weight, of.ddown_bias) = all.next().unwrap();
            Backward {
                forward: Params {
                    x_norm: None,
                    x: x.view(),
                    gate_up: part.gate_up(),
                    activation: ACTIVATION,
                    intermediate_norm: None,
                    down: part.down(),
                    output: Output::none(),
                    workspace: Workspace::none(),
                    gate_up_out: None,
                    parallel: Some(case.rows.parallel(comm)),
                },
                gate_up: kept.as_ref().map(|kept| kept.view()),
                dout: dout.view(),
                // SAFETY: as above.
                dx: wants_dx.then(|| unsafe { unbound(&mut dx) }),
                gradients: of,
                accumulate: false,
                workspace,
            }
        };
        let asked = params(Workspace::none());
        mlp::backward::supported(ctx, &asked).unwrap();
        let size = mlp::backward::workspace_size(ctx, &asked);
        run(ctx, "mlp_backward", size, |workspace| {
            mlp::backward(ctx, &params(workspace), Stream::DEFAULT)
        });
        let mut all = vec![dx.download_output()];
        for (weight, bias) in gradients {
            all.push(weight.download_output());
            all.extend(bias.map(|bias| bias.download_output()));
        }
        all
    })
}

#[test]
fn backward_is_that_of_one_rank() {
    for (size, rows, dtype) in groups() {
        for (bias, packed) in [(true, false), (true, true), (false, false)] {
            let case = Case {
                size,
                rows: rows.clone(),
                dtype,
                bias,
                residual: false,
                packed,
                keeps: true,
            };
            println!("case {case:?}");
            check_backward(&case);
        }
    }
}

fn check_backward(case: &Case) {
    let tensors = Tensors::new(case);
    let kept: Vec<_> = forward(case, &tensors)
        .into_iter()
        .map(|[_, k]| k)
        .collect();
    let all = backward(case, &tensors, Some(&kept), true);
    // What was kept, and what is not asked for, changes no bits.
    let again = backward(case, &tensors, None, false);
    for (all, again) in all.iter().zip(&again) {
        let pairs = all.iter().zip(again).skip(1);
        pairs.for_each(|(a, b)| assert!(a.bits() == b.bits()));
    }
    let layers = tensors.values();
    let (x, dout) = (tensors.x.values(), tensors.dout.values());
    let of = |arithmetic| {
        let sizes = (case.rows.total(), HIDDEN, INTERMEDIATE, HIDDEN);
        mlp_backward(&dout, &x, &layers, sizes, ACTIVATION, arithmetic)
    };
    let (exact, bounds) = (of(Arithmetic::Exact), of(Arithmetic::Magnitudes));
    let plain = of(Arithmetic::Plain {
        dtype: case.dtype,
        apart: !case.packed,
    });
    let dx: Vec<_> = all.iter().map(|all| all[0].clone()).collect();
    let plain_dx = rounded(case.dtype, &plain.dx);
    let most = greatest(&magnitudes(&bounds.dx));
    let most = of_parts(most, case.dtype, case.size, &exact.dx);
    assert_gradient_rule(
        "dx",
        case.dtype,
        &case.rows.joined(&dx),
        &exact.dx,
        &plain_dx,
        most,
    );
    let layers = [
        (&exact.gate, &plain.gate, &bounds.gate),
        (&exact.up, &plain.up, &bounds.up),
        (&exact.down, &plain.down, &bounds.down),
    ];
    let mut gradients: [Gradient; 6] = Default::default();
    for (rank, all) in all.iter().enumerate() {
        let range = divided(INTERMEDIATE, case.size, rank);
        let own_rows = |t: &[f64], row: usize| t[range.start * row..range.end * row].to_vec();
        let got: Vec<_> = all[1..].iter().map(TestTensor::values).collect();
        let per = if case.bias { 2 } else { 1 };
        for (i, (exact, plain, _)) in layers.iter().enumerate() {
            let (weight, bias) = match (i, case.packed) {
                (2, _) => (&got[got.len() - per][..], got.last().unwrap().to_vec()),
                (i, false) => (&got[per * i][..], got[per * i + per - 1].to_vec()),
                // Up first.
                (i, true) => {
                    let (half, of_bias) = (got[0].len() / 2, got[1].len() / 2);
                    let start = 1 - i;
                    let bias = &got[1][start * of_bias..(start + 1) * of_bias];
                    (&got[0][start * half..(start + 1) * half], bias.to_vec())
                }
            };
            let own = |t: &[f64]| match i {
                2 => super::columns_of(t, INTERMEDIATE, range.clone()),
                _ => own_rows(t, HIDDEN),
            };
            let of = || own(&plain.dweight);
            gradients[i].push(weight, own(&exact.dweight), [of(), of()]);
            if case.bias {
                let own = |t: &[f64]| match i {
                    2 => t.to_vec(),
                    _ => own_rows(t, 1),
                };
                let of = || own(&plain.dbias);
                gradients[3 + i].push(&bias, own(&exact.dbias), [of(), of()]);
            }
        }
    }
    for (i, (_, _, bounds)) in layers.iter().enumerate() {
        gradients[i].check("dweight", DType::F32, greatest(&bounds.dweight));
        gradients[3 + i].check("dbias", DType::F32, greatest(&bounds.dbias));
    }
    if case.bias {
        let last: Vec<_> = all.iter().map(|all| all.last().unwrap().clone()).collect();
        assert_same(&last);
    }
}
