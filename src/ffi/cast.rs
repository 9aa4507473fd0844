//! Conversion between float dtypes.

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::cast::Params;

const OP: &str = "cast";

/// Arguments of `unsloth_cast_forward`: `out = x` in another dtype.
///
/// There is no backward function: the gradient of `x` is that of `out`, cast to the dtype of `x` by the same call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_cast_params {
    /// `sizeof(unsloth_cast_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// `[.., dim]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// The shape of `x`; f32, f16 or bf16, any strides with a contiguous last dimension. Each number is rounded once, to nearest
    /// even; too great a one becomes an infinity, NaN stays NaN. In the dtype of `x` it is a copy, bit for bit.
    pub out: unsloth_tensor,
}
params!(unsloth_cast_params, [reserved, x, out]);

impl FromC for unsloth_cast_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                x: self.x.input(OP, "x")?,
                out: self.out.output(OP, "out")?,
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
pub unsafe extern "C" fn unsloth_cast_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_cast_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Converts on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a CUDA graph.
///
/// `out` may not overlap `x`.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_cast_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_cast_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
