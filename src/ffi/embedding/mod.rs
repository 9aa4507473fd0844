//! Embedding.

pub mod backward;

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{OfVocabulary, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
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
    /// `[vocab, dim]`, f32, f16 or bf16, contiguous in the last dimension; also in blocks, as a linear layer's weight.
    pub table: unsloth_tensor,
    /// i32 or i64 of any shape `[..]` and strides. Each must be a row of the table: with the CPU backend another is
    /// `UNSLOTH_STATUS_INVALID_ARGUMENT`; with CUDA, where the host cannot look, its output becomes a row of NaN.
    pub ids: unsloth_tensor,
    /// `[.., dim]`, f32, f16 or bf16, contiguous in the last dimension. In another dtype than the table each element is
    /// converted, rounding to nearest even.
    pub out: unsloth_tensor,
    /// Optional: the group that the rows of the table are divided among, of which `table` has this rank's; a rank may have none. `ids`
    /// are of the whole vocabulary and the same on all ranks. `out`, contiguous, is whole on all ranks, with the bits of a table that
    /// is whole; with `sequence` its first dimension has this rank's rows.
    pub parallel: unsloth_parallel,
    /// With a group: the row of the vocabulary that is this rank's first. `unsloth_shard_get` says which.
    pub vocab_begin: i64,
    /// With a group: rows of the vocabulary, those of all ranks.
    pub vocab_size: i64,
    /// Scratch memory, aligned to 256 bytes, which a group with `sequence` needs; see `unsloth_embedding_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(
    unsloth_embedding_params,
    [reserved, table, ids, out, parallel]
);

impl WithC for unsloth_embedding_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let of = self
                .parallel
                .of_vocabulary(OP, self.vocab_begin, self.vocab_size)?;
            run(&Params {
                table: self.table.input(OP, "table")?,
                ids: self.ids.input(OP, "ids")?,
                out: self.out.output(OP, "out")?,
                vocabulary: of.as_ref().map(OfVocabulary::vocabulary),
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers and the
/// workspace are not looked at. The status and message are those the call itself would give, ids apart.
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

/// Writes to `workspace_size` the bytes of workspace that the call needs: 0 but for a group with `sequence`. Data pointers and the
/// workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Gathers rows on `stream`. Neither allocates device memory nor synchronises, and may be captured into a CUDA graph. Calls that may
/// run at the same time must not share a workspace.
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
