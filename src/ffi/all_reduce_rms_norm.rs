//! A sum over all ranks and its RMSNorm, for all ranks.

use crate::error::Result;
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{absent, in_out, unsloth_tensor};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::all_reduce_rms_norm::Params;

const OP: &str = "all_reduce_rms_norm";

/// Arguments of `unsloth_all_reduce_rms_norm_forward`: `y = s / sqrt(mean(s^2) + epsilon) * (weight + weight_offset)` over the last
/// dimension, on all ranks, with `s = residual + x of rank 0 + x of rank 1 + ..`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_all_reduce_rms_norm_params {
    /// `sizeof(unsloth_all_reduce_rms_norm_params)`.
    pub struct_size: u32,
    /// Added to the mean square; must be above 0.
    pub epsilon: f32,
    /// Added to every gain: 0 for Llama, 1 for Gemma. 0 without a weight.
    pub weight_offset: f32,
    /// 1 for sequence parallelism: the first dimension of the residual stream is divided evenly among the ranks, in their order, and
    /// each adds up and normalises its own rows; `x` has two dimensions or more then. 0: every rank has all of it.
    pub sequence: u32,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// `[.., dim]`, this rank's part of the sum: f32, f16 or bf16, contiguous; of one shape and dtype on all ranks.
    pub x: unsloth_tensor,
    /// Like `x`. Absent, or the same tensor as `x`: `x` is overwritten.
    pub out: unsloth_tensor,
    /// Optional: gains `[dim]`, any float dtype, the same on all ranks. Absent: all ones.
    pub weight: unsloth_tensor,
    /// Optional: added to the sum; like `x`, and the same on all ranks. With `sequence` this rank's rows of it alone.
    pub residual: unsloth_tensor,
    /// Receives `s`; like `residual`. Absent, or the same tensor as `residual`: `residual` is overwritten.
    pub residual_out: unsloth_tensor,
}
params!(
    unsloth_all_reduce_rms_norm_params,
    [x, out, weight, residual, residual_out]
);

impl WithC for unsloth_all_reduce_rms_norm_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let (x, residual, weight) = unsafe {
            let names = ("residual", "residual_out");
            (
                in_out(OP, ("x", "out"), &self.x, &self.out)?,
                in_out(OP, names, &self.residual, &self.residual_out)?,
                self.weight.optional_input(OP, "weight")?,
            )
        };
        let x = x.ok_or_else(|| absent(OP, "x"))?;
        let comm = &*comm_from(OP, self.comm)?;
        run(&Params {
            comm,
            x,
            residual,
            weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
            sequence: flag(OP, "sequence", self.sequence)?,
        })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_reduce_rms_norm_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_reduce_rms_norm_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Adds up and normalises on `stream`; every rank of the group calls it. Needs no workspace; neither allocates nor synchronises, and may
/// be captured into a CUDA graph. A rank of a local group waits for the others.
///
/// It is `unsloth_all_reduce_forward` and `unsloth_rms_norm_forward`. Of up to eight rows of up to 16 KiB, where
/// `unsloth_comm_warm_up` gave ranks slots at each other, it is one launch, with sums in f32 in the order of ranks: it waits on the device for the
/// other ranks, until they come or `unsloth_comm_abort` is called. Calls of one group are on one stream, or on streams that the
/// caller orders. Every rank has the same bits.
///
/// With `sequence` it is `unsloth_reduce_scatter_forward`, `unsloth_rms_norm_forward` of this rank's rows and
/// `unsloth_all_gather_forward`. Where `x` and `out` are two tensors in memory of `unsloth_comm_memory_alloc`, at the same place in it on all ranks, rows are of
/// up to 32 KiB and a multiple of 16 bytes, and NCCL is 2.28 or later, ranks send each other their parts of the sum as they are, and one kernel
/// adds them up in f32, in the order of ranks, and normalises. In a group that the library made copy engines do all of the sending: products on
/// another stream lose no multiprocessor to it, where a reduction by NCCL's kernels costs those beside it nearly its own time.
///
/// `out` may be `x` and `residual_out` may be `residual`; other overlaps with an output are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_reduce_rms_norm_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_reduce_rms_norm_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
