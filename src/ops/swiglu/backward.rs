//! The gradients of gated activations.
//!
//! ```text
//! dgate = dout * up * act'(gate)
//! dup   = dout * act(gate)
//! out   = act(gate) * up            (again, where asked for)
//! ```
//!
//! The activation is computed again from the gate. The output comes with it for nothing: the
//! gradient of the down projection's weight needs it, and so the forward's need not be kept.
//! Arithmetic is f32.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::problem::swiglu::Backward;
use crate::tensor::{InOut, RawTensor, TensorRef};

const OP: &str = "swiglu_backward";

/// Arguments of [`backward`]: f32, f16 or bf16 of any rank, all of one dtype; strided, contiguous in
/// the last dimension.
#[derive(Debug)]
pub struct Params<'a> {
    /// Gate and up, and their gradients.
    pub tensors: Tensors<'a>,
    /// The gradient of the output.
    pub dout: Dout<'a>,
    /// The forward's.
    pub activation: Activation,
}

/// What a gated activation worked on, with the gradients, which may take its place.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // views, made once per call
pub enum Tensors<'a> {
    /// Gate and up in two tensors.
    Apart {
        /// `[.., dim]`: gate, and its gradient.
        gate: InOut<'a>,
        /// `[.., dim]`: up, and its gradient.
        up: InOut<'a>,
    },
    /// Gate and up side by side in one tensor.
    Packed {
        /// `[.., 2 * dim]`: both, and their gradients.
        gate_up: InOut<'a>,
        /// Which half is which, in both.
        order: GateOrder,
    },
}

/// The gradient of the output, `[.., dim]`.
#[derive(Debug)]
pub enum Dout<'a> {
    /// Nothing else.
    Only(TensorRef<'a>),
    /// The output is computed again, and may take the gradient's place.
    WithOut(InOut<'a>),
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Backward;

    fn problem(&self) -> Result<Backward> {
        let ([gate, up], [dgate, dup]) = match &self.tensors {
            Tensors::Apart { gate, up } => {
                let (input, of_up) = (gate.input(), up.input());
                let arg = Arg::new(OP, "gate", &input)
                    .min_rank(1)?
                    .dtype(DType::FLOATS)?;
                check::in_out(OP, ("gate", "dgate"), gate)?;
                Arg::new(OP, "up", &of_up).dtype_of(arg)?.shape_of(arg)?;
                check::in_out(OP, ("up", "dup"), up)?;
                ([input, of_up], [gate.output(), up.output()])
            }
            Tensors::Packed { gate_up, order } => {
                let packed = gate_up.input();
                Arg::new(OP, "gate_up", &packed)
                    .min_rank(1)?
                    .dtype(DType::FLOATS)?;
                check::in_out(OP, ("gate_up", "dgate_up"), gate_up)?;
                let last = packed.layout.rank() - 1;
                let width = packed.layout.dim(last);
                if !width.is_multiple_of(2) {
                    let problem = text!("has {width} columns, an even number is needed");
                    return Err(Error::invalid(OP, "gate_up", problem));
                }
                let (gate, up) = order.offsets();
                let halves = |t: RawTensor| -> Result<[RawTensor; 2]> {
                    let half = |i: usize| t.narrowed(last, i * (width / 2), width / 2);
                    Ok([half(gate)?, half(up)?])
                };
                (halves(packed)?, halves(gate_up.output())?)
            }
        };
        let dout = match &self.dout {
            Dout::Only(dout) => dout.raw(),
            Dout::WithOut(pair) => pair.input(),
        };
        Arg::new(OP, "dout", &dout)
            .dtype_of(Arg::new(OP, "gate", &gate))?
            .shape(gate.layout.shape())?
            .last_contiguous()?;
        let out = match &self.dout {
            Dout::Only(_) => None,
            Dout::WithOut(pair) => {
                check::in_out(OP, ("dout", "out"), pair)?;
                Some(pair.output())
            }
        };
        Ok(Backward {
            gate,
            up,
            dout,
            dgate,
            dup,
            out,
            activation: self.activation,
        })
    }

    fn tensors(&self, tensors: &mut operation::Tensors) {
        match &self.tensors {
            Tensors::Apart { gate, up } => {
                tensors.in_out(("gate", "dgate"), gate);
                tensors.in_out(("up", "dup"), up);
            }
            Tensors::Packed { gate_up, .. } => tensors.in_out(("gate_up", "dgate_up"), gate_up),
        }
        match &self.dout {
            Dout::Only(dout) => tensors.read("dout", dout),
            Dout::WithOut(pair) => tensors.in_out(("dout", "out"), pair),
        }
    }
}

operation::functions!(backward);
