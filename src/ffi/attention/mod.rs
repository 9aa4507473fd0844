//! Attention.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::attention::{PageLayout, Params};

const OP: &str = "attention";

/// The order of the dimensions inside a page of keys or values.
pub type unsloth_page_layout = u32;
/// `[num_pages, page_size, num_kv_heads, head_dim]`: tokens before heads.
pub const UNSLOTH_PAGE_LAYOUT_TOKEN_MAJOR: unsloth_page_layout = 0;
/// `[num_pages, num_kv_heads, page_size, head_dim]`: heads before tokens.
pub const UNSLOTH_PAGE_LAYOUT_HEAD_MAJOR: unsloth_page_layout = 1;

/// Arguments of `unsloth_attention_forward`: `out = softmax(scale * q k^T + ...) v`, exact.
///
/// For query `i` of a sequence with `Sq` queries and `Sk` keys, at position `p = i + Sk - Sq` among the keys (the last query is at the
/// last key, as in FlashAttention; PyTorch's `is_causal` aligns the first ones), and each key `j`:
///
/// ```text
/// s = scale * q[i] . k[j]
/// s = softcap * tanh(s / softcap)                           if softcap > 0
/// s = s + bias[b, h, i, j] - alibi_slopes[b, h] * |p - j|   those that are given
/// s = -inf where mask[b, h, i, j] is false, or causal and j > p,
///            or window_left > 0 and j <= p - window_left, or window_right > 0 and j >= p + window_right
/// lse[i] = ln(sum exp(s[j]) + exp(sinks[h]))                the last term if sinks are given
/// out[i] = sum exp(s[j] - lse[i]) v[j]
/// ```
///
/// A query that sees no key gives zeros and LSE -inf (the sink, if there is one). Query head `h` reads key head
/// `h / (num_heads / num_kv_heads)`. Scores and sums are f32. Keys that a mask hides may still be read, and a NaN in their `v` may
/// reach the output; what lies beyond a sequence's length is never read.
///
/// `unsloth_attention_merge_forward` merges attention over disjoint sets of keys: `lse = ln(exp(lse1) + exp(lse2))`,
/// `out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2` (ask for f32 outputs; give sinks to one part only).
///
/// Queries are batched, or packed where `cu_seqlens_q` is given. Keys are batched, packed where `cu_seqlens_k` is given, or paged
/// where `block_table` is given. Every combination is allowed. B, the batch size, is that of the queries.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_params {
    /// `sizeof(unsloth_attention_params)`.
    pub struct_size: u32,
    /// 1 if a query sees only keys up to its own position, else 0.
    pub causal: u32,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound of the scores through tanh; 0 for none.
    pub softcap: f32,
    /// How many keys a query sees up to its own position, counting its own; 0 for all. What model configurations call
    /// `sliding_window`; FlashAttention's left window plus one.
    pub window_left: i64,
    /// How many keys a query sees from its own position on, counting its own; 0 for all. 1 is the same as `causal`.
    /// FlashAttention's right window plus one.
    pub window_right: i64,
    /// No sequence of packed queries is longer; 0 for no better bound than all tokens.
    pub max_seqlen_q: i64,
    /// No sequence of padded, packed or paged keys is longer; 0 for no better bound than the room there is.
    pub max_seqlen_k: i64,
    /// One of `UNSLOTH_PAGE_LAYOUT_*`; used with `block_table`.
    pub page_layout: unsloth_page_layout,
    /// Zero.
    pub reserved: u32,
    /// `unsloth_attention_workspace_size` bytes aligned to 256; NULL where that is 0.
    pub workspace: *mut c_void,
    /// Bytes at `workspace`.
    pub workspace_size: usize,
    /// Queries `[B, Sq, num_heads, head_dim]`, or packed `[total_q, num_heads, head_dim]`; f32, f16 or bf16, any strides with a
    /// contiguous last dimension. `head_dim` and `head_dim_v` are at most 512.
    pub q: unsloth_tensor,
    /// Keys `[B, Sk, num_kv_heads, head_dim]`, packed `[total_k, num_kv_heads, head_dim]`, or pages as `page_layout` says with a page
    /// size that is a power of two; any float dtype, or f8e4m3 with the scale in `quantization` that codes are multiplied by: f32 `[1]`
    /// or `[num_kv_heads]` on the device, absent for 1. Strides as `q`.
    pub k: unsloth_tensor,
    /// Values like `k`, with a head dimension `head_dim_v` of their own; any float dtype, or f8e4m3 where `k` is, with a scale of
    /// their own.
    pub v: unsloth_tensor,
    /// Output: the shape of `q` with `head_dim_v`; the dtype of `q`, or f32. Tokens of packed queries that belong to no sequence are
    /// left as they are.
    pub out: unsloth_tensor,
    /// Optional output: f32 `[B, num_heads, Sq]`, or `[num_heads, total_q]` for packed queries.
    pub lse: unsloth_tensor,
    /// Optional: added to the scores. Any float dtype, `[B, num_heads, max_q, max_k]` where any size may be 1 to repeat; `max_q` is
    /// `Sq`, or `max_seqlen_q` (if 0, its bound) for packed queries; `max_k` likewise. Contiguous or repeated in the last dimension.
    pub bias: unsloth_tensor,
    /// Optional: nonzero where a query may see a key. Bool, sizes as `bias`; both may be given.
    pub mask: unsloth_tensor,
    /// Optional: f32 `[num_heads]` or `[B, num_heads]`.
    pub alibi_slopes: unsloth_tensor,
    /// Optional: f32 `[num_heads]`, a logit that takes part in each softmax and has no value.
    pub sinks: unsloth_tensor,
    /// Optional: i32 `[B + 1]`; sequence `b` of packed queries is tokens `cu_seqlens_q[b]` to before `cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: unsloth_tensor,
    /// Optional: i32 `[B + 1]`, the same for packed keys.
    pub cu_seqlens_k: unsloth_tensor,
    /// Optional, needed with `block_table`: i32 `[B]`, the number of keys of each sequence of a padded batch or of pages.
    pub seq_lens_k: unsloth_tensor,
    /// Optional: i32 `[B, max_pages]`, the pages of each sequence in order. Entries past the pages that hold keys are not read.
    pub block_table: unsloth_tensor,
}
params!(
    unsloth_attention_params,
    [
        reserved,
        q,
        k,
        v,
        out,
        lse,
        bias,
        mask,
        alibi_slopes,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seq_lens_k,
        block_table,
    ]
);

impl FromC for unsloth_attention_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let page_layout = PageLayout::from_raw(self.page_layout).ok_or_else(|| {
                let problem = text!("is {}, allowed: 0, 1", self.page_layout);
                Error::invalid(OP, "page_layout", problem)
            })?;
            Ok(Params {
                q: self.q.input(OP, "q")?,
                k: self.k.input(OP, "k")?,
                v: self.v.input(OP, "v")?,
                out: self.out.output(OP, "out")?,
                lse: self.lse.optional_output(OP, "lse")?,
                bias: self.bias.optional_input(OP, "bias")?,
                mask: self.mask.optional_input(OP, "mask")?,
                alibi_slopes: self.alibi_slopes.optional_input(OP, "alibi_slopes")?,
                sinks: self.sinks.optional_input(OP, "sinks")?,
                cu_seqlens_q: self.cu_seqlens_q.optional_input(OP, "cu_seqlens_q")?,
                cu_seqlens_k: self.cu_seqlens_k.optional_input(OP, "cu_seqlens_k")?,
                seq_lens_k: self.seq_lens_k.optional_input(OP, "seq_lens_k")?,
                block_table: self.block_table.optional_input(OP, "block_table")?,
                page_layout,
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
/// On a GPU of compute capability 9.0, `UNSLOTH_IMPLEMENTATION_CUDA_HOPPER` serves what meets all of these; every other call, and
/// every other GPU, gets the portable kernels of `UNSLOTH_IMPLEMENTATION_CUDA`:
///
/// - `q`, `k`, `v` and `out` are all f16 or all bf16, with head dimensions that are multiples of 8 up to 256;
/// - strides are multiples of 8 elements, and no entries repeat each other by a stride of zero; addresses should be multiples of 16
///   bytes, or this one call gets the portable kernels;
/// - there is no `bias`, `mask` or `alibi_slopes`, and the scale is positive;
/// - the longest sequence of queries, times the query heads per key head, is up to 16, and the head dimensions of keys and values are
///   both 64 or both 256 (both 128 only for one or two sequences times key heads, and for pages of up to 512 keys a sequence); or it is
///   more than 64, or less if there are enough sequences and key heads to keep the GPU busy. For the rest the portable kernels split
///   the keys;
/// - pages have 16 tokens or more.
///
/// Any combination of causal masks, windows, softcap, sinks, LSE, packed, padded and paged keys is served.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// The bytes of workspace that this call needs, exactly; 0 on the CPU backend. Data pointers are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes attention on `stream`. Neither allocates device memory nor synchronises, and may be captured into a CUDA graph.
///
/// The CPU backend checks `cu_seqlens_*`, `seq_lens_k` and `block_table` before it writes anything; on a GPU they lie in device
/// memory, which a launch does not read, and their contents are the caller's responsibility. On the CPU backend the result
/// does not depend on the number of threads.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the context's device
/// until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
