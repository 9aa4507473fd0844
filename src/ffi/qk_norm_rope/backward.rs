//! The backward pass of QK-norm and RoPE.

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::rope::{positions, unsloth_rotation};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::qk_norm_rope::backward::Params;

const OP: &str = "qk_norm_rope_backward";

/// Arguments of `unsloth_qk_norm_rope_backward`: with `r = 1 / sqrt(mean(x^2) + epsilon)`, `n = x r`,
/// `g` the gradient of the output rotated back and `h = g (weight + weight_offset)`, for every head
/// `dx = r (h - n mean(h n))`, and `dweight` = the sum over tokens and heads of `g n`. At least one of
/// `q` and `k` is there, each with the gradient of its output.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_qk_norm_rope_backward_params {
    /// `sizeof(unsloth_qk_norm_rope_backward_params)`.
    pub struct_size: u32,
    /// The forward's; above 0.
    pub epsilon: f32,
    /// The forward's.
    pub position_offset: i64,
    /// The forward's.
    pub weight_offset: f32,
    /// 1 adds to what `dq_weight` and `dk_weight` hold, which must be f32 then; 0 overwrites. `dq` and
    /// `dk` are overwritten always.
    pub accumulate: u32,
    /// The forward's.
    pub rotation: unsloth_rotation,
    /// Optional: the forward's queries, before they were normalised:
    /// `[batch, seq, heads, head_dim]` or `[tokens, heads, head_dim]`, f32, f16 or bf16, any strides
    /// with a contiguous last dimension.
    pub q: unsloth_tensor,
    /// The gradient of the forward's `q_out`; like `q`, and there if that is.
    pub dq_out: unsloth_tensor,
    /// Like `q`. Absent, or the same tensor as `dq_out`: `dq_out` is overwritten.
    pub dq: unsloth_tensor,
    /// Optional: the forward's keys; like `q`, with any number of heads.
    pub k: unsloth_tensor,
    /// The gradient of the forward's `k_out`; like `k`, and there if that is.
    pub dk_out: unsloth_tensor,
    /// Like `k`. Absent, or the same tensor as `dk_out`: `dk_out` is overwritten.
    pub dk: unsloth_tensor,
    /// The forward's. With CUDA, where the host cannot look, the gradients of a token outside a table
    /// become NaN, and with them those of the weights.
    pub positions: unsloth_tensor,
    /// The forward's.
    pub q_weight: unsloth_tensor,
    /// The forward's.
    pub k_weight: unsloth_tensor,
    /// Optional: the gradient of `q_weight`, `[head_dim]`, any float dtype. Absent: not computed.
    pub dq_weight: unsloth_tensor,
    /// Optional: the gradient of `k_weight`; like `dq_weight`.
    pub dk_weight: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_qk_norm_rope_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(
    unsloth_qk_norm_rope_backward_params,
    [
        rotation, q, dq_out, dq, k, dk_out, dk, positions, q_weight, k_weight, dq_weight, dk_weight
    ]
);

impl FromC for unsloth_qk_norm_rope_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                q: self.q.optional_input(OP, "q")?,
                dq_out: in_out(OP, ("dq_out", "dq"), &self.dq_out, &self.dq)?,
                k: self.k.optional_input(OP, "k")?,
                dk_out: in_out(OP, ("dk_out", "dk"), &self.dk_out, &self.dk)?,
                q_weight: self.q_weight.optional_input(OP, "q_weight")?,
                k_weight: self.k_weight.optional_input(OP, "k_weight")?,
                weight_offset: self.weight_offset,
                epsilon: self.epsilon,
                positions: positions(OP, &self.positions, self.position_offset)?,
                rotation: self.rotation.read(OP)?,
                dq_weight: self.dq_weight.optional_output(OP, "dq_weight")?,
                dk_weight: self.dk_weight.optional_output(OP, "dk_weight")?,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers and the workspace are not looked at. The status and message are those the
/// call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_qk_norm_rope_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_qk_norm_rope_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace that the call needs: sums of the weights'
/// gradients over parts of the tokens, so 0 where none is asked for. Data pointers and the workspace
/// are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_qk_norm_rope_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_qk_norm_rope_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`, in f32, rounding once; the same inputs give the same bits on
/// one kind of device. What the forward knew of a head is computed again. Neither allocates nor
/// synchronises, and may be captured into a CUDA graph. Calls that may run at the same time must not
/// share a workspace.
///
/// `dq` may be `dq_out` and `dk` may be `dk_out`; other overlaps with what is written are errors.
/// Heads of q and k may lie in one packed tensor.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are
/// valid on the context's device until the work has run; `stream` is NULL or a live stream of that
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_qk_norm_rope_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_qk_norm_rope_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
