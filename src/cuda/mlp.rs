//! The gated feed-forward block on the GPU, in the memory of one intermediate.
//!
//! Kernels of this library multiply what they compute of up by the activated gate, which lies where the intermediate will: that needs
//! no other memory. cuBLASLt cannot, so where it serves, columns are done half by half of what is left: gate and up of the one half
//! side by side in the workspace, then their activated product in place of the gate. The last columns are done without it.

use super::linear::{self, Epilogue, Product};
use super::{Cuda, swiglu};
use crate::context::Stream;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::linear::{WeightsProblem, with_columns};
use crate::ops::mlp::Problem;
use crate::ops::swiglu::Problem as Activated;
use crate::tensor::RawTensor;

const OP: &str = "mlp";

/// Whether there are kernels for the problem.
pub(crate) fn supported(p: &Problem) -> Result<()> {
    linear::fits(OP, ("x", &p.x), ("gate_weight", &p.gate.weight))?;
    linear::fits(OP, ("x", &p.x), ("down_weight", &p.down.weight))
}

pub(crate) fn forward(
    cuda: &Cuda,
    p: &Problem,
    intermediate: RawTensor,
    stream: Stream,
) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    let product = |x: &RawTensor, weights: &WeightsProblem, epilogue: Epilogue, out: &RawTensor| {
        let product = Product {
            op: OP,
            x,
            weights,
            epilogue,
            out,
        };
        linear::multiply(cuda, &product, stream)
    };
    let intermediate = RawTensor {
        layout: Layout::contiguous(&with_columns(&p.x, p.intermediate))?,
        ..intermediate
    };
    let last = p.x.layout.rank() - 1;
    let mut first = 0;
    while let Some(columns) = half(cuda, p, p.intermediate - first) {
        let gate = intermediate.narrowed(last, first, columns)?;
        let up = intermediate.narrowed(last, first + columns, columns)?;
        product(
            &p.x,
            &part(&p.gate, first, columns)?,
            Epilogue::Store,
            &gate,
        )?;
        product(&p.x, &part(&p.up, first, columns)?, Epilogue::Store, &up)?;
        let activated = Activated {
            gate,
            up,
            out: gate,
            activation: p.activation,
        };
        swiglu::forward(cuda, &activated, stream).map_err(|e| e.within(OP))?;
        first += columns;
    }
    let columns = p.intermediate - first;
    let rest = intermediate.narrowed(last, first, columns)?;
    product(
        &p.x,
        &part(&p.gate, first, columns)?,
        Epilogue::Store,
        &rest,
    )?;
    let gated = Epilogue::Gate(rest, p.activation);
    product(&p.x, &part(&p.up, first, columns)?, gated, &rest)?;
    let epilogue = p.residual.map_or(Epilogue::Store, Epilogue::Add);
    product(&intermediate, &p.down, epilogue, &p.out)
}

/// Of `left` columns, those to be done through the library and an activation of their own; none where that gains nothing.
fn half(cuda: &Cuda, p: &Problem, left: usize) -> Option<usize> {
    /// Columns begin at multiples of this, so that they stay aligned.
    const STEP: usize = 64;
    /// Fewer are as fast without the library.
    const LEAST: usize = 640;
    let columns = left / 2 / STEP * STEP;
    let gains = cuda.linear.serves_many(p.x.dtype, p.gate.weight.dtype)
        && p.x.layout.num_rows() > linear::moderate_rows(p.x.dtype)
        && columns >= LEAST;
    gains.then_some(columns)
}

/// Some of a layer's output columns.
fn part(weights: &WeightsProblem, first: usize, columns: usize) -> Result<WeightsProblem> {
    let bias = weights.bias.map(|bias| bias.narrowed(0, first, columns));
    Ok(WeightsProblem {
        weight: weights.weight.narrowed(0, first, columns)?,
        bias: bias.transpose()?,
    })
}
