//! The backward pass of the gated feed-forward block.

use std::ffi::c_void;

use super::unsloth_mlp_params;
use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::Group;
use crate::ffi::params::{params, read_field};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::mlp::backward::{Gradients, Params};

const OP: &str = "mlp_backward";

/// Arguments of `unsloth_mlp_backward`: gradients of the input, the weights and the biases of
/// `unsloth_mlp_forward`. Each is optional, at least one is there, and what none of them needs is
/// not computed. (The gradient of a residual is `dout` itself.)
///
/// Gradients of weights and biases are shaped like them, of any float dtype; matrices have any
/// strides with a contiguous last dimension, biases are contiguous.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_mlp_backward_params {
    /// `sizeof(unsloth_mlp_backward_params)`.
    pub struct_size: u32,
    /// 1 adds to what the gradients of weights and biases hold, which must be f32 then; 0
    /// overwrites. `dx` is overwritten always.
    pub accumulate: u32,
    /// The arguments of the forward: its `x`, weights, biases, activation and order. Its `out`,
    /// `residual`, `gate_up_out` and workspace are not looked at.
    pub forward: *const unsloth_mlp_params,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_mlp_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional: what the forward kept in `gate_up_out`, `[.., 2 * intermediate]`, contiguous.
    /// Absent: it is computed again, which gives gradients of the same bits if the kept tensor is
    /// aligned to 16 bytes.
    pub gate_up: unsloth_tensor,
    /// `[.., hidden_out]`: the gradient of `out`, leading dimensions and dtype of `x`, any strides
    /// with a contiguous last dimension.
    pub dout: unsloth_tensor,
    /// Optional: written, like `x`, any strides with a contiguous last dimension.
    pub dx: unsloth_tensor,
    /// Optional: `[intermediate, hidden]`.
    pub dgate_weight: unsloth_tensor,
    /// Optional: `[intermediate]`.
    pub dgate_bias: unsloth_tensor,
    /// Optional: `[intermediate, hidden]`.
    pub dup_weight: unsloth_tensor,
    /// Optional: `[intermediate]`.
    pub dup_bias: unsloth_tensor,
    /// Optional: `[2 * intermediate, hidden]`, where the forward has `gate_up_weight`.
    pub dgate_up_weight: unsloth_tensor,
    /// Optional: `[2 * intermediate]`.
    pub dgate_up_bias: unsloth_tensor,
    /// Optional: `[hidden_out, intermediate]`.
    pub ddown_weight: unsloth_tensor,
    /// Optional: `[hidden_out]`.
    pub ddown_bias: unsloth_tensor,
}
params!(
    unsloth_mlp_backward_params,
    [
        gate_up,
        dout,
        dx,
        dgate_weight,
        dgate_bias,
        dup_weight,
        dup_bias,
        dgate_up_weight,
        dgate_up_bias,
        ddown_weight,
        ddown_bias,
    ]
);

impl unsloth_mlp_backward_params {
    /// The gradients of weights and biases.
    ///
    /// # Safety
    /// The tensors are valid on the context's device until the work has run.
    pub(crate) unsafe fn gradients<'a>(&self, op: &'static str) -> Result<Gradients<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Gradients {
                dgate_weight: self.dgate_weight.optional_output(op, "dgate_weight")?,
                dgate_bias: self.dgate_bias.optional_output(op, "dgate_bias")?,
                dup_weight: self.dup_weight.optional_output(op, "dup_weight")?,
                dup_bias: self.dup_bias.optional_output(op, "dup_bias")?,
                dgate_up_weight: self
                    .dgate_up_weight
                    .optional_output(op, "dgate_up_weight")?,
                dgate_up_bias: self.dgate_up_bias.optional_output(op, "dgate_up_bias")?,
                ddown_weight: self.ddown_weight.optional_output(op, "ddown_weight")?,
                ddown_bias: self.ddown_bias.optional_output(op, "ddown_bias")?,
            })
        }
    }
}

impl WithC for unsloth_mlp_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the forward's arguments are readable, and that all
        // tensors are valid until the work has run.
        unsafe {
            let forward = read_field(OP, "forward", self.forward)?;
            let x = forward.x.input(OP, "x")?;
            let group = forward.parallel.of_block(OP)?;
            let mut of_forward = forward.of_input(x).map_err(|error| error.within(OP))?;
            of_forward.parallel = group.as_ref().map(Group::parallel);
            run(&Params {
                forward: of_forward,
                gate_up: self.gate_up.optional_input(OP, "gate_up")?,
                dout: self.dout.input(OP, "dout")?,
                dx: self.dx.optional_output(OP, "dx")?,
                gradients: self.gradients(OP)?,
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
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->forward` is or
/// does; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes the workspace that the call needs to `workspace_size`, in bytes: an intermediate, as
/// large as that of `unsloth_mlp_forward`, then two for gate and up or their gradients, each
/// rounded up to 256 bytes, and what products have use for, as
/// `unsloth_linear_backward_workspace_size` says. Less where fewer gradients are asked for. Data
/// pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->forward` is or
/// does; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`. Sums are f32; what passes between products is rounded to the
/// dtype of `x`. The same inputs give the same bits. Neither allocates device memory nor
/// synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->forward` is or
/// does; its tensors and workspace are valid on the context's device until the work has run;
/// `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
