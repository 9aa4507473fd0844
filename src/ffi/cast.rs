//! Conversion between float dtypes.

use crate::context::Stream;
use crate::error::Result;
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{guard, stream_from, unsloth_implementation, unsloth_stream, write_optional};
use crate::ops::cast::{self, Params};

const OP: &str = "cast";

/// Arguments of `unsloth_cast_forward`: `out = x` in another dtype.
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
params!(
    unsloth_cast_params,
    min_size = size_of::<unsloth_cast_params>()
);

/// Reads and converts the arguments, then calls `run`.
///
/// # Safety
/// As the exported functions.
unsafe fn with_params(
    ctx: *mut unsloth_context,
    params: *const unsloth_cast_params,
    run: impl FnOnce(&crate::Context, &Params<'_>) -> Result<()>,
) -> unsloth_status {
    guard(OP, || {
        let context = &context_from(OP, ctx)?.context;
        // SAFETY: the exported functions' contract.
        unsafe {
            let p = params::read(OP, params)?;
            let params = Params {
                x: p.x.input(OP, "x")?,
                out: p.out.output(OP, "out")?,
            };
            run(context, &params)
        }
    })
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
    // SAFETY: the caller's promise.
    unsafe {
        with_params(ctx, params, |context, params| {
            let chosen = cast::supported(context, params)?;
            write_optional(OP, "implementation", implementation, || chosen as u32)
        })
    }
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
    // SAFETY: the caller's promise.
    unsafe {
        let stream: Stream = stream_from(stream);
        with_params(ctx, params, |context, params| {
            cast::forward(context, params, stream)
        })
    }
}
