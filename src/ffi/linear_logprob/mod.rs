//! Log-probabilities of given ids under a linear layer's output.

pub mod backward;

use std::ffi::c_void;

use crate::error::Result;
use crate::ffi::context::unsloth_context;
use crate::ffi::cross_entropy::ignored;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, unsloth_implementation, unsloth_stream};
use crate::ops::linear::Weights;
use crate::ops::linear_logprob::Params;

const OP: &str = "linear_logprob";

/// Arguments of `unsloth_linear_logprob_forward`. For a token with logits `z = x weight^T + bias` and
/// id `t`, with `s = z / temperature`, or `s = softcap tanh(z / softcap) / temperature`:
/// `lse = ln(sum(exp(s)))`, `logprob = s[t] - lse`, `entropy = -sum(p ln(p))` with `p = exp(s - lse)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_linear_logprob_params {
    /// `sizeof(unsloth_linear_logprob_params)`.
    pub struct_size: u32,
    /// 1 says that `ignore_index` is set; 0 ignores ids of -100.
    pub has_ignore_index: u32,
    /// With `has_ignore_index`: tokens with this id count for nothing; all that is
    /// computed of them is zero.
    pub ignore_index: i64,
    /// The most tokens whose logits are stored at a time. 0 for as many as
    /// `unsloth_linear_cross_entropy_forward` takes.
    pub chunk_tokens: i64,
    /// Divides logits, after the softcap; 0 for 1.
    pub temperature: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// `[.., hidden]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// `[vocab, hidden]`, any float dtype whatever that of `x`; any strides with a contiguous last
    /// dimension.
    pub weight: unsloth_tensor,
    /// Optional: `[vocab]`, any float dtype, contiguous.
    pub bias: unsloth_tensor,
    /// `[..]`, i32 or i64, any strides. One that is neither below `vocab` nor ignored is refused on
    /// the CPU with `UNSLOTH_STATUS_INVALID_ARGUMENT`; with CUDA, where the host cannot look, its
    /// log-probability is NaN.
    pub ids: unsloth_tensor,
    /// Optional, as are `entropy` and `lse`, of which one is there: f32 of the shape of `ids`,
    /// contiguous, the log-probability of each token's id.
    pub logprobs: unsloth_tensor,
    /// Optional: as `logprobs`, the entropy of each token's distribution, in nats.
    pub entropy: unsloth_tensor,
    /// Optional: as `logprobs`, the `lse` of each token.
    pub lse: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_linear_logprob_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(
    unsloth_linear_logprob_params,
    [x, weight, bias, ids, logprobs, entropy, lse]
);

impl FromC for unsloth_linear_logprob_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                x: self.x.input(OP, "x")?,
                weights: Weights {
                    weight: self.weight.input(OP, "weight")?,
                    bias: self.bias.optional_input(OP, "bias")?,
                },
                ids: self.ids.input(OP, "ids")?,
                logprobs: self.logprobs.optional_output(OP, "logprobs")?,
                entropy: self.entropy.optional_output(OP, "entropy")?,
                lse: self.lse.optional_output(OP, "lse")?,
                ignore_index: ignored(OP, self.has_ignore_index, self.ignore_index)?,
                temperature: self.temperature,
                softcap: self.softcap,
                chunk_tokens: count(OP, "chunk_tokens", self.chunk_tokens)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers and the workspace are not looked at. The status and message are those the
/// call itself would give, ids apart.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_logprob_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_logprob_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace with which the call is fastest: the logits of a
/// chunk, and what products take. With less the call is slower, or is refused with a status that says
/// what it needs. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_logprob_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_logprob_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes log-probabilities of given ids on `stream`, as DPO and GRPO ask of a policy. Logits are
/// never stored whole, and rounded to the dtype of `x`; other arithmetic is f32, and the same inputs
/// give the same bits. Neither allocates device memory nor synchronises, and may be captured into a
/// CUDA graph. Calls that may run at the same time must not share a workspace.
///
/// What is written may overlap nothing else that is looked at, nor the workspace.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are
/// valid on the context's device until the work has run; `stream` is NULL or a live stream of that
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_logprob_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_logprob_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
