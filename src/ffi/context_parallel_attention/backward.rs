//! The backward pass of attention over sequences that ranks divide.

use std::ffi::c_void;

use super::{method, unsloth_context_method};
use crate::error::Result;
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::context_parallel_tokens::{order, unsloth_context_order};
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::context_parallel_attention::backward::Params;

const OP: &str = "context_parallel_attention_backward";

/// Arguments of `unsloth_context_parallel_attention_backward`: this rank's tokens' part of the gradients of `q`,
/// `k` and `v`. Each is optional, there has to be one, all ranks ask for the same ones, and what is absent is
/// not computed. `out` and `lse` are what the forward pass gave this rank; all else is as it had it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_context_parallel_attention_backward_params {
    /// `sizeof(unsloth_context_parallel_attention_backward_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_CONTEXT_METHOD_*`.
    pub method: unsloth_context_method,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// As the forward pass had it.
    pub causal: u32,
    /// 1 if the same inputs must give the same bits of `dq` on a GPU, as in
    /// `unsloth_attention_backward_params`.
    pub deterministic: u32,
    /// As the forward pass had it.
    pub order: unsloth_context_order,
    /// Zero.
    pub reserved: u32,
    /// As the forward pass had it.
    pub scale: f32,
    /// As the forward pass had it.
    pub softcap: f32,
    /// As the forward pass had it.
    pub window_left: i64,
    /// As the forward pass had it.
    pub window_right: i64,
    /// `unsloth_context_parallel_attention_backward_workspace_size` bytes aligned to 256, all needed. NULL where
    /// that is 0.
    pub workspace: *mut c_void,
    /// Bytes at `workspace`.
    pub workspace_size: usize,
    /// This rank's queries, as `unsloth_context_parallel_attention_params` has them.
    pub q: unsloth_tensor,
    /// Its keys.
    pub k: unsloth_tensor,
    /// Its values.
    pub v: unsloth_tensor,
    /// What the forward pass gave: the dtype of `q`, or f32.
    pub out: unsloth_tensor,
    /// What it gave too: f32 `[B, num_heads, Sq]`, contiguous in the last dimension.
    pub lse: unsloth_tensor,
    /// Gradient of `out`: its shape; the dtype of `q`, or f32.
    pub dout: unsloth_tensor,
    /// Optional output: the gradient of `q`, of its shape and dtype, any strides with a contiguous last dimension.
    pub dq: unsloth_tensor,
    /// Optional output: the gradient of `k`, like it.
    pub dk: unsloth_tensor,
    /// Optional output: the gradient of `v`, like it.
    pub dv: unsloth_tensor,
    /// As the forward pass had it.
    pub sinks: unsloth_tensor,
    /// As the forward pass had it.
    pub alibi_slopes: unsloth_tensor,
    /// As the forward pass had it.
    pub cu_seqlens_q: unsloth_tensor,
    /// As the forward pass had it.
    pub cu_seqlens_k: unsloth_tensor,
    /// Optional output, beside one of the others: the gradient of `sinks`, f32 `[num_heads]`, the same on all ranks.
    pub dsinks: unsloth_tensor,
    /// As the forward pass had it.
    pub max_seqlen_q: i64,
    /// As the forward pass had it.
    pub max_seqlen_k: i64,
}
params!(
    unsloth_context_parallel_attention_backward_params,
    [
        reserved,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dq,
        dk,
        dv,
        sinks,
        alibi_slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        dsinks
    ]
);

impl WithC for unsloth_context_parallel_attention_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let q = self.q.input(OP, "q")?;
            let comm = &*comm_from(OP, self.comm)?;
            run(&Params {
                comm,
                method: method(OP, self.method)?,
                order: order(OP, self.order)?,
                q,
                k: self.k.input(OP, "k")?,
                v: self.v.input(OP, "v")?,
                out: self.out.input(OP, "out")?,
                lse: self.lse.input(OP, "lse")?,
                dout: self.dout.input(OP, "dout")?,
                dq: self.dq.optional_output(OP, "dq")?,
                dk: self.dk.optional_output(OP, "dk")?,
                dv: self.dv.optional_output(OP, "dv")?,
                deterministic: flag(OP, "deterministic", self.deterministic)?,
                sinks: self.sinks.optional_input(OP, "sinks")?,
                alibi_slopes: self.alibi_slopes.optional_input(OP, "alibi_slopes")?,
                cu_seqlens_q: self.cu_seqlens_q.optional_input(OP, "cu_seqlens_q")?,
                cu_seqlens_k: self.cu_seqlens_k.optional_input(OP, "cu_seqlens_k")?,
                dsinks: self.dsinks.optional_output(OP, "dsinks")?,
                max_seqlen_q: count(OP, "max_seqlen_q", self.max_seqlen_q)?,
                max_seqlen_k: count(OP, "max_seqlen_k", self.max_seqlen_k)?,
                scale: self.scale,
                softcap: self.softcap,
                causal: flag(OP, "causal", self.causal)?,
                window_left: count(OP, "window_left", self.window_left)?,
                window_right: count(OP, "window_right", self.window_right)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_attention_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// The bytes of workspace that this call needs, exactly. Data pointers are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_attention_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes gradients on `stream`; every rank of the group calls it. Neither allocates device memory nor
/// synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_attention_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
