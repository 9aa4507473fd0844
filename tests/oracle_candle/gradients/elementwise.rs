//! Rotation and gated activations.

use candle_core::{Result, Tensor};
use candle_nn::rotary_emb::{rope_i_slow, rope_slow};
use unsloth::ops::rope::{self, Rotation, Style};
use unsloth::ops::swiglu::backward::{Dout, Params, Tensors};
use unsloth::ops::swiglu::{self, Activation};
use unsloth::{DType, InOut, Stream};

use super::{Leaf, assert_gradients, gradients};
use crate::candle_llama::Places;
use crate::common::{contexts, for_each_case};
use crate::normal;

const UNITS: f64 = 8.0;

#[test]
fn rope() {
    let (batch, seq, heads, dim) = (2, 9, 3, 64);
    let shape = [batch, seq, heads, dim];
    for ctx in contexts() {
        for_each_case(&[Style::HalfSplit, Style::Interleaved], |&style| {
            let x = Leaf::normal(&ctx, &shape);
            let dout = normal(DType::F32, &shape);
            let ours = dout.upload(&ctx);
            let mut dx = x.gradient(&ctx);
            let params = rope::Params {
                q: Some(InOut::Apart {
                    input: ours.view(),
                    output: dx.view_mut(),
                }),
                rotation: Rotation {
                    style,
                    ..Rotation::default()
                },
                inverse: true,
                ..rope::Params::default()
            };
            rope::forward(&ctx, &params, Stream::DEFAULT).unwrap();

            let places = Places::new(batch, seq, dim).unwrap();
            let slow = match style {
                Style::Interleaved => rope_i_slow,
                _ => rope_slow,
            };
            let y = || {
                let heads_first = x.theirs.transpose(1, 2)?;
                slow(&heads_first, &places.cos, &places.sin)?.transpose(1, 2)
            };
            let theirs = gradients(&[(y(), &dout)]);
            assert_gradients("rope", &[("x", &x, &dx)], &theirs, UNITS);
        });
    }
}

/// Of functions whose gradients candle has as exactly as theirs: those of its GELUs have constants
/// of six digits.
fn activated(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => x.silu(),
        Activation::ReluSquared => x.relu()?.sqr(),
        Activation::Gelu => x * (((x / 2f64.sqrt())?.erf()? + 1.0)? * 0.5)?,
        Activation::GeluTanh => {
            let inner = ((x + (x.sqr()? * x)? * 0.044715)? * (2.0 / std::f64::consts::PI).sqrt())?;
            x * ((inner.tanh()? + 1.0)? * 0.5)?
        }
        other => panic!("{other:?} has no formula here"),
    }
}

#[test]
fn swiglu() {
    let activations = [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::ReluSquared,
    ];
    for ctx in contexts() {
        for_each_case(&activations, |&activation| {
            let [gate, up] = [0, 1].map(|_| Leaf::normal(&ctx, &[5, 130]));
            let dout = normal(DType::F32, &[5, 130]);
            let ours = dout.upload(&ctx);
            let mut dgate = gate.gradient(&ctx);
            let mut dup = up.gradient(&ctx);
            let params = Params {
                tensors: Tensors::Apart {
                    gate: InOut::Apart {
                        input: gate.ours.view(),
                        output: dgate.view_mut(),
                    },
                    up: InOut::Apart {
                        input: up.ours.view(),
                        output: dup.view_mut(),
                    },
                },
                dout: Dout::Only(ours.view()),
                activation,
            };
            swiglu::backward(&ctx, &params, Stream::DEFAULT).unwrap();

            let y = activated(activation, &gate.theirs).and_then(|act| act * &*up.theirs);
            let theirs = gradients(&[(y, &dout)]);
            assert_gradients(
                "swiglu",
                &[("gate", &gate, &dgate), ("up", &up, &dup)],
                &theirs,
                UNITS,
            );
        });
    }
}
