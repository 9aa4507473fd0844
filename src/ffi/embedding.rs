//! Embedding.

use crate::context::Stream;
use crate::error::Result;
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{guard, stream_from, unsloth_implementation, unsloth_stream, write_optional};
use crate::ops::embedding::{self, Params};

const OP: &str = "embedding";

/// Arguments of `unsloth_embedding_forward`: `out[..] = table[ids[..]]`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_embedding_params {
    /// `sizeof(unsloth_embedding_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// `[vocab, dim]`, f32, f16 or bf16, contiguous in the last dimension.
    pub table: unsloth_tensor,
    /// i32 or i64 of any shape `[..]` and strides. Each must be a row of the table: with the CPU backend another is
    /// `UNSLOTH_STATUS_INVALID_ARGUMENT`; with CUDA, where the host cannot look, its output becomes a row of NaN.
    pub ids: unsloth_tensor,
    /// `[.., dim]`, f32, f16 or bf16, contiguous in the last dimension. In another dtype than the table each element is
    /// converted, rounding to nearest even.
    pub out: unsloth_tensor,
}
params!(
    unsloth_embedding_params,
    min_size = size_of::<unsloth_embedding_params>()
);

/// Reads and converts the arguments, then calls `run`.
///
/// # Safety
/// As the exported functions.
unsafe fn with_params(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_params,
    run: impl FnOnce(&crate::Context, &Params<'_>) -> Result<()>,
) -> unsloth_status {
    guard(OP, || {
        let context = &context_from(OP, ctx)?.context;
        // SAFETY: the exported functions' contract.
        unsafe {
            let p = params::read(OP, params)?;
            let params = Params {
                table: p.table.input(OP, "table")?,
                ids: p.ids.input(OP, "ids")?,
                out: p.out.output(OP, "out")?,
            };
            run(context, &params)
        }
    })
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at. The status and message are those the call itself would give, ids apart.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: the caller's promise.
    unsafe {
        with_params(ctx, params, |context, params| {
            let chosen = embedding::supported(context, params)?;
            write_optional(OP, "implementation", implementation, || chosen as u32)
        })
    }
}

/// Gathers rows on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: the caller's promise.
    unsafe {
        let stream: Stream = stream_from(stream);
        with_params(ctx, params, |context, params| {
            embedding::forward(context, params, stream)
        })
    }
}
