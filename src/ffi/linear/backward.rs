//! The backward pass of linear layers.

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{Group, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::linear::backward::Params;

const OP: &str = "linear_backward";

/// Arguments of `unsloth_linear_backward`: `dx = dout weight`, `dweight = dout^T x`, `dbias` = the
/// sum of the rows of `dout`. Each is optional, at least one is there, and what is absent is not
/// computed. (The gradient of a residual is `dout` itself.)
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_linear_backward_params {
    /// `sizeof(unsloth_linear_backward_params)`.
    pub struct_size: u32,
    /// 1 adds to what `dweight` and `dbias` hold, which must be f32 then; 0 overwrites. `dx` is
    /// overwritten always.
    pub accumulate: u32,
    /// `[.., out_features]`, f32, f16 or bf16: the gradient of `out`; any strides with a contiguous
    /// last dimension.
    pub dout: unsloth_tensor,
    /// `[.., in_features]`: the layer's input, with the leading dimensions and the dtype of `dout`,
    /// any strides with a contiguous last dimension. `dweight` needs it; without `dweight` it is
    /// optional, and its data is not looked at.
    pub x: unsloth_tensor,
    /// `[out_features, in_features]`, any float dtype whatever that of `dout`; any strides with a
    /// contiguous last dimension. `dx` needs it; without `dx` it is optional, and its data is not
    /// looked at.
    pub weight: unsloth_tensor,
    /// Optional: `[.., in_features]`, written: leading dimensions and dtype of `dout`; any strides
    /// with a contiguous last dimension.
    pub dx: unsloth_tensor,
    /// Optional: `[out_features, in_features]`, written or added to: the weight's dtype or f32 (any
    /// float dtype is taken); any strides with a contiguous last dimension.
    pub dweight: unsloth_tensor,
    /// Optional: `[out_features]`, written or added to: the bias's dtype or f32 (any float dtype is
    /// taken), contiguous.
    pub dbias: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_linear_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional: the group that `weight` is divided among, as in `unsloth_linear_params`. Divided by rows, `dx` is the sum of all ranks'
    /// parts of it. Divided by columns nothing is added up, and `dbias` is the same on all ranks.
    pub parallel: unsloth_parallel,
}
params!(
    unsloth_linear_backward_params,
    [dout, x, weight, dx, dweight, dbias, parallel]
);

impl WithC for unsloth_linear_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let group = self.parallel.of_layer(OP)?;
            run(&Params {
                dout: self.dout.input(OP, "dout")?,
                x: self.x.optional_input(OP, "x")?,
                weight: self.weight.optional_input(OP, "weight")?,
                dx: self.dx.optional_output(OP, "dx")?,
                dweight: self.dweight.optional_output(OP, "dweight")?,
                dbias: self.dbias.optional_output(OP, "dbias")?,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                parallel: group.as_ref().map(Group::parallel),
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
pub unsafe extern "C" fn unsloth_linear_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace with which the call is fastest; 0 on the CPU.
/// With less the call is slower, or is refused with a status that says what it needs. Data pointers
/// and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`, accumulating in f32 and rounding once; the same inputs give
/// the same bits. Neither allocates device memory nor synchronises, and may be captured into a CUDA
/// graph. Calls that may run at the same time must not share a workspace.
///
/// What is written may overlap nothing else that is looked at, nor a workspace that is used.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
