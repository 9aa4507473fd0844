//! The gated feed-forward block of a transformer in one call:
//! `y = (act(x Wgᵀ + bg) * (x Wuᵀ + bu)) Wdᵀ + bd`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32; the activated intermediate is rounded to the dtype of `x` in
//! the workspace, which is all the scratch memory that the call needs. On the CPU gate and up are
//! never stored. On CUDA they pass through the workspace too, rounded, and the call is faster with
//! room for two intermediates, and for what products have use for as in [`super::linear`].
//!
//! For a [`backward`](fn@backward) pass gate and up can be kept ([`Params::gate_up_out`]). The call
//! is then the operations [`linear`](super::linear), [`swiglu`](super::swiglu) and `linear` one
//! after the other, and needs the whole workspace that it asks for, so that gate and up have the
//! same bits as those that a backward pass computes again.

pub mod backward;
mod layer;

pub use backward::backward;

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::Result;
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, with_last};
use crate::ops::linear::{Output, Weights};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parts::Parts;
use crate::ops::swiglu::{Activation, GateOrder};
use crate::problem::mlp::Problem;
use crate::tensor::{TensorMut, TensorRef, Workspace};
pub(crate) use layer::Layer;

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
    /// At least one intermediate; better [`workspace_size`] bytes, which `gate_up_out` needs.
    pub workspace: Workspace<'a>,
    /// Receives gate and up, biases included, for a backward pass: `[.., 2 * intermediate]`,
    /// contiguous, of the dtype of `x`. They lie as in a packed weight; from two weights, gate is
    /// first.
    pub gate_up_out: Option<TensorMut<'a>>,
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

impl<'a> Params<'a> {
    /// The block of another input, without what it writes.
    pub(crate) fn of_input(&self, x: TensorRef<'a>) -> Params<'a> {
        Params {
            x,
            gate_up: self.gate_up,
            activation: self.activation,
            down: self.down,
            output: Output::none(),
            workspace: Workspace::none(),
            gate_up_out: None,
        }
    }

    /// Weights and biases, which are read.
    pub(crate) fn weights(&self, tensors: &mut Tensors) {
        for (weights, names) in self.gate_up.weights() {
            weights.tensors(names, tensors);
        }
        self.down.tensors(("down_weight", "down_bias"), tensors);
    }

    /// Refuses weights in blocks, for what gradients follow.
    pub(crate) fn check_floats(&self, op: &'static str) -> Result<()> {
        for (weights, names) in self.gate_up.weights() {
            weights.check_floats(op, names.0)?;
        }
        self.down.check_floats(op, "down_weight")
    }

    /// Checks `x` and the weights.
    pub(crate) fn layer(&self, op: &'static str) -> Result<Layer> {
        let x = self.x.raw();
        Arg::new(op, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Layer::new(op, &x, &self.gate_up, self.activation, &self.down)
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    /// One problem of a backend's; where gate and up are kept, three or four.
    type Problem = Parts<4>;

    fn problem(&self) -> Result<Parts<4>> {
        let layer = self.layer(OP)?;
        let x = self.x.raw();
        let mut room = [0; MAX_RANK];
        let shape = with_last(&x, layer.down.out_features(), &mut room);
        self.output.check(OP, Arg::new(OP, "x", &x), shape)?;
        let (residual, out) = (self.output.residual(), self.output.out());
        let mut parts = Parts::new(OP, &self.workspace);
        if let Some(kept) = self.gate_up_out.as_ref().map(TensorMut::raw) {
            layer.check_kept(OP, "gate_up_out", &x, &kept)?;
            let mut parts = parts.exactly();
            layer.push_forward(&mut parts, x, kept, residual, out)?;
            return Ok(parts);
        }
        let [gate, up] = layer.halves()?;
        let fused = Problem {
            x,
            gate,
            up,
            activation: self.activation,
            down: layer.down,
            residual,
            out,
            intermediate: layer.intermediate,
        };
        parts.push(Ok(fused), &[])?;
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        self.weights(tensors);
        tensors.write_optional("gate_up_out", self.gate_up_out.as_ref());
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

impl<'a> GateUp<'a> {
    /// The matrices, by name.
    fn weights(&self) -> ArrayVec<(&Weights<'a>, (&'static str, &'static str)), 2> {
        match self {
            GateUp::Apart { gate, up } => ArrayVec::from([
                (gate, ("gate_weight", "gate_bias")),
                (up, ("up_weight", "up_bias")),
            ]),
            GateUp::Packed { weights, .. } => {
                ArrayVec::from_iter([(weights, ("gate_up_weight", "gate_up_bias"))])
            }
        }
    }
}

operation::functions!();
