//! The backward pass of a decoder layer.

use std::ffi::c_void;

use super::unsloth_decoder_layer_params;
use crate::error::{Error, Result};
use crate::ffi::attention_block::backward::unsloth_attention_block_backward_params;
use crate::ffi::context::unsloth_context;
use crate::ffi::mlp::backward::unsloth_mlp_backward_params;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::{params, read_field};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::decoder_layer::backward::Params;

const OP: &str = "decoder_layer_backward";

/// Arguments of `unsloth_decoder_layer_backward`: gradients of the input and of all weights of
/// `unsloth_decoder_layer_forward`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_decoder_layer_backward_params {
    /// `sizeof(unsloth_decoder_layer_backward_params)`.
    pub struct_size: u32,
    /// 1 adds to what the gradients of weights, biases and gains hold, which must be f32 then; 0
    /// overwrites. `dx` is overwritten always.
    pub accumulate: u32,
    /// 1 if the same inputs must give the same bits on a GPU, which may take longer: see
    /// `unsloth_attention_backward_params`. On the CPU they do in any case.
    pub deterministic: u32,
    /// Zero.
    pub reserved: u32,
    /// The arguments of the forward, with what it left in `saved`. Its `out` and workspace are not
    /// looked at.
    pub forward: *const unsloth_decoder_layer_params,
    /// The gradients of the attention block's weights that are asked for, or NULL for none. Nothing
    /// else of it is looked at.
    pub attention: *const unsloth_attention_block_backward_params,
    /// The gradients of the MLP's weights, likewise.
    pub mlp: *const unsloth_mlp_backward_params,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_decoder_layer_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Like `x`: the gradient of `out`.
    pub dout: unsloth_tensor,
    /// Like `x`: the gradient of `x`. Absent: it takes the place of `dout`.
    pub dx: unsloth_tensor,
    /// Optional: `[hidden]`, the gradient of `attention_norm`, any float dtype. Sequence parallel it is of
    /// this rank's rows: its sum over ranks is the gradient.
    pub dattention_norm: unsloth_tensor,
    /// Optional: `[hidden]`, the gradient of `mlp_norm`, likewise.
    pub dmlp_norm: unsloth_tensor,
}
params!(
    unsloth_decoder_layer_backward_params,
    [reserved, dout, dx, dattention_norm, dmlp_norm]
);

impl WithC for unsloth_decoder_layer_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the structs that are pointed to are readable, and that
        // all tensors are valid until the work has run.
        unsafe {
            let forward = read_field(OP, "forward", self.forward)?;
            let dout = in_out(OP, ("dout", "dx"), &self.dout, &self.dx)?;
            forward.with_layer(OP, &forward.x, |forward| {
                run(&Params {
                    forward,
                    dout: dout
                        .ok_or_else(|| Error::invalid(OP, "dout", "is absent, it is required"))?,
                    dattention_norm: self
                        .dattention_norm
                        .optional_output(OP, "dattention_norm")?,
                    dmlp_norm: self.dmlp_norm.optional_output(OP, "dmlp_norm")?,
                    attention: match self.attention.is_null() {
                        true => Default::default(),
                        false => read_field(OP, "attention", self.attention)?.gradients(OP)?,
                    },
                    mlp: match self.mlp.is_null() {
                        true => Default::default(),
                        false => read_field(OP, "mlp", self.mlp)?.gradients(OP)?,
                    },
                    accumulate: flag(OP, "accumulate", self.accumulate)?,
                    deterministic: flag(OP, "deterministic", self.deterministic)?,
                    workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                })
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers, `saved` and the workspace are not looked at. The status and message are
/// those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as the structs that it points
/// to are or do; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes the workspace that the call needs to `workspace_size`, in bytes: what was not kept and is
/// computed again, the gradient between attention and MLP, and what the operations have use for. Data
/// pointers, `saved` and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as the structs that it points
/// to are or do; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`. The same inputs give the same bits, whatever was kept,
/// if `deterministic` or on the CPU.
/// Neither allocates device memory nor synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as the structs that it points
/// to are or do; tensors, `saved` and workspace are valid on the context's device until the work has
/// run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
