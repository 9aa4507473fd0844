//! Gated activation (Shazeer 2020, arXiv:2002.05202): `y = act(gate) * up`, elementwise.
//!
//! With SiLU it is SwiGLU, with GELU it is GEGLU. Arithmetic is f32; the only rounding to the tensors' dtype is that of the
//! result.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::Implementation;
use crate::ops::check::{self, Arg};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef};

const OP: &str = "swiglu";

/// The function applied to the gate. The discriminants are those of the C ABI (`UNSLOTH_ACTIVATION_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + exp(-x))` (Llama, Qwen, Mistral).
    #[default]
    Silu = 0,
    /// `x Φ(x)` with the normal distribution function `Φ(x) = (1 + erf(x / √2)) / 2`.
    Gelu = 1,
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2` (Gemma).
    GeluTanh = 2,
}

impl Activation {
    /// The activation with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Activation> {
        [Activation::Silu, Activation::Gelu, Activation::GeluTanh]
            .into_iter()
            .find(|a| *a as u32 == value)
    }
}

/// The order of the halves of a packed tensor. The discriminants are those of the C ABI (`UNSLOTH_GATE_ORDER_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum GateOrder {
    /// Gate, then up.
    #[default]
    GateFirst = 0,
    /// Up, then gate.
    UpFirst = 1,
}

impl GateOrder {
    /// The order with this C ABI value.
    pub fn from_raw(value: u32) -> Option<GateOrder> {
        [GateOrder::GateFirst, GateOrder::UpFirst]
            .into_iter()
            .find(|o| *o as u32 == value)
    }

    /// Where gate and up begin, in units of the intermediate dimension.
    pub(crate) fn offsets(self) -> (usize, usize) {
        match self {
            GateOrder::GateFirst => (0, 1),
            GateOrder::UpFirst => (1, 0),
        }
    }
}

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

/// Validated arguments; a packed tensor has become its two halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub gate: RawTensor,
    pub up: RawTensor,
    pub out: RawTensor,
    pub activation: Activation,
}

impl Params<'_> {
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
                    let problem = format!("has {width} columns, an even number is needed");
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

    fn check_data(&self, p: &Problem) -> Result<()> {
        match &self.tensors {
            Tensors::Apart { gate, .. } => {
                check::in_out_data(OP, ("gate", "out"), gate)?;
                let up = Arg::new(OP, "up", &p.up).data()?;
                Arg::new(OP, "out", &p.out).disjoint(up)?;
            }
            Tensors::Packed { gate_up, out, .. } => {
                let (packed, out) = (gate_up.raw(), out.raw());
                let packed = Arg::new(OP, "gate_up", &packed).data()?;
                Arg::new(OP, "out", &out).data()?.disjoint(packed)?;
            }
        }
        Ok(())
    }
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn choose(ctx: &Context, problem: &Problem) -> Result<Implementation> {
    match ctx.device() {
        Device::Cpu(_) => Ok(Implementation::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            crate::cuda::swiglu::supported(problem)?;
            Ok(Implementation::Cuda)
        }
    }
}

/// Which implementation [`forward`] would run with these arguments. Data pointers are not looked at.
///
/// # Errors
/// Why there is none.
pub fn supported(ctx: &Context, params: &Params<'_>) -> Result<Implementation> {
    choose(ctx, &params.problem()?)
}

/// Computes the gated activation on `stream`. Needs no workspace; does not allocate or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    params.check_data(&problem)?;
    choose(ctx, &problem)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::swiglu::forward(cpu, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::swiglu::forward(cuda, &problem, stream)?,
    }
    Ok(())
}
