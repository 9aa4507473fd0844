//! Attention over sequences that ranks divide.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::context_parallel_tokens::{order, unsloth_context_order};
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::context_parallel_attention::{Method, Params};

const OP: &str = "context_parallel_attention";

/// How ranks that have parts of sequences attend.
pub type unsloth_context_method = u32;
/// They exchange their parts of sequences for heads, attend with these, and give the output back: Ulysses
/// (arXiv:2309.14509). The number of ranks divides `num_kv_heads`. A head is computed as on one rank, with the
/// same bits on the CPU.
pub const UNSLOTH_CONTEXT_METHOD_ULYSSES: unsloth_context_method = 0;
/// They gather all keys and values, and attend with their own queries (arXiv:2407.21783, 3.3.2): any number of
/// heads, and room for all keys and values. Causal, the last rank has the most to do in contiguous order, and all
/// ranks as much in zigzag. The gradients that a rank's chunks give keys and values, rounded to their dtype, are
/// added up, those of ranks as by `unsloth_reduce_scatter_forward`.
pub const UNSLOTH_CONTEXT_METHOD_ALL_GATHER: unsloth_context_method = 1;
/// Keys and values travel from rank to rank, and a rank attends to those that it has (arXiv:2310.01889): any number of
/// heads, and room for two ranks' keys and values besides its own. Outputs are merged, and gradients added up, in f32;
/// the backward pass sends sums of gradients along, which are of f32 too. Steps that windows let nobody see are not
/// taken. Transfers and attention are queued on one stream, one behind the other.
pub const UNSLOTH_CONTEXT_METHOD_RING: unsloth_context_method = 2;

/// Arguments of `unsloth_context_parallel_attention_forward`: `unsloth_attention_forward` over sequences of which
/// each rank has a part, equally long ones. A rank gets its queries' output.
/// `Sq` and `Sk` are the numbers of this rank's queries and keys of a sequence.
///
/// All ranks make the same calls. What is wrong with shapes that ranks share is refused on every rank before
/// any has sent anything. A call of a local group waits for the other ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_context_parallel_attention_params {
    /// `sizeof(unsloth_context_parallel_attention_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_CONTEXT_METHOD_*`.
    pub method: unsloth_context_method,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// 1 if a query sees only keys up to its own position in the whole sequence, else 0.
    pub causal: u32,
    /// Which tokens of every sequence this rank has, one of `UNSLOTH_CONTEXT_ORDER_*`. They
    /// are those that `unsloth_context_parallel_tokens_get` lists. Zigzag takes an even number of queries and of keys, and not
    /// `UNSLOTH_CONTEXT_METHOD_ULYSSES`.
    pub order: unsloth_context_order,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound of the scores through tanh; 0 for none.
    pub softcap: f32,
    /// How many keys a query sees up to its own position, counting its own; 0 for all.
    pub window_left: i64,
    /// How many keys a query sees from its own position on, counting its own; 0 for all.
    pub window_right: i64,
    /// `unsloth_context_parallel_attention_workspace_size` bytes aligned to 256, all needed. NULL where that is
    /// 0.
    pub workspace: *mut c_void,
    /// Bytes at `workspace`.
    pub workspace_size: usize,
    /// This rank's queries `[B, Sq, num_heads, head_dim]`, f32, f16 or bf16; any strides with a contiguous last
    /// dimension, as of all tensors here.
    pub q: unsloth_tensor,
    /// Its keys `[B, Sk, num_kv_heads, head_dim]`, any float dtype.
    pub k: unsloth_tensor,
    /// Its values like `k`, with `head_dim_v`; any float dtype.
    pub v: unsloth_tensor,
    /// Output like `q`, with `head_dim_v`; the dtype of `q`, or f32.
    pub out: unsloth_tensor,
    /// Optional output: natural logarithm of the softmax denominator, f32 `[B, num_heads, Sq]`.
    pub lse: unsloth_tensor,
    /// Optional: a logit per query head that takes part in the softmax and has no value, f32 `[num_heads]`, the same on
    /// all ranks.
    pub sinks: unsloth_tensor,
    /// Optional: ALiBi slopes, f32 `[num_heads]` or `[B, num_heads]`, the same on all ranks. Not by
    /// `UNSLOTH_CONTEXT_METHOD_RING`; by `UNSLOTH_CONTEXT_METHOD_ALL_GATHER` causal.
    pub alibi_slopes: unsloth_tensor,
    /// Optional: i32 `[B + 1]`, where each sequence of packed queries begins, and the last one's end. Ranks then divide
    /// the tokens of all sequences as one run of them, in contiguous order and not by `UNSLOTH_CONTEXT_METHOD_RING`; `q` and
    /// `out` are `[total_q, num_heads, ..]`, `k` and `v` `[total_k, num_kv_heads, ..]`, and `lse` is `[num_heads, total_q]`.
    /// By `UNSLOTH_CONTEXT_METHOD_ULYSSES` these are places among the tokens of all ranks; by
    /// `UNSLOTH_CONTEXT_METHOD_ALL_GATHER` they are what `unsloth_context_parallel_packed_get` gives, and windows are causal.
    /// Tokens of no sequence get zeros, and LSE -inf.
    pub cu_seqlens_q: unsloth_tensor,
    /// The same of packed keys. If one is given, both are.
    pub cu_seqlens_k: unsloth_tensor,
    /// No sequence has more packed queries than this, of those that one rank attends with; 0 for as many as there are.
    pub max_seqlen_q: i64,
    /// No sequence has more packed keys than this; 0 for as many as all ranks have.
    pub max_seqlen_k: i64,
}
params!(
    unsloth_context_parallel_attention_params,
    [
        q,
        k,
        v,
        out,
        lse,
        sinks,
        alibi_slopes,
        cu_seqlens_q,
        cu_seqlens_k
    ]
);

/// The method of this value.
fn method(op: &'static str, value: unsloth_context_method) -> Result<Method> {
    Method::from_raw(value).ok_or_else(|| {
        let problem = text!("is {value}, allowed: 0 (ulysses), 1 (all_gather), 2 (ring)");
        Error::invalid(op, "method", problem)
    })
}

impl WithC for unsloth_context_parallel_attention_params {
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
                out: self.out.output(OP, "out")?,
                lse: self.lse.optional_output(OP, "lse")?,
                sinks: self.sinks.optional_input(OP, "sinks")?,
                alibi_slopes: self.alibi_slopes.optional_input(OP, "alibi_slopes")?,
                cu_seqlens_q: self.cu_seqlens_q.optional_input(OP, "cu_seqlens_q")?,
                cu_seqlens_k: self.cu_seqlens_k.optional_input(OP, "cu_seqlens_k")?,
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
pub unsafe extern "C" fn unsloth_context_parallel_attention_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// The bytes of workspace that this call needs, exactly. By `UNSLOTH_CONTEXT_METHOD_ULYSSES` those of this rank's
/// tensors once, of one of them twice more where they are put in order, and what attention needs; else those of
/// all keys and values. Data pointers are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_attention_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes on `stream`; every rank of the group calls it. Neither allocates device memory nor synchronises, and
/// may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_attention_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_context_parallel_attention_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
