//! QK-norm and RoPE in one pass.

pub mod backward;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::rope::{positions, unsloth_rotation};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::qk_norm_rope::Params;

const OP: &str = "qk_norm_rope";

/// Arguments of `unsloth_qk_norm_rope_forward`: every head `x` of queries and keys becomes
/// `x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)` and is then rotated as
/// `unsloth_rope_forward` does. At least one of `q` and `k` is there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_qk_norm_rope_params {
    /// `sizeof(unsloth_qk_norm_rope_params)`.
    pub struct_size: u32,
    /// Added to the mean squares; must be above 0.
    pub epsilon: f32,
    /// Position of the first token of every sequence, where `positions` is absent.
    pub position_offset: i64,
    /// Added to every gain: 0 for Qwen 3, 1 for Gemma 3. 0 where there are no weights.
    pub weight_offset: f32,
    /// Zero.
    pub reserved: u32,
    /// How heads are rotated.
    pub rotation: unsloth_rotation,
    /// Optional: `[batch, seq, heads, head_dim]` or `[tokens, heads, head_dim]`, f32, f16 or bf16, any
    /// strides with a contiguous last dimension.
    pub q: unsloth_tensor,
    /// Like `q`. Absent, or the same tensor as `q`: `q` is overwritten.
    pub q_out: unsloth_tensor,
    /// Optional: like `q`, with any number of heads.
    pub k: unsloth_tensor,
    /// Like `k`. Absent, or the same tensor as `k`: `k` is overwritten.
    pub k_out: unsloth_tensor,
    /// Optional: i32 or i64 `[batch, seq]` or `[tokens]`, any strides (a batch stride of zero shares
    /// positions). With a table every position must lie inside; with CUDA, where the host cannot look,
    /// the rotated components of a token outside become NaN.
    pub positions: unsloth_tensor,
    /// Optional: gains of the queries, `[head_dim]`, any float dtype. Absent: all ones.
    pub q_weight: unsloth_tensor,
    /// Optional: gains of the keys; like `q_weight`.
    pub k_weight: unsloth_tensor,
}
params!(
    unsloth_qk_norm_rope_params,
    [
        reserved, rotation, q, q_out, k, k_out, positions, q_weight, k_weight
    ]
);

impl FromC for unsloth_qk_norm_rope_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                q: in_out(OP, ("q", "q_out"), &self.q, &self.q_out)?,
                k: in_out(OP, ("k", "k_out"), &self.k, &self.k_out)?,
                q_weight: self.q_weight.optional_input(OP, "q_weight")?,
                k_weight: self.k_weight.optional_input(OP, "k_weight")?,
                weight_offset: self.weight_offset,
                epsilon: self.epsilon,
                positions: positions(OP, &self.positions, self.position_offset)?,
                rotation: self.rotation.read(OP)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers are not looked at. The status and message are those the call itself would
/// give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_qk_norm_rope_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_qk_norm_rope_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Normalises and rotates on `stream`, in f32, rounding once. Needs no workspace; neither allocates
/// device memory nor synchronises, and may be captured into a CUDA graph.
///
/// `q_out` may be `q` and `k_out` may be `k`; other overlaps with an output are errors. Heads of q
/// and k may lie in one packed tensor.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_qk_norm_rope_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_qk_norm_rope_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
