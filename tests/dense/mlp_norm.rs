//! The feed-forward block whose intermediate is normalised, against the operations that it is made of.

use crate::common::rules::epsilon;
use crate::common::tensor::strided_rows;
use crate::common::workspace::poisoned_workspace;
use crate::common::{FLOATS, TestTensor, contexts, contiguous, for_each_case, rng};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp, Norm, Params};
use unsloth::ops::rms_norm;
use unsloth::ops::swiglu::{self, Activation, GateOrder};
use unsloth::{Backend, Context, DType, InOut, Stream, TensorMut, TensorRef, Workspace};

const EPSILON: f32 = 1e-5;

/// Rows, the order of a packed matrix, and whether gate and up are kept.
type Case = (usize, GateOrder, bool);

fn plain(weight: TensorRef<'_>) -> Weights<'_> {
    Weights { weight, bias: None }
}

fn product(ctx: &Context, x: TensorRef<'_>, weight: TensorRef<'_>, out: TensorMut<'_>) {
    let params = linear::Params {
        x_norm: None,
        parallel: None,
        x,
        weights: plain(weight),
        output: Output::Write(out),
        workspace: Workspace::none(),
    };
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
}

fn check(ctx: &Context, dtype: DType, &(rows, order, keeps): &Case) {
    let (hidden, intermediate) = (40, 72);
    let rng = &mut rng();
    let mut normal = |layout| TestTensor::normal(rng, dtype, layout).upload(ctx);
    let x = normal(strided_rows(&[rows, hidden], 8));
    let gate_up = normal(contiguous(&[2 * intermediate, hidden]));
    let down = normal(contiguous(&[hidden, intermediate]));
    let gains = normal(contiguous(&[intermediate]));
    let poisoned = |columns| TestTensor::poisoned(dtype, contiguous(&[rows, columns])).upload(ctx);
    let mut both = poisoned(2 * intermediate);
    let mut middle = poisoned(intermediate);
    let mut expected = poisoned(hidden);
    product(ctx, x.view(), gate_up.view(), both.view_mut());
    let activated = swiglu::Params {
        tensors: swiglu::Tensors::Packed {
            gate_up: both.view(),
            order,
            out: middle.view_mut(),
        },
        activation: Activation::ReluSquared,
    };
    swiglu::forward(ctx, &activated, Stream::DEFAULT).unwrap();
    let norm = rms_norm::Params {
        x: InOut::InPlace(middle.view_mut()),
        residual: None,
        weight: Some(gains.view()),
        weight_offset: 0.0,
        epsilon: EPSILON,
    };
    rms_norm::forward(ctx, &norm, Stream::DEFAULT).unwrap();
    product(ctx, middle.view(), down.view(), expected.view_mut());

    let (mut out, mut kept) = (poisoned(hidden), poisoned(2 * intermediate));
    let mut params = Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        gate_up: GateUp::Packed {
            weights: plain(gate_up.view()),
            order,
        },
        activation: Activation::ReluSquared,
        intermediate_norm: Some(Norm {
            weight: gains.view(),
            epsilon: EPSILON,
        }),
        down: plain(down.view()),
        output: Output::Write(out.view_mut()),
        workspace: Workspace::none(),
        gate_up_out: keeps.then(|| kept.view_mut()),
    };
    mlp::supported(ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(ctx, mlp::workspace_size(ctx, &params).unwrap());
    params.workspace = workspace.workspace();
    mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let pairs = [Some((&out, &expected)), keeps.then_some((&kept, &both))];
    for (got, wanted) in pairs.into_iter().flatten() {
        let (got, wanted) = (got.download_output(), wanted.download_output());
        if ctx.backend() == Backend::Cpu {
            assert!(got.bits() == wanted.bits());
            continue;
        }
        // The order of a product's sums depends on how tensors lie.
        let greatest = wanted.values().iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let bound = greatest * (8.0 * epsilon(dtype)).max(2e-5);
        for (got, wanted) in got.values().iter().zip(wanted.values()) {
            assert!((got - wanted).abs() <= bound, "{got} {wanted}");
        }
    }
}

#[test]
fn it_is_its_operations() {
    let cases: Vec<Case> = [0, 1, 5, 70]
        .into_iter()
        .flat_map(|rows| {
            let orders = [GateOrder::GateFirst, GateOrder::UpFirst];
            orders.map(|order| (rows, order, rows == 5))
        })
        .collect();
    for ctx in contexts() {
        for dtype in FLOATS {
            for_each_case(&cases, |case| check(&ctx, dtype, case));
        }
    }
}
