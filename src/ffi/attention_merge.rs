//! Parts of attention over disjoint sets of keys, as one.

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::attention_merge::Params;

const OP: &str = "attention_merge";

/// Arguments of `unsloth_attention_merge_forward`: attention of the same queries over disjoint sets of keys, as attention
/// over all of these. `lse = ln(sum of exp(lses[p]))` and `out = sum of exp(lses[p] - lse) * outs[p]` over parts `p`, in
/// their order and in f32. A part of which a query sees no key, its LSE being -inf, counts for nothing, whatever its
/// output; where all are such, the output is zeros and its LSE -inf.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_merge_params {
    /// `sizeof(unsloth_attention_merge_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// The outputs of parts, `[parts, B, S, num_heads, head_dim]` or, of packed queries, `[parts, total, num_heads,
    /// head_dim]`; f32, f16 or bf16, any strides with a contiguous last dimension. f32 rounds once.
    pub outs: unsloth_tensor,
    /// Their `lse`: f32 `[parts, B, num_heads, S]`, or `[parts, num_heads, total]`; any strides.
    pub lses: unsloth_tensor,
    /// Output `[B, S, num_heads, head_dim]` or `[total, num_heads, head_dim]`, f32, f16 or bf16; any strides with a
    /// contiguous last dimension.
    pub out: unsloth_tensor,
    /// Optional output: f32 `[B, num_heads, S]`, or `[num_heads, total]`; any strides.
    pub lse: unsloth_tensor,
}
params!(
    unsloth_attention_merge_params,
    [reserved, outs, lses, out, lse]
);

impl FromC for unsloth_attention_merge_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                outs: self.outs.input(OP, "outs")?,
                lses: self.lses.input(OP, "lses")?,
                out: self.out.output(OP, "out")?,
                lse: self.lse.optional_output(OP, "lse")?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_merge_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_merge_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Computes on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_merge_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_merge_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
