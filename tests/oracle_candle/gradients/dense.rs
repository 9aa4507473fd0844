//! Linear layers and the gated feed-forward block.

use unsloth::ops::linear::{self, Output};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::swiglu::Activation;
use unsloth::{DType, Stream, Workspace};

use super::{Leaf, assert_gradients, gradients};
use crate::common::workspace::poisoned_workspace;
use crate::common::{contexts, for_each_case};
use crate::normal;

const UNITS: f64 = 16.0;

#[test]
fn linear() {
    let (inner, outer) = (96, 130);
    for ctx in contexts() {
        for_each_case(&[1, 5, 70], |&rows| {
            let x = Leaf::normal(&ctx, &[rows, inner]);
            let weight = Leaf::normal(&ctx, &[outer, inner]);
            let bias = Leaf::normal(&ctx, &[outer]);
            let dout = normal(DType::F32, &[rows, outer]);
            let ours = dout.upload(&ctx);
            let mut dx = x.gradient(&ctx);
            let mut dweight = weight.gradient(&ctx);
            let mut dbias = bias.gradient(&ctx);
            let mut params = linear::backward::Params {
                dout: ours.view(),
                x: Some(x.ours.view()),
                weight: Some(weight.ours.view()),
                dx: Some(dx.view_mut()),
                dweight: Some(dweight.view_mut()),
                dbias: Some(dbias.view_mut()),
                accumulate: false,
                workspace: Workspace::none(),
                parallel: None,
            };
            let size = linear::backward::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            linear::backward(&ctx, &params, Stream::DEFAULT).unwrap();

            let product = weight.theirs.t().and_then(|w| x.theirs.matmul(&w));
            let y = product.and_then(|product| product.broadcast_add(&bias.theirs));
            let theirs = gradients(&[(y, &dout)]);
            let leaves = [
                ("x", &x, &dx),
                ("weight", &weight, &dweight),
                ("bias", &bias, &dbias),
            ];
            assert_gradients("linear", &leaves, &theirs, UNITS);
        });
    }
}

#[test]
fn mlp() {
    let (rows, hidden, inner) = (13, 64, 96);
    for ctx in contexts() {
        let x = Leaf::normal(&ctx, &[rows, hidden]);
        let [gate, up] = [0, 1].map(|_| Leaf::matrix(&ctx, [inner, hidden]));
        let down = Leaf::matrix(&ctx, [hidden, inner]);
        let dout = normal(DType::F32, &[rows, hidden]);
        let ours = dout.upload(&ctx);
        let mut dx = x.gradient(&ctx);
        let mut dgate = gate.gradient(&ctx);
        let mut dup = up.gradient(&ctx);
        let mut ddown = down.gradient(&ctx);
        let mut params = mlp::backward::Params {
            forward: mlp::Params {
                x_norm: None,
                x: x.ours.view(),
                gate_up: GateUp::Apart {
                    gate: gate.weights(),
                    up: up.weights(),
                },
                activation: Activation::Silu,
                intermediate_norm: None,
                down: down.weights(),
                output: Output::none(),
                workspace: Workspace::none(),
                gate_up_out: None,
                parallel: None,
            },
            gate_up: None,
            dout: ours.view(),
            dx: Some(dx.view_mut()),
            gradients: mlp::backward::Gradients {
                dgate_weight: Some(dgate.view_mut()),
                dup_weight: Some(dup.view_mut()),
                ddown_weight: Some(ddown.view_mut()),
                ..Default::default()
            },
            accumulate: false,
            workspace: Workspace::none(),
        };
        let size = mlp::backward::workspace_size(&ctx, &params).unwrap();
        let mut workspace = poisoned_workspace(&ctx, size);
        params.workspace = workspace.workspace();
        mlp::backward(&ctx, &params, Stream::DEFAULT).unwrap();

        let y = crate::candle_llama::mlp(&x.theirs, [&gate, &up, &down].map(|l| &l.theirs));
        let theirs = gradients(&[(y, &dout)]);
        let leaves = [
            ("x", &x, &dx),
            ("gate", &gate, &dgate),
            ("up", &up, &dup),
            ("down", &down, &ddown),
        ];
        assert_gradients("mlp", &leaves, &theirs, UNITS);
    }
}
