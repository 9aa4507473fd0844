//! The greatest element of each row.

use crate::context::Stream;
use crate::error::Result;
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{guard, stream_from, unsloth_implementation, unsloth_stream, write_optional};
use crate::ops::argmax::{self, Params};

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
params!(
    unsloth_argmax_params,
    min_size = size_of::<unsloth_argmax_params>()
);

/// Reads and converts the arguments, then calls `run`.
///
/// # Safety
/// As the exported functions.
unsafe fn with_params(
    ctx: *mut unsloth_context,
    params: *const unsloth_argmax_params,
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
pub unsafe extern "C" fn unsloth_argmax_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_argmax_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: the caller's promise.
    unsafe {
        with_params(ctx, params, |context, params| {
            let chosen = argmax::supported(context, params)?;
            write_optional(OP, "implementation", implementation, || chosen as u32)
        })
    }
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
    // SAFETY: the caller's promise.
    unsafe {
        let stream: Stream = stream_from(stream);
        with_params(ctx, params, |context, params| {
            argmax::forward(context, params, stream)
        })
    }
}
