//! RMSNorm, LayerNorm, and the norm of heads before they are rotated.

use candle_nn::ops::{layer_norm_slow, rms_norm_slow};
use candle_nn::rotary_emb::rope_slow;
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::{layer_norm, qk_norm_rope, rms_norm};
use unsloth::{DType, InOut, Stream, Workspace};

use super::{Leaf, assert_gradients, gradients};
use crate::candle_llama::Places;
use crate::common::workspace::poisoned_workspace;
use crate::common::{contexts, for_each_case};
use crate::normal;

const EPSILON: f32 = 1e-5;
const SHAPE: [usize; 2] = [7, 192];
const UNITS: f64 = 8.0;

#[test]
fn rms_norm() {
    for ctx in contexts() {
        // An offset of the gains, and whether a gradient reaches `x` beside the norm.
        for_each_case(
            &[(0.0, false), (1.0, false), (0.0, true)],
            |&(offset, beside)| {
                let (x, weight) = (Leaf::normal(&ctx, &SHAPE), Leaf::normal(&ctx, &[192]));
                let (dout, dresidual) = (normal(DType::F32, &SHAPE), normal(DType::F32, &SHAPE));
                let (ours, residual) = (dout.upload(&ctx), dresidual.upload(&ctx));
                let mut dx = x.gradient(&ctx);
                let mut dweight = weight.gradient(&ctx);
                let mut params = rms_norm::backward::Params {
                    x: x.ours.view(),
                    dout: InOut::Apart {
                        input: ours.view(),
                        output: dx.view_mut(),
                    },
                    dresidual: beside.then(|| residual.view()),
                    weight: Some(weight.ours.view()),
                    weight_offset: offset,
                    epsilon: EPSILON,
                    dweight: Some(dweight.view_mut()),
                    accumulate: false,
                    workspace: Workspace::none(),
                };
                let size = rms_norm::backward::workspace_size(&ctx, &params).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                params.workspace = workspace.workspace();
                rms_norm::backward(&ctx, &params, Stream::DEFAULT).unwrap();

                let gains = (weight.theirs.as_tensor() + f64::from(offset)).unwrap();
                let mut results = vec![(rms_norm_slow(&x.theirs, &gains, EPSILON), &dout)];
                if beside {
                    results.push((Ok(x.theirs.as_tensor().clone()), &dresidual));
                }
                let theirs = gradients(&results);
                assert_gradients(
                    "rms_norm",
                    &[("x", &x, &dx), ("weight", &weight, &dweight)],
                    &theirs,
                    UNITS,
                );
            },
        );
    }
}

#[test]
fn layer_norm() {
    for ctx in contexts() {
        let [weight, bias] = [0, 1].map(|_| Leaf::normal(&ctx, &[192]));
        let x = Leaf::normal(&ctx, &SHAPE);
        let dout = normal(DType::F32, &SHAPE);
        let ours = dout.upload(&ctx);
        let mut dx = x.gradient(&ctx);
        let mut dweight = weight.gradient(&ctx);
        let mut dbias = bias.gradient(&ctx);
        let mut params = layer_norm::backward::Params {
            x: x.ours.view(),
            dout: InOut::Apart {
                input: ours.view(),
                output: dx.view_mut(),
            },
            dresidual: None,
            weight: Some(weight.ours.view()),
            epsilon: EPSILON,
            dweight: Some(dweight.view_mut()),
            dbias: Some(dbias.view_mut()),
            accumulate: false,
            workspace: Workspace::none(),
        };
        let size = layer_norm::backward::workspace_size(&ctx, &params).unwrap();
        let mut workspace = poisoned_workspace(&ctx, size);
        params.workspace = workspace.workspace();
        layer_norm::backward(&ctx, &params, Stream::DEFAULT).unwrap();

        let y = layer_norm_slow(&x.theirs, &weight.theirs, &bias.theirs, EPSILON);
        let theirs = gradients(&[(y, &dout)]);
        let leaves = [
            ("x", &x, &dx),
            ("weight", &weight, &dweight),
            ("bias", &bias, &dbias),
        ];
        assert_gradients("layer_norm", &leaves, &theirs, UNITS);
    }
}

#[test]
fn qk_norm_rope() {
    let (batch, seq, dim) = (2, 9, 64);
    for ctx in contexts() {
        let [q, k] = [4, 2].map(|heads| Leaf::normal(&ctx, &[batch, seq, heads, dim]));
        let [q_weight, k_weight] = [0, 1].map(|_| Leaf::normal(&ctx, &[dim]));
        let [dq_out, dk_out] = [4, 2].map(|heads| normal(DType::F32, &[batch, seq, heads, dim]));
        let (of_q, of_k) = (dq_out.upload(&ctx), dk_out.upload(&ctx));
        let mut dq = q.gradient(&ctx);
        let mut dk = k.gradient(&ctx);
        let mut dq_weight = q_weight.gradient(&ctx);
        let mut dk_weight = k_weight.gradient(&ctx);
        let mut params = qk_norm_rope::backward::Params {
            q: Some(q.ours.view()),
            dq_out: Some(InOut::Apart {
                input: of_q.view(),
                output: dq.view_mut(),
            }),
            k: Some(k.ours.view()),
            dk_out: Some(InOut::Apart {
                input: of_k.view(),
                output: dk.view_mut(),
            }),
            q_weight: Some(q_weight.ours.view()),
            k_weight: Some(k_weight.ours.view()),
            weight_offset: 0.0,
            epsilon: EPSILON,
            positions: Positions::From(0),
            rotation: Rotation::default(),
            dq_weight: Some(dq_weight.view_mut()),
            dk_weight: Some(dk_weight.view_mut()),
            accumulate: false,
            workspace: Workspace::none(),
        };
        let size = qk_norm_rope::backward::workspace_size(&ctx, &params).unwrap();
        let mut workspace = poisoned_workspace(&ctx, size);
        params.workspace = workspace.workspace();
        qk_norm_rope::backward(&ctx, &params, Stream::DEFAULT).unwrap();

        let places = Places::new(batch, seq, dim).unwrap();
        let theirs = |x: &Leaf, weight: &Leaf| {
            let normed = rms_norm_slow(&x.theirs, &weight.theirs, EPSILON)?;
            rope_slow(&normed.transpose(1, 2)?, &places.cos, &places.sin)?.transpose(1, 2)
        };
        let results = [
            (theirs(&q, &q_weight), &dq_out),
            (theirs(&k, &k_weight), &dk_out),
        ];
        let leaves = [
            ("q", &q, &dq),
            ("k", &k, &dk),
            ("q_weight", &q_weight, &dq_weight),
            ("k_weight", &k_weight, &dk_weight),
        ];
        assert_gradients("qk_norm_rope", &leaves, &gradients(&results), UNITS);
    }
}
