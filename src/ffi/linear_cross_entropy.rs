//! Cross-entropy of a linear layer's output.

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::cross_entropy::{ignored, reduction_from, unsloth_reduction};
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{OfVocabulary, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::linear::Weights;
use crate::ops::linear_cross_entropy::Params;

const OP: &str = "linear_cross_entropy";

/// Arguments of `unsloth_linear_cross_entropy_forward`: the loss of `unsloth_cross_entropy_forward`
/// for the logits `x weight^T + bias`, which are never stored whole, and its gradients. One of `loss`,
/// `losses`, `lse` and the gradients is there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_linear_cross_entropy_params {
    /// `sizeof(unsloth_linear_cross_entropy_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_REDUCTION_*`.
    pub reduction: unsloth_reduction,
    /// 1 says that `ignore_index` is set; 0 ignores targets of -100.
    pub has_ignore_index: u32,
    /// 1 adds to what `dweight` and `dbias` hold, which must be f32 then; 0 overwrites. `dx` is
    /// overwritten always.
    pub accumulate: u32,
    /// With `has_ignore_index`: tokens with this target count for nothing; their loss, lse and
    /// gradient are zero.
    pub ignore_index: i64,
    /// The most tokens whose logits are stored at a time. 0 for as many as 512 MiB have room for on
    /// a GPU and 128 MiB on the CPU, up to 8192, in chunks of about a size and of multiples of 128
    /// tokens; for all where the sum of `dweight` in f32 that chunks need would take more memory
    /// than they save. (Where leading dimensions of `x`, `dx` and `targets` do not merge, a chunk has whole
    /// entries of the inner ones, or is a part of one.)
    pub chunk_tokens: i64,
    /// The share of the target's probability that is spread over the vocabulary: 0 to 1.
    pub label_smoothing: f32,
    /// The weight of `lse^2`; not negative.
    pub z_loss: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// Must be zero.
    pub reserved: u32,
    /// `[.., hidden]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// `[vocab, hidden]`, any float dtype whatever that of `x`; any strides with a contiguous last
    /// dimension.
    pub weight: unsloth_tensor,
    /// Optional: `[vocab]`, any float dtype, contiguous.
    pub bias: unsloth_tensor,
    /// `[..]`, i32 or i64, any strides. One that is neither below `vocab` nor ignored is refused on
    /// the CPU with `UNSLOTH_STATUS_INVALID_ARGUMENT`; with CUDA, where the host cannot look, its loss
    /// and gradient are NaN, and so is what these are added to.
    pub targets: unsloth_tensor,
    /// Optional: f32 `[1]`, the losses as one number; 0 where all tokens are ignored.
    pub loss: unsloth_tensor,
    /// Optional: f32 of the shape of `targets`, contiguous: the loss of each token, not reduced.
    pub losses: unsloth_tensor,
    /// Optional: as `losses`, the `lse` of each token.
    pub lse: unsloth_tensor,
    /// Optional: the gradient of `x`, of its shape and dtype; any strides with a contiguous last
    /// dimension.
    pub dx: unsloth_tensor,
    /// Optional: `[vocab, hidden]`, written or added to: the weight's dtype or f32 (any float dtype is
    /// taken); any strides with a contiguous last dimension.
    pub dweight: unsloth_tensor,
    /// Optional: `[vocab]`, written or added to: the bias's dtype or f32 (any float dtype is taken),
    /// contiguous.
    pub dbias: unsloth_tensor,
    /// Optional: f32 `[1]` on the context's device, the gradient of `loss`, such as a loss scale,
    /// without which f16 loses small gradients of logits. Absent: 1.
    pub dloss: unsloth_tensor,
    /// Optional, with a mean: f32 `[1]` on the context's device, divides in place of the number of
    /// tokens that are not ignored.
    pub denominator: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_linear_cross_entropy_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional: the group that the rows of the weight are divided among, of which `weight`, `bias`, `dweight` and `dbias` have this
    /// rank's; a rank may have none. `targets`, the same on all ranks, are of the whole vocabulary; `loss`, `losses` and `lse` have the
    /// same bits on all. `x` and `dx`, which is added up, are whole on all ranks; with `sequence` their first dimension has this rank's
    /// rows, and targets and losses are of all rows. `x`, `targets` and `dx` are contiguous. All ranks ask for the same outputs, and
    /// with the same `chunk_tokens`.
    pub parallel: unsloth_parallel,
    /// With a group: the row of the vocabulary that is this rank's first. `unsloth_shard_get` says which.
    pub vocab_begin: i64,
    /// With a group: rows of the vocabulary, those of all ranks.
    pub vocab_size: i64,
}
params!(
    unsloth_linear_cross_entropy_params,
    [
        reserved,
        x,
        weight,
        bias,
        targets,
        loss,
        losses,
        lse,
        dx,
        dweight,
        dbias,
        dloss,
        denominator,
        parallel
    ]
);

impl WithC for unsloth_linear_cross_entropy_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let of = self
                .parallel
                .of_vocabulary(OP, self.vocab_begin, self.vocab_size)?;
            run(&Params {
                x: self.x.input(OP, "x")?,
                weights: Weights {
                    weight: self.weight.input(OP, "weight")?,
                    bias: self.bias.optional_input(OP, "bias")?,
                },
                targets: self.targets.input(OP, "targets")?,
                loss: self.loss.optional_output(OP, "loss")?,
                losses: self.losses.optional_output(OP, "losses")?,
                lse: self.lse.optional_output(OP, "lse")?,
                dx: self.dx.optional_output(OP, "dx")?,
                dweight: self.dweight.optional_output(OP, "dweight")?,
                dbias: self.dbias.optional_output(OP, "dbias")?,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                dloss: self.dloss.optional_input(OP, "dloss")?,
                denominator: self.denominator.optional_input(OP, "denominator")?,
                reduction: reduction_from(OP, self.reduction)?,
                ignore_index: ignored(OP, self.has_ignore_index, self.ignore_index)?,
                label_smoothing: self.label_smoothing,
                z_loss: self.z_loss,
                softcap: self.softcap,
                chunk_tokens: count(OP, "chunk_tokens", self.chunk_tokens)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                vocabulary: of.as_ref().map(OfVocabulary::vocabulary),
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers and the workspace are not looked at. The status and message are those the
/// call itself would give, targets apart.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_cross_entropy_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_cross_entropy_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace with which the call is fastest: the logits of a
/// chunk, `dweight` and `dbias` in f32 where these have another dtype and there are several chunks, 4
/// for each token if `loss` is there and `losses` is not, and what products take; of a group 16 for each of its ranks and a chunk's
/// tokens, and with `sequence` `x` and `dx` of all ranks. With less the call is slower, or is refused
/// with a status that says what it needs. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_cross_entropy_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_cross_entropy_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes losses on `stream`, and the gradients that are there: what a training step calls in
/// place of a forward and a backward pass of a model's head. Logits and their gradient are rounded
/// to the dtype of `x`; other arithmetic is f32, parameters' gradients are rounded once, and the
/// same inputs give the same bits. Neither allocates device memory nor synchronises, and may be
/// captured into a CUDA graph. Calls that may run at the same time must not share a workspace.
///
/// What is written may overlap nothing else that is looked at, nor the workspace.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are
/// valid on the context's device until the work has run; `stream` is NULL or a live stream of that
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_cross_entropy_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_cross_entropy_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
