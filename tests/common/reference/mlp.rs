//! The gated feed-forward block from its definition.

use unsloth::DType;
use unsloth::ops::swiglu::Activation;

use super::{linear, swiglu};
use crate::common::tensor::round_to;

/// A matrix of `rows` outputs, and its bias.
#[derive(Clone, Debug)]
pub struct Layer {
    pub weight: Vec<f64>,
    pub bias: Option<Vec<f64>>,
}

/// Gate, up and down.
#[derive(Clone, Debug)]
pub struct Layers {
    pub gate: Layer,
    pub up: Layer,
    pub down: Layer,
}

/// The block in f64, or, with a dtype, in f32 with the intermediate rounded to that dtype.
pub fn mlp(
    x: &[f64],
    layers: &Layers,
    (rows, hidden, intermediate): (usize, usize, usize),
    activation: Activation,
    residual: Option<&[f64]>,
    plain: Option<DType>,
) -> Vec<f64> {
    let product = |x: &[f64], layer: &Layer, (depth, columns), residual: Option<&[f64]>| {
        let f = if plain.is_some() {
            linear::linear_f32
        } else {
            linear::linear
        };
        f(
            x,
            &layer.weight,
            (rows, depth, columns),
            layer.bias.as_deref(),
            residual,
        )
    };
    let gate = product(x, &layers.gate, (hidden, intermediate), None);
    let up = product(x, &layers.up, (hidden, intermediate), None);
    let mut middle = swiglu::swiglu(&gate, &up, activation);
    if let Some(dtype) = plain {
        for m in &mut middle {
            *m = round_to(dtype, *m);
        }
    }
    product(&middle, &layers.down, (intermediate, hidden), residual)
}
