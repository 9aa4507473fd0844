//! The backward pass of gated activations.

use super::{activation_from, gate_order_from, unsloth_activation, unsloth_gate_order};
use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::swiglu::backward::{Dout, Params, Tensors};

const OP: &str = "swiglu_backward";

/// Arguments of `unsloth_swiglu_backward`: `dgate = dout up activation'(gate)` and
/// `dup = dout activation(gate)`, elementwise. Either `gate` and `up` are there, or `gate_up`. Tensors
/// are f32, f16 or bf16, all of one dtype, of any rank and strides with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_swiglu_backward_params {
    /// `sizeof(unsloth_swiglu_backward_params)`.
    pub struct_size: u32,
    /// The forward's; one of `UNSLOTH_ACTIVATION_*`.
    pub activation: unsloth_activation,
    /// The order of the halves of `gate_up` and `dgate_up`; one of `UNSLOTH_GATE_ORDER_*`.
    pub gate_order: unsloth_gate_order,
    /// Zero.
    pub reserved: u32,
    /// `[.., dim]`.
    pub gate: unsloth_tensor,
    /// `[.., dim]`.
    pub up: unsloth_tensor,
    /// `[.., 2 * dim]`: gate and up side by side.
    pub gate_up: unsloth_tensor,
    /// `[.., dim]`: the gradient of the output.
    pub dout: unsloth_tensor,
    /// `[.., dim]`. Absent, or the same tensor as `gate`: `gate` is overwritten.
    pub dgate: unsloth_tensor,
    /// `[.., dim]`. Absent, or the same tensor as `up`: `up` is overwritten.
    pub dup: unsloth_tensor,
    /// `[.., 2 * dim]`. Absent, or the same tensor as `gate_up`: `gate_up` is overwritten.
    pub dgate_up: unsloth_tensor,
    /// Optional: `[.., dim]`, the forward's output, computed again. May be the same tensor as `dout`.
    pub out: unsloth_tensor,
}
params!(
    unsloth_swiglu_backward_params,
    [reserved, gate, up, gate_up, dout, dgate, dup, dgate_up, out]
);

impl unsloth_swiglu_backward_params {
    /// Gate and up with their gradients.
    ///
    /// # Safety
    /// The tensors are valid on the context's device until the work has run.
    unsafe fn tensors<'a>(&self) -> Result<Tensors<'a>> {
        let order = gate_order_from(OP, self.gate_order)?;
        let packed = !self.gate_up.is_absent();
        let of_others = |name, other: &unsloth_tensor, given: &str| match other.is_absent() {
            true => Ok(()),
            false => {
                let problem = text!("is there beside {given}: set one pair");
                Err(Error::invalid(OP, name, problem))
            }
        };
        if packed {
            of_others("gate", &self.gate, "gate_up")?;
            of_others("up", &self.up, "gate_up")?;
            of_others("dgate", &self.dgate, "gate_up")?;
            of_others("dup", &self.dup, "gate_up")?;
        } else {
            of_others("dgate_up", &self.dgate_up, "gate")?;
        }
        // SAFETY: the caller's promise.
        unsafe {
            if packed {
                let gate_up = in_out(OP, ("gate_up", "dgate_up"), &self.gate_up, &self.dgate_up)?;
                let absent = || Error::invalid(OP, "gate_up", "is absent, it is required");
                let gate_up = gate_up.ok_or_else(absent)?;
                return Ok(Tensors::Packed { gate_up, order });
            }
            let gate = in_out(OP, ("gate", "dgate"), &self.gate, &self.dgate)?;
            let up = in_out(OP, ("up", "dup"), &self.up, &self.dup)?;
            Ok(Tensors::Apart {
                gate: gate.ok_or_else(|| {
                    Error::invalid(OP, "gate", "and gate_up are absent, one is required")
                })?,
                up: up.ok_or_else(|| Error::invalid(OP, "up", "is absent, it is required"))?,
            })
        }
    }
}

impl FromC for unsloth_swiglu_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let tensors = self.tensors()?;
            let dout = match self.out.is_absent() {
                true => Dout::Only(self.dout.input(OP, "dout")?),
                false => {
                    let pair = in_out(OP, ("dout", "out"), &self.dout, &self.out)?;
                    let absent = || Error::invalid(OP, "dout", "is absent, it is required");
                    Dout::WithOut(pair.ok_or_else(absent)?)
                }
            };
            Ok(Params {
                tensors,
                dout,
                activation: activation_from(OP, self.activation)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers are not looked at. The status and message are those the call itself would
/// give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_swiglu_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_swiglu_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Computes the gradients on `stream`, in f32. Needs no workspace; neither allocates nor
/// synchronises, and may be captured into a CUDA graph.
///
/// `dgate` may be `gate`, `dup` may be `up`, `dgate_up` may be `gate_up` and `out` may be `dout`; other
/// overlaps with what is written are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_swiglu_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_swiglu_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
