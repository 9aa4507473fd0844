//! The backward pass of the attention block.

use std::ffi::c_void;

use super::unsloth_attention_block_params;
use crate::error::{Error, Result};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::Group;
use crate::ffi::params::{params, read_field};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::attention_block::backward::{Gradients, Params};

const OP: &str = "attention_block_backward";

/// Arguments of `unsloth_attention_block_backward`: gradients of the input and of the parameters of
/// `unsloth_attention_block_forward` without a cache. Each is optional, at least one is there, and
/// what none of them needs is not computed. (The gradient of a residual is `dout` itself; ALiBi
/// slopes get none.)
///
/// Gradients of parameters are shaped like them, of any float dtype (that of the sinks is f32);
/// matrices have any strides with a contiguous last dimension, all others are contiguous.
///
/// With `cu_seqlens` every token belongs to a sequence: of one that does not, gradients are
/// undefined, and with them those of the weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_block_backward_params {
    /// `sizeof(unsloth_attention_block_backward_params)`.
    pub struct_size: u32,
    /// 1 adds to what the gradients of parameters hold, which must be f32 then; 0 overwrites. `dx`
    /// is overwritten always.
    pub accumulate: u32,
    /// 1 if the same inputs must give the same bits on a GPU, which may take longer: see
    /// `unsloth_attention_backward_params`. On the CPU they do in any case.
    pub deterministic: u32,
    /// Zero.
    pub reserved: u32,
    /// The arguments of the forward: its `x`, parameters and all that says what is computed.
    /// `cache` is NULL; its `out`, `residual`, workspace and what it keeps are not looked at.
    pub forward: *const unsloth_attention_block_params,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_attention_block_backward_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional: what the forward kept in `qkv_out`, contiguous. Absent: it is computed again,
    /// which gives gradients of the same bits if kept tensors are aligned to 16 bytes and they are
    /// `deterministic`.
    pub qkv: unsloth_tensor,
    /// Optional, together with `lse`: what the forward kept in `attended_out`, contiguous. Absent:
    /// attention is computed again.
    pub attended: unsloth_tensor,
    /// Optional: what the forward kept in `lse_out`, contiguous.
    pub lse: unsloth_tensor,
    /// `[.., hidden_out]`: the gradient of `out`, leading dimensions and dtype of `x`, any strides
    /// with a contiguous last dimension.
    pub dout: unsloth_tensor,
    /// Optional: written, like `x`, any strides with a contiguous last dimension.
    pub dx: unsloth_tensor,
    /// Optional: `[num_heads * head_dim, hidden]`.
    pub dq_weight: unsloth_tensor,
    /// Optional: `[num_heads * head_dim]`.
    pub dq_bias: unsloth_tensor,
    /// Optional: `[num_kv_heads * head_dim, hidden]`.
    pub dk_weight: unsloth_tensor,
    /// Optional: `[num_kv_heads * head_dim]`.
    pub dk_bias: unsloth_tensor,
    /// Optional: `[num_kv_heads * v_head_dim, hidden]`.
    pub dv_weight: unsloth_tensor,
    /// Optional: `[num_kv_heads * v_head_dim]`.
    pub dv_bias: unsloth_tensor,
    /// Optional: where the forward has `qkv_weight`, like it.
    pub dqkv_weight: unsloth_tensor,
    /// Optional: where the forward has `qkv_bias`, like it.
    pub dqkv_bias: unsloth_tensor,
    /// Optional: like `q_norm`. Where ranks divide the heads it is of this rank's: its sum over ranks is the gradient.
    pub dq_norm: unsloth_tensor,
    /// Optional: like `k_norm`.
    pub dk_norm: unsloth_tensor,
    /// Optional: f32 `[num_heads]`.
    pub dsinks: unsloth_tensor,
    /// Optional: `[hidden_out, num_heads * v_head_dim]`, the gradient of `out_weight`.
    pub dout_weight: unsloth_tensor,
    /// Optional: `[hidden_out]`, the gradient of `out_bias`.
    pub dout_bias: unsloth_tensor,
}
params!(
    unsloth_attention_block_backward_params,
    [
        reserved,
        qkv,
        attended,
        lse,
        dout,
        dx,
        dq_weight,
        dq_bias,
        dk_weight,
        dk_bias,
        dv_weight,
        dv_bias,
        dqkv_weight,
        dqkv_bias,
        dq_norm,
        dk_norm,
        dsinks,
        dout_weight,
        dout_bias,
    ]
);

impl unsloth_attention_block_backward_params {
    /// The gradients of parameters.
    ///
    /// # Safety
    /// The tensors are valid on the context's device until the work has run.
    pub(crate) unsafe fn gradients<'a>(&self, op: &'static str) -> Result<Gradients<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Gradients {
                dq_weight: self.dq_weight.optional_output(op, "dq_weight")?,
                dq_bias: self.dq_bias.optional_output(op, "dq_bias")?,
                dk_weight: self.dk_weight.optional_output(op, "dk_weight")?,
                dk_bias: self.dk_bias.optional_output(op, "dk_bias")?,
                dv_weight: self.dv_weight.optional_output(op, "dv_weight")?,
                dv_bias: self.dv_bias.optional_output(op, "dv_bias")?,
                dqkv_weight: self.dqkv_weight.optional_output(op, "dqkv_weight")?,
                dqkv_bias: self.dqkv_bias.optional_output(op, "dqkv_bias")?,
                dq_norm: self.dq_norm.optional_output(op, "dq_norm")?,
                dk_norm: self.dk_norm.optional_output(op, "dk_norm")?,
                dsinks: self.dsinks.optional_output(op, "dsinks")?,
                dout_weight: self.dout_weight.optional_output(op, "dout_weight")?,
                dout_bias: self.dout_bias.optional_output(op, "dout_bias")?,
            })
        }
    }
}

impl WithC for unsloth_attention_block_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the forward's arguments are readable, and that all
        // tensors are valid until the work has run.
        unsafe {
            let forward = read_field(OP, "forward", self.forward)?;
            if !forward.cache.is_null() {
                let problem = "is there: the backward pass is of attention without a cache";
                return Err(Error::invalid(OP, "forward.cache", problem));
            }
            let x = forward.x.input(OP, "x")?;
            let group = forward.parallel.of_block(OP)?;
            let mut of_forward = forward.of_input(x).map_err(|error| error.within(OP))?;
            of_forward.parallel = group.as_ref().map(Group::parallel);
            run(&Params {
                forward: of_forward,
                qkv: self.qkv.optional_input(OP, "qkv")?,
                attended: self.attended.optional_input(OP, "attended")?,
                lse: self.lse.optional_input(OP, "lse")?,
                dout: self.dout.input(OP, "dout")?,
                dx: self.dx.optional_output(OP, "dx")?,
                gradients: self.gradients(OP)?,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                deterministic: flag(OP, "deterministic", self.deterministic)?,
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
pub unsafe extern "C" fn unsloth_attention_block_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes the workspace that the call needs to `workspace_size`, in bytes: what was not kept of
/// queries, keys, values, attention's output and LSE; normalised queries and keys; the gradients of
/// attention's output and of queries, keys and values; each rounded up to 256 bytes. Then what the
/// operations need or have use for. Less where fewer gradients are asked for. Data pointers and the
/// workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->forward` is or
/// does; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_block_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the gradients on `stream`. Sums are f32; what passes between products is rounded to the
/// dtype of `x`. The same inputs give the same bits if `deterministic` or on the CPU. Neither allocates device memory nor
/// synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->forward` is or
/// does; its tensors and workspace are valid on the context's device until the work has run;
/// `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_block_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
