//! Gated activation (Shazeer 2020, arXiv:2002.05202): `y = act(gate) * up`, elementwise.
//!
//! With SiLU it is SwiGLU, with GELU it is GEGLU. Arithmetic is f32; the only rounding to the tensors' dtype is that of the
//! result.

pub mod backward;

pub use backward::backward;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation};
use crate::problem::swiglu::Problem;
pub use crate::problem::swiglu::{Activation, GateOrder};
use crate::tensor::{InOut, TensorMut, TensorRef};

const OP: &str = "swiglu";

/// Arguments of [`forward`]: f32, f16 or bf16 of any rank, all of one dtype; strided, contiguous in the last dimension.
#[derive(Debug)]
pub struct Params<'a> {
    /// Gate, up and output.
    pub tensors: Tensors<'a>,
    /// Applied to the gate.
    pub activation: Activation,
}

/// What a gated activation works on.
#[derive(Debug)]
pub enum Tensors<'a> {
    /// Gate and up in two tensors.
    Apart {
        /// Gate `[.., dim]` and the output, which may take its place.
        gate: InOut<'a>,
        /// Up `[.., dim]`.
        up: TensorRef<'a>,
    },
    /// Gate and up side by side in one tensor.
    Packed {
        /// `[.., 2 * dim]`.
        gate_up: TensorRef<'a>,
        /// Which half is which.
        order: GateOrder,
        /// `[.., dim]`.
        out: TensorMut<'a>,
    },
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (gate, up, out) = match &self.tensors {
            Tensors::Apart { gate, up } => {
                let (input, up) = (gate.input(), up.raw());
                let arg = Arg::new(OP, "gate", &input)
                    .min_rank(1)?
                    .dtype(DType::FLOATS)?;
                check::in_out(OP, ("gate", "out"), gate)?;
                Arg::new(OP, "up", &up)
                    .dtype_of(arg)?
                    .shape_of(arg)?
                    .last_contiguous()?;
                (input, up, gate.output())
            }
            Tensors::Packed {
                gate_up,
                order,
                out,
            } => {
                let (packed, out) = (gate_up.raw(), out.raw());
                let arg = Arg::new(OP, "gate_up", &packed)
                    .min_rank(1)?
                    .dtype(DType::FLOATS)?
                    .last_contiguous()?;
                let last = packed.layout.rank() - 1;
                let width = packed.layout.dim(last);
                if !width.is_multiple_of(2) {
                    let problem = text!("has {width} columns, an even number is needed");
                    return Err(Error::invalid(OP, "gate_up", problem));
                }
                let dim = width / 2;
                let (gate, up) = order.offsets();
                let half = |start: usize| gate_up.narrowed(last, start * dim, dim).map(|t| t.raw());
                let (gate, up) = (half(gate)?, half(up)?);
                Arg::new(OP, "out", &out)
                    .dtype_of(arg)?
                    .shape(gate.layout.shape())?
                    .last_contiguous()?
                    .writable()?;
                (gate, up, out)
            }
        };
        Ok(Problem {
            gate,
            up,
            out,
            activation: self.activation,
        })
    }

    fn tensors(&self, tensors: &mut operation::Tensors) {
        match &self.tensors {
            Tensors::Apart { gate, up } => {
                tensors.in_out(("gate", "out"), gate);
                tensors.read("up", up);
            }
            Tensors::Packed { gate_up, out, .. } => {
                tensors.read("gate_up", gate_up);
                tensors.write("out", out);
            }
        }
    }
}

operation::functions!();
