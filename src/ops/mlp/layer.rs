//! The block's weights once they are checked, and the parts that forward and backward share.

use arrayvec::ArrayVec;

use super::GateUp;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::linear;
use crate::ops::parts::{Names, Parts};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::problem::{linear as problem, swiglu};
use crate::tensor::RawTensor;

/// A product that gives gate, up or both.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    pub weights: problem::Weights,
    /// Columns that it gives of gate and up side by side, in intermediate dimensions.
    pub columns: std::ops::Range<usize>,
    pub names: Names,
}

/// The weights of a block.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// One, or gate and up.
    pub projections: ArrayVec<Projection, 2>,
    /// Of gate and up side by side.
    pub order: GateOrder,
    pub activation: Activation,
    pub down: problem::Weights,
    pub intermediate: usize,
}

const OF_GATE: Names = &[("weight", "gate_weight"), ("bias", "gate_bias")];
const OF_UP: Names = &[("weight", "up_weight"), ("bias", "up_bias")];
const OF_GATE_UP: Names = &[("weight", "gate_up_weight"), ("bias", "gate_up_bias")];
pub(super) const OF_DOWN: Names = &[("weight", "down_weight"), ("bias", "down_bias")];
/// Their tensors are the workspace's.
const OF_ACTIVATION: Names = &[("gate", "x"), ("gate_up", "x")];

impl Layer {
    /// Checks weights and biases for an input `x`, which is checked.
    pub fn new(
        op: &'static str,
        x: &RawTensor,
        gate_up: &GateUp<'_>,
        activation: Activation,
        down: &linear::Weights<'_>,
    ) -> Result<Layer> {
        let hidden = x.layout.dim(x.layout.rank() - 1);
        let (projections, order) = match gate_up {
            GateUp::Apart { gate, up } => {
                let gate = gate.problem(op, ("gate_weight", "gate_bias"), hidden)?;
                let up = up.problem(op, ("up_weight", "up_bias"), hidden)?;
                let like = Arg::new(op, "gate_weight", &gate.weight);
                Arg::new(op, "up_weight", &up.weight).shape_of(like)?;
                let [of_gate, of_up] = [&gate, &up].map(|w| w.weight.dtype);
                if of_gate.is_of_integers() != of_up.is_of_integers() {
                    let problem = text!(
                        "has dtype {of_up}, gate_weight has {of_gate}: both are i8 or ternary, or none"
                    );
                    return Err(Error::unsupported(op, "up_weight", problem));
                }
                let one = |weights, start, names| Projection {
                    weights,
                    columns: start..start + 1,
                    names,
                };
                let both = [one(gate, 0, OF_GATE), one(up, 1, OF_UP)];
                (ArrayVec::from(both), GateOrder::GateFirst)
            }
            GateUp::Packed { weights, order } => {
                let names = ("gate_up_weight", "gate_up_bias");
                let weights = weights.problem(op, names, hidden)?;
                let rows = weights.out_features();
                if !rows.is_multiple_of(2) {
                    let problem = text!("has {rows} rows, an even number is needed");
                    return Err(Error::invalid(op, names.0, problem));
                }
                let both = Projection {
                    weights,
                    columns: 0..2,
                    names: OF_GATE_UP,
                };
                (ArrayVec::from_iter([both]), *order)
            }
        };
        let rows: usize = projections.iter().map(|p| p.weights.out_features()).sum();
        let intermediate = rows / 2;
        let down = down.problem(op, ("down_weight", "down_bias"), intermediate)?;
        // An implementation may have use for two intermediates.
        let tokens = x.layout.num_rows();
        Layout::contiguous(&[tokens.saturating_mul(2), intermediate]).map_err(|_| {
            let problem =
                text!("has {tokens} rows, too many for an intermediate of {intermediate}");
            Error::invalid(op, "x", problem)
        })?;
        Ok(Layer {
            projections,
            order,
            activation,
            down,
            intermediate,
        })
    }

    /// The weights of gate and of up, whether or not they are one matrix.
    pub fn halves(&self) -> Result<[problem::Weights; 2]> {
        if let [gate, up] = &self.projections[..] {
            return Ok([gate.weights, up.weights]);
        }
        let both = self.projections[0].weights;
        let half = |start: usize| -> Result<problem::Weights> {
            let part = |t: RawTensor| t.narrowed(0, start * self.intermediate, self.intermediate);
            let scales = both.scales.map(|scales| {
                let rows = both.out_features();
                scales.of_rows(rows, start * self.intermediate, self.intermediate)
            });
            Ok(problem::Weights {
                weight: part(both.weight)?,
                scales: scales.transpose()?,
                bias: both.bias.map(part).transpose()?,
                ..both
            })
        };
        let (gate, up) = self.order.offsets();
        Ok([half(gate)?, half(up)?])
    }

    /// Checks gate and up as the forward keeps them.
    pub fn check_kept(
        &self,
        op: &'static str,
        name: &'static str,
        x: &RawTensor,
        kept: &RawTensor,
    ) -> Result<()> {
        let mut room = [0; MAX_RANK];
        Arg::new(op, name, kept)
            .dtype_of(Arg::new(op, "x", x))?
            .shape(with_last(x, 2 * self.intermediate, &mut room))?
            .contiguous()?;
        Ok(())
    }

    /// Room for a tensor with the leading dimensions of `x`.
    pub fn take<const N: usize>(
        &self,
        parts: &mut Parts<N>,
        x: &RawTensor,
        columns: usize,
    ) -> Result<RawTensor> {
        let taken = parts.take(x.dtype, [x.layout.num_rows(), columns])?;
        let mut room = [0; MAX_RANK];
        let layout = Layout::contiguous(with_last(x, columns, &mut room))?;
        Ok(RawTensor { layout, ..taken })
    }

    /// The part of gate and up side by side that a projection gives.
    pub fn columns(
        &self,
        gate_up: &RawTensor,
        columns: &std::ops::Range<usize>,
    ) -> Result<RawTensor> {
        let last = gate_up.layout.rank() - 1;
        let (start, len) = (columns.start, columns.len());
        gate_up.narrowed(last, start * self.intermediate, len * self.intermediate)
    }

    /// Adds the products that give gate and up.
    pub fn push_gate_up<const N: usize>(
        &self,
        parts: &mut Parts<N>,
        x: RawTensor,
        gate_up: &RawTensor,
    ) -> Result<()> {
        for projection in &self.projections {
            let product = problem::Problem {
                norm: None,
                x,
                weights: projection.weights,
                residual: None,
                out: self.columns(gate_up, &projection.columns)?,
            };
            parts.push(Ok(product), projection.names)?;
        }
        Ok(())
    }

    /// Gate and up of the two side by side.
    pub fn gate_and_up(&self, gate_up: &RawTensor) -> Result<[RawTensor; 2]> {
        let (gate, up) = self.order.offsets();
        Ok([
            self.columns(gate_up, &(gate..gate + 1))?,
            self.columns(gate_up, &(up..up + 1))?,
        ])
    }

    /// Adds the activation.
    pub fn push_activation<const N: usize>(
        &self,
        parts: &mut Parts<N>,
        gate_up: &RawTensor,
        out: RawTensor,
    ) -> Result<()> {
        let [gate, up] = self.gate_and_up(gate_up)?;
        let activation = swiglu::Problem {
            gate,
            up,
            out,
            activation: self.activation,
        };
        parts.push(Ok(activation), OF_ACTIVATION)
    }
}
