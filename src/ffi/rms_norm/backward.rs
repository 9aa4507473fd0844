//! The backward pass of RMSNorm.

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::rms_norm::backward::Params;

const OP: &str = "rms_norm_backward";

/// Arguments of `unsloth_rms_norm_backward`: with `r = 1 / sqrt(mean(x^2) + epsilon)`, `n = x r` and
/// `g = dout (weight + weight_offset)`, `dx = r (g - n mean(g n)) + dresidual` and `dweight` = the sum
/// over rows of `dout n`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_rms_norm_backward_params {
    /// `sizeof(unsloth_rms_norm_backward_params)`.
    pub struct_size: u32,
    /// The forward's; above 0.
    pub epsilon: f32,
    /// The forward's; 0 without a weight.
    pub weight_offset: f32,
    /// 1 adds to what `dweight` holds, which must be f32 then; 0 overwrites. `dx` is
    /// overwritten always.
    pub accumulate: u32,
    /// Zero.
    pub reserved: [u32; 2],
    /// What was normalised: `[.., dim]`, f32, f16 or bf16, any strides with a contiguous last
    /// dimension. The forward's `x`, or its `residual_out` where it added a residual.
    pub x: unsloth_tensor,
    /// The gradient of the output; like `x`.
    pub dout: unsloth_tensor,
    /// Like `x`. Absent, or the same tensor as `dout`: `dout` is overwritten.
    pub dx: unsloth_tensor,
    /// Optional: added to `dx`, the gradient that reaches `x` past the norm; like `x`.
    pub dresidual: unsloth_tensor,
    /// Optional: the forward's gains, `[dim]`, any float dtype. Absent: all ones.
    pub weight: unsloth_tensor,
    /// Optional: the gradient of `weight`, `[dim]`, any float dtype. Absent: not computed.
    pub dweight: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_rms_norm_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(
    unsloth_rms_norm_backward_params,
    [reserved, x, dout, dx, dresidual, weight, dweight]
);

impl FromC for unsloth_rms_norm_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let dout = in_out(OP, ("dout", "dx"), &self.dout, &self.dx)?;
            Ok(Params {
                x: self.x.input(OP, "x")?,
                dout: dout
                    .ok_or_else(|| Error::invalid(OP, "dout", "is absent, it is required"))?,
                dresidual: self.dresidual.optional_input(OP, "dresidual")?,
                weight: self.weight.optional_input(OP, "weight")?,
                weight_offset: self.weight_offset,
                epsilon: self.epsilon,
                dweight: self.dweight.optional_output(OP, "dweight")?,
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
pub unsafe extern "C" fn unsloth_rms_norm_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_rms_norm_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace that the call needs: sums of the parameters'
/// gradients over parts of the rows, so 0 where none is asked for. Data pointers and the workspace
/// are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_rms_norm_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_rms_norm_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`, in f32, rounding once; the same inputs give the same bits on
/// one kind of device. What the forward knew of a row is computed again. Neither allocates nor
/// synchronises, and may be captured into a CUDA graph. Calls that may run at the same time must not
/// share a workspace.
///
/// `dx` may be `dout`; other overlaps with what is written are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are
/// valid on the context's device until the work has run; `stream` is NULL or a live stream of that
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_rms_norm_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_rms_norm_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
