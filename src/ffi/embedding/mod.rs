//! Embedding.

pub mod backward;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::embedding::Params;

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
params!(unsloth_embedding_params, [reserved, table, ids, out]);

impl FromC for unsloth_embedding_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                table: self.table.input(OP, "table")?,
                ids: self.ids.input(OP, "ids")?,
                out: self.out.output(OP, "out")?,
            })
        }
    }
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
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
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
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
