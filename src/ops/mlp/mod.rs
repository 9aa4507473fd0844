//! The gated feed-forward block of a transformer in one call:
//! `y = (act(x Wgᵀ + bg) * (x Wuᵀ + bu)) Wdᵀ + bd`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32; the activated intermediate is rounded to the dtype of `x` in the
//! workspace, which is all the scratch memory that the call needs. On the CPU gate and up are never
//! stored. On CUDA they pass through the workspace too, rounded, and the call is faster with room
//! for two intermediates, and for what products have use for as in [`super::linear`].

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::linear::{Output, Weights};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::problem::{linear, mlp::Problem};
use crate::tensor::{TensorRef, Workspace};

const OP: &str = "mlp";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., hidden]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// The projections to the intermediate dimension.
    pub gate_up: GateUp<'a>,
    /// Applied to the gate.
    pub activation: Activation,
    /// The projection back, `[hidden_out, intermediate]`; usually `hidden_out` is `hidden`.
    pub down: Weights<'a>,
    /// `[.., hidden_out]`: leading dimensions and dtype of `x`.
    pub output: Output<'a>,
    /// At least one intermediate; better [`workspace_size`] bytes.
    pub workspace: Workspace<'a>,
}

/// Gate and up projections.
#[expect(
    clippy::large_enum_variant,
    reason = "one value on the stack of a call; boxing would allocate"
)]
#[derive(Clone, Copy, Debug)]
pub enum GateUp<'a> {
    /// Two matrices, `[intermediate, hidden]` each.
    Apart {
        /// Its product passes the activation.
        gate: Weights<'a>,
        /// Its product multiplies the activated gate.
        up: Weights<'a>,
    },
    /// One matrix `[2 * intermediate, hidden]` with both.
    Packed {
        /// The matrix and its bias `[2 * intermediate]`.
        weights: Weights<'a>,
        /// Which half of the rows is which.
        order: GateOrder,
    },
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let x = self.x.raw();
        let arg = Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let hidden = x.layout.dim(x.layout.rank() - 1);
        let (gate, up) = self.gate_up.problem(hidden)?;
        let intermediate = gate.out_features();
        let down = self
            .down
            .problem(OP, ("down_weight", "down_bias"), intermediate)?;
        let mut room = [0; MAX_RANK];
        self.output
            .check(OP, arg, with_last(&x, down.out_features(), &mut room))?;
        // An implementation may have use for two intermediates.
        let rows = x.layout.num_rows();
        Layout::contiguous(&[rows.saturating_mul(2), intermediate]).map_err(|_| {
            let problem = text!("has {rows} rows, too many for an intermediate of {intermediate}");
            Error::invalid(OP, "x", problem)
        })?;
        Ok(Problem {
            x,
            gate,
            up,
            activation: self.activation,
            down,
            residual: self.output.residual(),
            out: self.output.out(),
            intermediate,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        match &self.gate_up {
            GateUp::Apart { gate, up } => {
                gate.tensors(("gate_weight", "gate_bias"), tensors);
                up.tensors(("up_weight", "up_bias"), tensors);
            }
            GateUp::Packed { weights, .. } => {
                weights.tensors(("gate_up_weight", "gate_up_bias"), tensors);
            }
        }
        self.down.tensors(("down_weight", "down_bias"), tensors);
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

impl GateUp<'_> {
    fn problem(&self, hidden: usize) -> Result<(linear::Weights, linear::Weights)> {
        match self {
            GateUp::Apart { gate, up } => {
                let gate = gate.problem(OP, ("gate_weight", "gate_bias"), hidden)?;
                let up = up.problem(OP, ("up_weight", "up_bias"), hidden)?;
                Arg::new(OP, "up_weight", &up.weight).shape_of(Arg::new(
                    OP,
                    "gate_weight",
                    &gate.weight,
                ))?;
                Ok((gate, up))
            }
            GateUp::Packed { weights, order } => {
                let names = ("gate_up_weight", "gate_up_bias");
                let rows = weights.problem(OP, names, hidden)?.out_features();
                if !rows.is_multiple_of(2) {
                    let problem = text!("has {rows} rows, an even number is needed");
                    return Err(Error::invalid(OP, names.0, problem));
                }
                let dim = rows / 2;
                let half = |start: usize| -> Result<linear::Weights> {
                    let part = |t: TensorRef<'_>| t.narrowed(0, start * dim, dim).map(|t| t.raw());
                    Ok(linear::Weights {
                        weight: part(weights.weight)?,
                        bias: weights.bias.map(part).transpose()?,
                    })
                };
                let (gate, up) = order.offsets();
                Ok((half(gate)?, half(up)?))
            }
        }
    }
}

operation::functions!();
