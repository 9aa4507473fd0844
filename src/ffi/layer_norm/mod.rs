//! LayerNorm.

pub mod backward;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::layer_norm::Params;

const OP: &str = "layer_norm";

/// Arguments of `unsloth_layer_norm_forward`: `y = (x - m) / sqrt(mean((x - m)^2) + epsilon) * weight + bias` over the
/// last dimension, with the mean `m` of each row.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_layer_norm_params {
    /// `sizeof(unsloth_layer_norm_params)`.
    pub struct_size: u32,
    /// Added to the variance, above zero.
    pub epsilon: f32,
    /// `[.., dim]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// Like `x`. Absent, or the same tensor as `x`: `x` is overwritten.
    pub out: unsloth_tensor,
    /// Optional: gains `[dim]`, any float dtype. Absent: all ones.
    pub weight: unsloth_tensor,
    /// Optional: `[dim]`, any float dtype. Absent: zeros.
    pub bias: unsloth_tensor,
}
params!(unsloth_layer_norm_params, [x, out, weight, bias]);

impl FromC for unsloth_layer_norm_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let x = in_out(OP, ("x", "out"), &self.x, &self.out)?;
            Ok(Params {
                x: x.ok_or_else(|| crate::Error::invalid(OP, "x", "is absent, it is required"))?,
                weight: self.weight.optional_input(OP, "weight")?,
                bias: self.bias.optional_input(OP, "bias")?,
                epsilon: self.epsilon,
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
pub unsafe extern "C" fn unsloth_layer_norm_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_layer_norm_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Normalises on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a CUDA graph.
///
/// `out` may be `x`; other overlaps with it are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_layer_norm_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_layer_norm_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
