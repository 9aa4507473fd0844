//! The backward pass of attention.

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::attention::backward::Params;

const OP: &str = "attention_backward";

/// Arguments of `unsloth_attention_backward`: gradients of `q`, `k`, `v`, the bias and the sinks.
///
/// With `s` the scores of `unsloth_attention_forward`, and `x` those behind the softcap:
///
/// ```text
/// delta[i]  = dout[i] . out[i] - dlse[i]                   dlse if it is given
/// p[i, j]   = exp(s[i, j] - lse[i])
/// ds[i, j]  = p[i, j] * (dout[i] . v[j] - delta[i])
/// dbias     = sum ds                                       over the dimensions that bias repeats
/// dsinks[h] = -sum exp(sinks[h] - lse[i]) * delta[i]
/// dx[i, j]  = ds[i, j] * (1 - (x[i, j] / softcap)^2)       ds without a softcap
/// dq[i]     = scale * sum dx[i, j] k[j]
/// dk[j]     = scale * sum dx[i, j] q[i]
/// dv[j]     = sum p[i, j] dout[i]
/// ```
///
/// Sums for `dk` and `dv` are also over the query heads that share a key head. Every gradient is optional, there has to be one, and
/// what is absent is not computed. `out` and `lse` are what the forward pass gave; all other inputs and options are as it had them.
/// A query that sees no key adds nothing to any gradient.
///
/// Keys are batched, padded (`seq_lens_k`) or packed, not paged. Keys beyond the length of a padded sequence get zeros. Tokens that
/// belong to no packed sequence are left as they are. Sums are f32, cut by shapes alone and added in a fixed order, so the same
/// inputs give the same bits; but for `dq` of more than 256 keys by Hopper's kernels for head dims up to 256, of values too, without
/// softcap and ALiBi, whose parts come as blocks of keys are done: see `deterministic`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_backward_params {
    /// `sizeof(unsloth_attention_backward_params)`.
    pub struct_size: u32,
    /// As the forward pass had it.
    pub causal: u32,
    /// As the forward pass had it.
    pub scale: f32,
    /// As the forward pass had it.
    pub softcap: f32,
    /// As the forward pass had it.
    pub window_left: i64,
    /// As the forward pass had it.
    pub window_right: i64,
    /// No sequence of packed queries is longer; 0 for no better bound than all tokens.
    pub max_seqlen_q: i64,
    /// No sequence of padded or packed keys is longer; 0 for no better bound than the room there is.
    pub max_seqlen_k: i64,
    /// 1 to add `dbias` and `dsinks` to what is there, 0 to overwrite it.
    pub accumulate: u32,
    /// 1 if the same inputs must give the same bits of `dq` on a GPU, which may take longer. Every
    /// other gradient, and all on the CPU, have the same bits in any case.
    pub deterministic: u32,
    /// `unsloth_attention_backward_workspace_size` bytes aligned to 256; NULL where that is 0.
    pub workspace: *mut c_void,
    /// Bytes at `workspace`.
    pub workspace_size: usize,
    /// Queries, as `unsloth_attention_params` has them.
    pub q: unsloth_tensor,
    /// Keys `[B, Sk, num_kv_heads, head_dim]`, or packed `[total_k, num_kv_heads, head_dim]`.
    pub k: unsloth_tensor,
    /// Values like `k`, with `head_dim_v`.
    pub v: unsloth_tensor,
    /// What the forward pass gave: the dtype of `q`, or f32.
    pub out: unsloth_tensor,
    /// What it gave too: f32 `[B, num_heads, Sq]`, or `[num_heads, total_q]` for packed queries.
    pub lse: unsloth_tensor,
    /// Gradient of `out`: its shape; the dtype of `q`, or f32.
    pub dout: unsloth_tensor,
    /// Optional: gradient of `lse`, f32, its shape.
    pub dlse: unsloth_tensor,
    /// Optional: as `unsloth_attention_params` has it.
    pub bias: unsloth_tensor,
    /// Optional: as `unsloth_attention_params` has it.
    pub mask: unsloth_tensor,
    /// Optional: as `unsloth_attention_params` has it. It gets no gradient.
    pub alibi_slopes: unsloth_tensor,
    /// Optional: f32 `[num_heads]`.
    pub sinks: unsloth_tensor,
    /// Optional: i32 `[B + 1]`; sequence `b` of packed queries is tokens `cu_seqlens_q[b]` to before `cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: unsloth_tensor,
    /// Optional: i32 `[B + 1]`, the same for packed keys.
    pub cu_seqlens_k: unsloth_tensor,
    /// Optional: i32 `[B]`, the number of keys of each sequence of a padded batch.
    pub seq_lens_k: unsloth_tensor,
    /// Optional output: the gradient of `q`, of its shape and dtype, any strides with a contiguous last dimension.
    pub dq: unsloth_tensor,
    /// Optional output: the gradient of `k`, like it.
    pub dk: unsloth_tensor,
    /// Optional output: the gradient of `v`, like it.
    pub dv: unsloth_tensor,
    /// Optional output: the gradient of `bias`, f32, of its shape.
    pub dbias: unsloth_tensor,
    /// Optional output: the gradient of `sinks`, f32 `[num_heads]`.
    pub dsinks: unsloth_tensor,
}
params!(
    unsloth_attention_backward_params,
    [
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        bias,
        mask,
        alibi_slopes,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seq_lens_k,
        dq,
        dk,
        dv,
        dbias,
        dsinks,
    ]
);

impl FromC for unsloth_attention_backward_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                q: self.q.input(OP, "q")?,
                k: self.k.input(OP, "k")?,
                v: self.v.input(OP, "v")?,
                out: self.out.input(OP, "out")?,
                lse: self.lse.input(OP, "lse")?,
                dout: self.dout.input(OP, "dout")?,
                dlse: self.dlse.optional_input(OP, "dlse")?,
                bias: self.bias.optional_input(OP, "bias")?,
                mask: self.mask.optional_input(OP, "mask")?,
                alibi_slopes: self.alibi_slopes.optional_input(OP, "alibi_slopes")?,
                sinks: self.sinks.optional_input(OP, "sinks")?,
                cu_seqlens_q: self.cu_seqlens_q.optional_input(OP, "cu_seqlens_q")?,
                cu_seqlens_k: self.cu_seqlens_k.optional_input(OP, "cu_seqlens_k")?,
                seq_lens_k: self.seq_lens_k.optional_input(OP, "seq_lens_k")?,
                dq: self.dq.optional_output(OP, "dq")?,
                dk: self.dk.optional_output(OP, "dk")?,
                dv: self.dv.optional_output(OP, "dv")?,
                dbias: self.dbias.optional_output(OP, "dbias")?,
                dsinks: self.dsinks.optional_output(OP, "dsinks")?,
                accumulate: flag(OP, "accumulate", self.accumulate)?,
                deterministic: flag(OP, "deterministic", self.deterministic)?,
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
/// at. The status and message are those the call itself would give.
///
/// The CUDA backend takes all that the CPU backend does, but for lengths and numbers of rows that do not fit 30 and 32 bits.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_backward_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_backward_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// The bytes of workspace that this call needs, exactly: no more than two f32 for every query and head, and, on a GPU, 8 MiB for `dbias`. Data pointers are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_backward_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_backward_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes gradients of attention on `stream`. Neither allocates device memory nor synchronises, and may be captured into a CUDA
/// graph.
///
/// The CPU backend checks `cu_seqlens_*` and `seq_lens_k` before it writes anything; on a GPU they lie in device memory, which a
/// launch does not read, and their contents are the caller's responsibility.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the context's device
/// until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_backward(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_backward_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
