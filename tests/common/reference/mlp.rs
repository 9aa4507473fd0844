//! The gated feed-forward block from its definition.

use unsloth::DType;
use unsloth::ops::swiglu::Activation;

use super::{linear, swiglu};
use crate::common::head::magnitudes;
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

impl Layers {
    /// Of each number. Multiplied, they say how great what adds up to a result may be.
    pub fn magnitudes(&self) -> Layers {
        let of_layer = |layer: &Layer| Layer {
            weight: magnitudes(&layer.weight),
            bias: layer.bias.as_deref().map(magnitudes),
        };
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(of_layer);
        Layers { gate, up, down }
    }
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

/// Gradients of a matrix and its bias.
pub type LayerGradients = linear::Gradients;

/// Gradients of a block: of its input, and of gate, up and down (whose `dx` are those of what they
/// multiply).
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dx: Vec<f64>,
    pub gate: LayerGradients,
    pub up: LayerGradients,
    pub down: LayerGradients,
}

/// How gradients are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arithmetic {
    /// In f64.
    Exact,
    /// In f32, what passes between products rounded to a dtype. The input's gradient is the sum of two
    /// products, the first of which is rounded, if weights are apart.
    Plain { dtype: DType, apart: bool },
    /// In f64 of magnitudes: bounds of the sums of the last products' terms.
    Magnitudes,
}

/// The gradients of the block for that of its output, `hidden_out` columns wide.
pub fn mlp_backward(
    dout: &[f64],
    x: &[f64],
    layers: &Layers,
    (rows, hidden, intermediate, hidden_out): (usize, usize, usize, usize),
    activation: Activation,
    arithmetic: Arithmetic,
) -> Gradients {
    let round = |mut values: Vec<f64>| {
        match arithmetic {
            Arithmetic::Plain { dtype, .. } => {
                values.iter_mut().for_each(|v| *v = round_to(dtype, *v));
            }
            Arithmetic::Magnitudes => values.iter_mut().for_each(|v| *v = v.abs()),
            Arithmetic::Exact => {}
        }
        values
    };
    let plain = matches!(arithmetic, Arithmetic::Plain { .. });
    let forward = |layer: &Layer| {
        let f = if plain {
            linear::linear_f32
        } else {
            linear::linear
        };
        let sizes = (rows, hidden, intermediate);
        f(x, &layer.weight, sizes, layer.bias.as_deref(), None)
    };
    let backward = |dout: &[f64], x: &[f64], layer: &Layer, sizes| match arithmetic {
        Arithmetic::Exact => linear::linear_backward(dout, x, &layer.weight, sizes),
        Arithmetic::Plain { .. } => linear::linear_backward_f32(dout, x, &layer.weight, sizes),
        Arithmetic::Magnitudes => {
            let magnitudes = |t: &[f64]| t.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let [dout, x, weight] = [dout, x, &layer.weight].map(magnitudes);
            linear::linear_backward(&dout, &x, &weight, sizes)
        }
    };
    let rounded = |values: Vec<f64>| if plain { round(values) } else { values };
    let (gate, up) = (rounded(forward(&layers.gate)), rounded(forward(&layers.up)));
    let activated = rounded(swiglu::swiglu(&gate, &up, activation));
    let down = backward(
        dout,
        &activated,
        &layers.down,
        (rows, intermediate, hidden_out),
    );
    let dactivated = rounded(down.dx.clone());
    let with = |f: &dyn Fn(usize) -> f64| round((0..gate.len()).map(f).collect());
    let dgate = with(&|i| dactivated[i] * up[i] * swiglu::derivative(gate[i], activation));
    let dup = with(&|i| dactivated[i] * swiglu::activate(gate[i], activation));
    let gate = backward(&dgate, x, &layers.gate, (rows, hidden, intermediate));
    let up = backward(&dup, x, &layers.up, (rows, hidden, intermediate));
    let of_gate = match arithmetic {
        Arithmetic::Plain { apart: true, .. } => round(gate.dx.clone()),
        _ => gate.dx.clone(),
    };
    let dx = of_gate.iter().zip(&up.dx).map(|(a, b)| a + b).collect();
    Gradients { dx, gate, up, down }
}
