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

/// What a plain implementation, which computes in f32, keeps in memory in a dtype.
#[derive(Clone, Copy, Debug)]
pub enum Plain {
    /// The activated intermediate.
    Activated(DType),
    /// The gate before it, too.
    GateAndActivated(DType),
    /// Gate and up before it, too.
    Everything(DType),
}

/// The block in f64, or as a plain implementation has it.
pub fn mlp(
    x: &[f64],
    layers: &Layers,
    (rows, hidden, intermediate): (usize, usize, usize),
    activation: Activation,
    residual: Option<&[f64]>,
    plain: Option<Plain>,
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
    let rounded = |mut values: Vec<f64>, to: Option<DType>| {
        if let Some(dtype) = to {
            for v in &mut values {
                *v = round_to(dtype, *v);
            }
        }
        values
    };
    let [of_gate, of_up, activated] = match plain {
        None => [None; 3],
        Some(Plain::Activated(dtype)) => [None, None, Some(dtype)],
        Some(Plain::GateAndActivated(dtype)) => [Some(dtype), None, Some(dtype)],
        Some(Plain::Everything(dtype)) => [Some(dtype); 3],
    };
    let shape = (hidden, intermediate);
    let gate = rounded(product(x, &layers.gate, shape, None), of_gate);
    let up = rounded(product(x, &layers.up, shape, None), of_up);
    let middle = rounded(swiglu::swiglu(&gate, &up, activation), activated);
    product(&middle, &layers.down, (intermediate, hidden), residual)
}
