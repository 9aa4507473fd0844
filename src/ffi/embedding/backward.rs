//! The backward pass of embeddings.

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{OfVocabulary, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::embedding::backward::Params;

const OP: &str = "embedding_backward";

/// Arguments of `unsloth_embedding_backward`: `dweight[v]` = the sum of `dout[..]` where `ids[..]`
/// is `v`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_embedding_backward_params {
    /// `sizeof(unsloth_embedding_backward_params)`.
    pub struct_size: u32,
    /// 1 adds to what `dweight` holds, which must be f32 then, and leaves rows that no id names as
    /// they are; 0 writes all of it.
    pub accumulate: u32,
    /// 1 says that `padding_idx` is set; 0 that every row has a gradient.
    pub has_padding_idx: u32,
    /// Zero.
    pub reserved: u32,
    /// A row whose gradient is zero, whatever was looked up there. Not looked at unless
    /// `has_padding_idx` is 1.
    pub padding_idx: i64,
    /// `[.., dim]`: the gradient of `out`, the shape of `ids`, then the table's rows; f32, f16 or
    /// bf16, any strides with a contiguous last dimension.
    pub dout: unsloth_tensor,
    /// i32 or i64 of any shape `[..]` and strides. Each must be a row of the table: with the CPU
    /// backend another is `UNSLOTH_STATUS_INVALID_ARGUMENT`. With CUDA, where the host cannot look,
    /// it adds to no row.
    pub ids: unsloth_tensor,
    /// `[vocab, dim]`, written or added to: the table's dtype or f32 (any float dtype is taken),
    /// any strides with a contiguous last dimension.
    pub dweight: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_embedding_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional: the group that the rows of the table are divided among, of which `dweight` has this
    /// rank's. `ids` and `padding_idx` are of the whole vocabulary and the same on all ranks. `dout` is
    /// whole on all ranks, which then exchange nothing; with `sequence` its first dimension has this
    /// rank's rows, and it is contiguous.
    pub parallel: unsloth_parallel,
    /// With a group: the row of the vocabulary that is this rank's first.
    pub vocab_begin: i64,
    /// With a group: rows of the vocabulary, those of all ranks.
    pub vocab_size: i64,
}
params!(
    unsloth_embedding_backward_params,
    [reserved, dout, ids, dweight, parallel]
);

impl WithC for unsloth_embedding_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        let padding_idx = match flag(OP, "has_padding_idx", self.has_padding_idx)? {
            true => Some(count(OP, "padding_idx", self.padding_idx)?),
            false => None,
        };
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let of = self
                .parallel
                .of_vocabulary(OP, self.vocab_begin, self.vocab_size)?;
            run(&Params {
                dout: self.dout.input(OP, "dout")?,
                ids: self.ids.input(OP, "ids")?,
                dweight: self.dweight.output(OP, "dweight")?,
                padding_idx,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                vocabulary: of.as_ref().map(OfVocabulary::vocabulary),
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers and the workspace are not looked at. The status and message are those the
/// call itself would give, ids apart.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace that the call needs; 0 on the CPU but for a group
/// with `sequence`. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradient on `stream`, accumulating in f32 in the order of the ids and rounding
/// once; the same inputs give the same bits. Neither allocates device memory nor synchronises, and
/// may be captured into a CUDA graph. Calls that may run at the same time must not share a
/// workspace.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_embedding_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_embedding_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
