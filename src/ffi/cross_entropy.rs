//! Cross-entropy of logits.

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::cross_entropy::{IGNORE_INDEX, Logits, Params, Reduction};

const OP: &str = "cross_entropy";

/// How the losses of tokens become one.
pub type unsloth_reduction = u32;
/// Their sum over the number of tokens that are not ignored, or over `denominator`.
pub const UNSLOTH_REDUCTION_MEAN: unsloth_reduction = 0;
/// Their sum.
pub const UNSLOTH_REDUCTION_SUM: unsloth_reduction = 1;

/// Arguments of `unsloth_cross_entropy_forward`. For a token with logits `z` and target `t`, with
/// `s = z`, or `s = softcap tanh(z / softcap)`, and `e = label_smoothing`:
/// `loss = lse - (1 - e) s[t] - e mean(s) + z_loss lse^2` with `lse = ln(sum(exp(s)))`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_cross_entropy_params {
    /// `sizeof(unsloth_cross_entropy_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_REDUCTION_*`.
    pub reduction: unsloth_reduction,
    /// 1 says that `ignore_index` is set; 0 ignores targets of -100.
    pub has_ignore_index: u32,
    /// The share of the target's probability that is spread over the vocabulary: 0 to 1.
    pub label_smoothing: f32,
    /// With `has_ignore_index`: tokens with this target count for nothing; their loss, lse and
    /// gradient are zero.
    pub ignore_index: i64,
    /// The weight of `lse^2`; not negative.
    pub z_loss: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// `[.., vocab]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub logits: unsloth_tensor,
    /// `[..]`, i32 or i64, any strides. One that is neither below `vocab` nor ignored is refused on
    /// the CPU with `UNSLOTH_STATUS_INVALID_ARGUMENT`; with CUDA, where the host cannot look, its loss
    /// and gradient are NaN.
    pub targets: unsloth_tensor,
    /// Optional: f32 `[1]`, the losses as one number; 0 where all tokens are ignored.
    pub loss: unsloth_tensor,
    /// Optional: f32 of the shape of `targets`, contiguous: the loss of each token, not reduced.
    pub losses: unsloth_tensor,
    /// Optional: as `losses`, the `lse` of each token.
    pub lse: unsloth_tensor,
    /// Optional: the gradient of the logits, like these, and may be the same tensor.
    pub dlogits: unsloth_tensor,
    /// Optional: f32 `[1]` on the context's device, the gradient of `loss`, such as a loss scale.
    /// Absent: 1.
    pub dloss: unsloth_tensor,
    /// Optional, with a mean: f32 `[1]` on the context's device, divides in place of the number of
    /// tokens that are not ignored.
    pub denominator: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_cross_entropy_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(
    unsloth_cross_entropy_params,
    [
        logits,
        targets,
        loss,
        losses,
        lse,
        dlogits,
        dloss,
        denominator
    ]
);

impl FromC for unsloth_cross_entropy_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let logits = match self.dlogits.is_absent() {
                true => Logits::Read(self.logits.input(OP, "logits")?),
                false => {
                    let pair = in_out(OP, ("logits", "dlogits"), &self.logits, &self.dlogits)?;
                    let absent = || Error::invalid(OP, "logits", "is absent, it is required");
                    Logits::Differentiate(pair.ok_or_else(absent)?)
                }
            };
            Ok(Params {
                logits,
                targets: self.targets.input(OP, "targets")?,
                loss: self.loss.optional_output(OP, "loss")?,
                losses: self.losses.optional_output(OP, "losses")?,
                lse: self.lse.optional_output(OP, "lse")?,
                dloss: self.dloss.optional_input(OP, "dloss")?,
                denominator: self.denominator.optional_input(OP, "denominator")?,
                reduction: reduction_from(OP, self.reduction)?,
                ignore_index: ignored(OP, self.has_ignore_index, self.ignore_index)?,
                label_smoothing: self.label_smoothing,
                z_loss: self.z_loss,
                softcap: self.softcap,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
            })
        }
    }
}

/// The reduction with this value.
pub(super) fn reduction_from(op: &'static str, value: unsloth_reduction) -> Result<Reduction> {
    Reduction::from_raw(value).ok_or_else(|| {
        let problem = text!("is {value}, allowed: 0 (mean), 1 (sum)");
        Error::invalid(op, "reduction", problem)
    })
}

/// The target of tokens that count for nothing.
pub(super) fn ignored(op: &'static str, is_set: u32, ignore_index: i64) -> Result<i64> {
    match flag(op, "has_ignore_index", is_set)? {
        true => Ok(ignore_index),
        false if ignore_index == 0 => Ok(IGNORE_INDEX),
        false => {
            let problem = text!("is {ignore_index}, without has_ignore_index");
            Err(Error::invalid(op, "ignore_index", problem))
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
pub unsafe extern "C" fn unsloth_cross_entropy_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_cross_entropy_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace that the call needs: at most 4 for each token,
/// and 256. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_cross_entropy_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_cross_entropy_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes losses on `stream`, and their gradient where `dlogits` is there: what a training step
/// calls in place of a forward and a backward pass. Arithmetic is f32; the same inputs give the same
/// bits. Neither allocates nor synchronises, and may be captured into a CUDA graph. Calls that may
/// run at the same time must not share a workspace.
///
/// `dlogits` may be `logits`; other overlaps with what is written are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are
/// valid on the context's device until the work has run; `stream` is NULL or a live stream of that
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_cross_entropy_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_cross_entropy_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
