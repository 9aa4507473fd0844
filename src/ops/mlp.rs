//! The gated feed-forward block of a transformer in one call:
//! `y = (act(x Wgᵀ + bg) * (x Wuᵀ + bu)) Wdᵀ + bd`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32; the activated intermediate is rounded to the dtype of `x` in the workspace, which is all the
//! scratch memory the call needs. On the CPU gate and up are never stored; on CUDA they pass through the workspace too, rounded.

use std::ops::RangeInclusive;

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ops::Implementation;
use crate::ops::check::Arg;
use crate::ops::linear::{self, Output, Weights, WeightsProblem};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::tensor::{RawTensor, TensorRef, Workspace};

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
    /// At least [`workspace_size`] bytes.
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

/// Validated arguments; packed weights have become their two halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub x: RawTensor,
    pub gate: WeightsProblem,
    pub up: WeightsProblem,
    pub activation: Activation,
    pub down: WeightsProblem,
    pub residual: Option<RawTensor>,
    pub out: RawTensor,
    pub intermediate: usize,
}

impl Params<'_> {
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
        self.output
            .check(OP, arg, &linear::with_columns(&x, down.out_features()))?;
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

    /// Checks data and workspace; gives as many intermediates of it, one below the other, as it has room for and are of use.
    fn check_data(&self, p: &Problem, rows: RangeInclusive<usize>) -> Result<RawTensor> {
        let mut inputs = vec![Arg::new(OP, "x", &p.x).data()?];
        let mut tensors = Vec::new();
        match &self.gate_up {
            GateUp::Apart { gate, up } => {
                tensors.push(("gate_weight", Some(gate.weight.raw())));
                tensors.push(("gate_bias", gate.bias.as_ref().map(TensorRef::raw)));
                tensors.push(("up_weight", Some(up.weight.raw())));
                tensors.push(("up_bias", up.bias.as_ref().map(TensorRef::raw)));
            }
            GateUp::Packed { weights, .. } => {
                tensors.push(("gate_up_weight", Some(weights.weight.raw())));
                tensors.push(("gate_up_bias", weights.bias.as_ref().map(TensorRef::raw)));
            }
        }
        tensors.push(("down_weight", Some(p.down.weight)));
        tensors.push(("down_bias", p.down.bias));
        for (name, tensor) in &tensors {
            if let Some(tensor) = tensor {
                inputs.push(Arg::new(OP, name, tensor).data()?);
            }
        }
        self.output.check_data(OP, &inputs)?;
        let row = p.intermediate * p.x.dtype.size();
        let ptr = self.workspace.check(OP, rows.start() * row)?;
        let room = self.workspace.size().checked_div(row).unwrap_or(0);
        let scratch = RawTensor {
            ptr,
            dtype: p.x.dtype,
            layout: Layout::contiguous(&[room.clamp(*rows.start(), *rows.end()), p.intermediate])?,
        };
        let workspace = Arg::new(OP, "workspace", &scratch);
        for input in inputs {
            workspace.disjoint(input)?;
        }
        workspace.disjoint(Arg::new(OP, "out", &p.out))?;
        if let Some(residual) = &p.residual {
            workspace.disjoint(Arg::new(OP, "residual", residual))?;
        }
        Ok(scratch)
    }
}

impl GateUp<'_> {
    fn problem(&self, hidden: usize) -> Result<(WeightsProblem, WeightsProblem)> {
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
                    let problem = format!("has {rows} rows, an even number is needed");
                    return Err(Error::invalid(OP, names.0, problem));
                }
                let dim = rows / 2;
                let half = |start: usize| -> Result<WeightsProblem> {
                    let part = |t: TensorRef<'_>| t.narrowed(0, start * dim, dim).map(|t| t.raw());
                    Ok(WeightsProblem {
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

/// The implementation, and how many rows of intermediates it needs and has use for.
fn choose(ctx: &Context, problem: &Problem) -> Result<(Implementation, RangeInclusive<usize>)> {
    let rows = problem.x.layout.num_rows();
    let (implementation, most) = match ctx.device() {
        Device::Cpu(_) => (Implementation::Cpu, rows),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            crate::cuda::mlp::supported(problem)?;
            let most = crate::cuda::mlp::most_rows(cuda, problem);
            (Implementation::Cuda, most)
        }
    };
    let intermediate = problem.intermediate;
    Layout::contiguous(&[most, intermediate]).map_err(|_| {
        let problem = format!("has {rows} rows, too many for an intermediate of {intermediate}");
        Error::invalid(OP, "x", problem)
    })?;
    Ok((implementation, rows..=most))
}

/// Which implementation [`forward`] would run with these arguments. Data pointers and the workspace are not looked at.
///
/// # Errors
/// Why there is none.
pub fn supported(ctx: &Context, params: &Params<'_>) -> Result<Implementation> {
    let (implementation, _) = choose(ctx, &params.problem()?)?;
    Ok(implementation)
}

/// The workspace that [`forward`] needs, in bytes: one intermediate, `tokens * intermediate` elements of the dtype of `x`. A larger one
/// is of use on CUDA: with room for two intermediates of up to 512 tokens, what cuBLAS multiplies reads every weight once, and once
/// for each half of the tokens otherwise. Data pointers and the workspace are not looked at.
///
/// # Errors
/// As [`supported`].
pub fn workspace_size(ctx: &Context, params: &Params<'_>) -> Result<usize> {
    let problem = params.problem()?;
    let (_, rows) = choose(ctx, &problem)?;
    Ok(rows.start() * problem.intermediate * problem.x.dtype.size())
}

/// Computes the block on `stream`. Does not allocate device memory or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    let (_, rows) = choose(ctx, &problem)?;
    let scratch = params.check_data(&problem, rows)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::mlp::forward(cpu, &problem, scratch),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::mlp::forward(cuda, &problem, scratch, stream)?,
    }
    Ok(())
}
