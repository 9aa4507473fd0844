//! Gated activations.

pub mod backward;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::swiglu::{Activation, GateOrder, Params, Tensors};

const OP: &str = "swiglu";

/// The function applied to a gate.
pub type unsloth_activation = u32;
/// `x / (1 + exp(-x))` (Llama, Qwen, Mistral).
pub const UNSLOTH_ACTIVATION_SILU: unsloth_activation = 0;
/// `x (1 + erf(x / sqrt(2))) / 2`.
pub const UNSLOTH_ACTIVATION_GELU: unsloth_activation = 1;
/// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2` (Gemma).
pub const UNSLOTH_ACTIVATION_GELU_TANH: unsloth_activation = 2;
/// `max(x, 0)^2` (BitNet).
pub const UNSLOTH_ACTIVATION_RELU_SQUARED: unsloth_activation = 3;

/// The order of the halves of a packed tensor.
pub type unsloth_gate_order = u32;
/// Gate, then up.
pub const UNSLOTH_GATE_ORDER_GATE_FIRST: unsloth_gate_order = 0;
/// Up, then gate.
pub const UNSLOTH_GATE_ORDER_UP_FIRST: unsloth_gate_order = 1;

/// Arguments of `unsloth_swiglu_forward`: `out = activation(gate) * up`, elementwise. Either `gate` and `up` are there, or
/// `gate_up`. Tensors are f32, f16 or bf16, all of one dtype, of any rank and strides with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_swiglu_params {
    /// `sizeof(unsloth_swiglu_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_ACTIVATION_*`.
    pub activation: unsloth_activation,
    /// The order of the halves of `gate_up`; one of `UNSLOTH_GATE_ORDER_*`.
    pub gate_order: unsloth_gate_order,
    /// Zero.
    pub reserved: u32,
    /// `[.., dim]`.
    pub gate: unsloth_tensor,
    /// `[.., dim]`.
    pub up: unsloth_tensor,
    /// `[.., 2 * dim]`: gate and up side by side.
    pub gate_up: unsloth_tensor,
    /// `[.., dim]`. Absent, or the same tensor as `gate`: `gate` is overwritten. Required with `gate_up`.
    pub out: unsloth_tensor,
}
params!(unsloth_swiglu_params, [reserved, gate, up, gate_up, out]);

pub(crate) fn activation_from(
    op: &'static str,
    activation: unsloth_activation,
) -> Result<Activation> {
    Activation::from_raw(activation).ok_or_else(|| {
        let problem =
            text!("is {activation}, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)");
        Error::invalid(op, "activation", problem)
    })
}

pub(crate) fn gate_order_from(op: &'static str, order: unsloth_gate_order) -> Result<GateOrder> {
    GateOrder::from_raw(order).ok_or_else(|| {
        let problem = text!("is {order}, allowed: 0 (gate first), 1 (up first)");
        Error::invalid(op, "gate_order", problem)
    })
}

impl FromC for unsloth_swiglu_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let order = gate_order_from(OP, self.gate_order)?;
            let tensors = match self.gate_up.optional_input(OP, "gate_up")? {
                Some(gate_up) => {
                    for (name, part) in [("gate", &self.gate), ("up", &self.up)] {
                        if !part.is_absent() {
                            let problem = "and gate_up are both there: set one";
                            return Err(Error::invalid(OP, name, problem));
                        }
                    }
                    Tensors::Packed {
                        gate_up,
                        order,
                        out: self.out.output(OP, "out")?,
                    }
                }
                None => {
                    let gate = in_out(OP, ("gate", "out"), &self.gate, &self.out)?;
                    Tensors::Apart {
                        gate: gate.ok_or_else(|| {
                            Error::invalid(OP, "gate", "and gate_up are absent, one is required")
                        })?,
                        up: self.up.input(OP, "up")?,
                    }
                }
            };
            Ok(Params {
                tensors,
                activation: activation_from(OP, self.activation)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_swiglu_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_swiglu_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Computes the gated activation on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a
/// CUDA graph.
///
/// `out` may be `gate`; other overlaps with it are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_swiglu_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_swiglu_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
