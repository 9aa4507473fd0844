//! The greatest element of each row.

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::argmax::Params;

const OP: &str = "argmax";

/// Arguments of `unsloth_argmax_forward`: `out[..] = argmax(x[.., :])`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_argmax_params {
    /// `sizeof(unsloth_argmax_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// `[.., n]`, f32, f16 or bf16, `n` at least 1; any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// i32 or i64: the leading dimensions of `x`, or `[1]` if it has none; any strides. Of equal elements the first counts; zeros are
    /// equal whatever their signs; NaN counts as greater than everything, so that a row with NaN gives the index of the first.
    pub out: unsloth_tensor,
}
params!(unsloth_argmax_params, [reserved, x, out]);

impl FromC for unsloth_argmax_params {
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
pub unsafe extern "C" fn unsloth_argmax_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_argmax_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Finds the index of the greatest element of each row on `stream`. Needs no workspace; neither allocates nor synchronises, and may be
/// captured into a CUDA graph.
///
/// `out` may not overlap `x`. What it holds before does not matter, though blocks that share a row on a GPU read it.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_argmax_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_argmax_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
