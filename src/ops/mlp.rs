//! The gated feed-forward block of a transformer in one call:
//! `y = (act(x Wgᵀ + bg) * (x Wuᵀ + bu)) Wdᵀ + bd`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32; the activated intermediate is rounded to the dtype of `x` in the workspace, which is all the
//! scratch memory the call needs. On the CPU gate and up are never stored; on CUDA they pass through the workspace too, rounded, and
//! products have use for a workspace as in [`super::linear`], which may lie behind the intermediate.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::Implementation;
use crate::ops::check::{Arg, with_last};
use crate::ops::linear::{Output, Weights, WeightsProblem};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::tensor::{RawTensor, Scratch, TensorRef, Workspace};

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
        let mut room = [0; MAX_RANK];
        self.output
            .check(OP, arg, with_last(&x, down.out_features(), &mut room))?;
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

    /// Checks data, and that it does not overlap the workspace.
    fn check_data(&self, p: &Problem, room: &Room) -> Result<()> {
        // Of packed layers there is one; the other is then checked once more.
        let (first, second) = match &self.gate_up {
            GateUp::Apart { gate, up } => (
                (gate, "gate_weight", "gate_bias"),
                (up, "up_weight", "up_bias"),
            ),
            GateUp::Packed { weights, .. } => {
                let packed = (weights, "gate_up_weight", "gate_up_bias");
                (packed, packed)
            }
        };
        let layers = [first, second, (&self.down, "down_weight", "down_bias")];
        let x = Arg::new(OP, "x", &p.x).data()?;
        let tensors = layers.map(|(layer, weight, bias)| {
            let weight = (weight, layer.weight.raw());
            let bias = layer.bias.as_ref().map(|b| (bias, b.raw()));
            [weight, bias.unwrap_or(weight)]
        });
        let mut inputs = [x; 7];
        for (input, (name, tensor)) in inputs[1..].iter_mut().zip(tensors.as_flattened()) {
            *input = Arg::new(OP, name, tensor).data()?;
        }
        self.output.check_data(OP, &inputs)?;
        for memory in [room.rows, room.products.raw()?] {
            let workspace = Arg::new(OP, "workspace", &memory);
            for input in inputs {
                workspace.disjoint(input)?;
            }
            workspace.disjoint(Arg::new(OP, "out", &p.out))?;
            if let Some(residual) = &p.residual {
                workspace.disjoint(Arg::new(OP, "residual", residual))?;
            }
        }
        Ok(())
    }
}

/// What a workspace has room for.
struct Room {
    /// Intermediates, one below the other: as many rows as it has room for and are of use.
    rows: RawTensor,
    /// What is left for products.
    products: Scratch,
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

/// What the implementation asks of a workspace.
struct Needs {
    implementation: Implementation,
    /// Rows of one intermediate, which it needs.
    rows: usize,
    /// Bytes of a row.
    row: usize,
}

impl Needs {
    fn new(ctx: &Context, problem: &Problem) -> Result<Needs> {
        let rows = problem.x.layout.num_rows();
        let implementation = match ctx.device() {
            Device::Cpu(_) => Implementation::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                crate::cuda::mlp::supported(problem)?;
                Implementation::Cuda
            }
        };
        let intermediate = problem.intermediate;
        // Whatever is of use beside: twice as many rows, a workspace for products.
        let most = rows.saturating_mul(2);
        Layout::contiguous(&[most, intermediate]).map_err(|_| {
            let problem =
                format!("has {rows} rows, too many for an intermediate of {intermediate}");
            Error::invalid(OP, "x", problem)
        })?;
        Ok(Needs {
            implementation,
            rows,
            row: intermediate * problem.x.dtype.size(),
        })
    }

    /// Bytes of the intermediate.
    fn intermediate(&self) -> usize {
        self.rows * self.row
    }

    /// Bytes of the intermediate and of a workspace for products behind it.
    fn with(&self, products: usize) -> usize {
        match products {
            0 => self.intermediate(),
            _ => aligned(self.intermediate()) + products,
        }
    }

    /// Divides a workspace: beside a workspace for products, as many rows of intermediates as there is room for and are of use.
    fn room(&self, ctx: &Context, problem: &Problem, workspace: &Workspace<'_>) -> Result<Room> {
        let ptr = workspace.check(OP, self.intermediate())?;
        let given = workspace.size();
        let products = match given > aligned(self.intermediate()) {
            true => products_size(ctx, problem)?,
            false => 0,
        };
        let with = products > 0 && given >= self.with(products);
        let left = if with { given - products } else { given };
        let left = left / Workspace::ALIGNMENT * Workspace::ALIGNMENT;
        let rows = left.checked_div(self.row).unwrap_or(0);
        let rows = rows.clamp(self.rows, most_rows(ctx, problem, with));
        let offset = aligned(rows * self.row);
        Ok(Room {
            rows: RawTensor {
                ptr,
                dtype: problem.x.dtype,
                layout: Layout::contiguous(&[rows, problem.intermediate])?,
            },
            products: match with {
                true => Scratch {
                    ptr: ptr.wrapping_add(offset),
                    size: products,
                },
                false => Scratch::NONE,
            },
        })
    }
}

/// Rounds up to the alignment of a workspace.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Workspace::ALIGNMENT)
}

/// The workspace that products have use for, in bytes.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn products_size(ctx: &Context, problem: &Problem) -> Result<usize> {
    match ctx.device() {
        Device::Cpu(_) => Ok(0),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::mlp::products_size(cuda, problem),
    }
}

/// Rows of intermediates that are of use, beside a workspace for products or without one.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn most_rows(ctx: &Context, problem: &Problem, with_workspace: bool) -> usize {
    match ctx.device() {
        Device::Cpu(_) => problem.x.layout.num_rows(),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::mlp::most_rows(cuda, problem, with_workspace),
    }
}

/// Which implementation [`forward`] would run with these arguments. Data pointers and the workspace are not looked at.
///
/// # Errors
/// Why there is none.
pub fn supported(ctx: &Context, params: &Params<'_>) -> Result<Implementation> {
    Ok(Needs::new(ctx, &params.problem()?)?.implementation)
}

/// The workspace for [`forward`], in bytes: one intermediate, `tokens * intermediate` elements of the dtype of `x`, which is needed; and on
/// CUDA, where products have use for one, a workspace as [`linear::workspace_size`](super::linear::workspace_size) asks for, behind the
/// intermediate rounded up to 256 bytes, without which the block is computed as well. A larger one is of use on CUDA too: with room for two
/// intermediates of up to 512 tokens, what cuBLAS multiplies reads every weight once, and once for each half of the tokens otherwise.
/// More tokens may ask for less. Data pointers and the workspace are not looked at.
///
/// # Errors
/// As [`supported`].
pub fn workspace_size(ctx: &Context, params: &Params<'_>) -> Result<usize> {
    let problem = params.problem()?;
    let needs = Needs::new(ctx, &problem)?;
    Ok(needs.with(products_size(ctx, &problem)?))
}

/// Computes the block on `stream`. Does not allocate device memory or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    let needs = Needs::new(ctx, &problem)?;
    let room = needs.room(ctx, &problem, &params.workspace)?;
    params.check_data(&problem, &room)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::mlp::forward(cpu, &problem, room.rows),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            crate::cuda::mlp::forward(cuda, &problem, room.rows, room.products, stream)?;
        }
    }
    Ok(())
}
