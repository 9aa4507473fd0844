//! Reduction over all ranks, for all ranks.

use crate::error::Result;
use crate::ffi::comm::{comm_from, reduce_op_from, unsloth_comm, unsloth_reduce_op};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{absent, in_out, unsloth_tensor};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::all_reduce::Params;

const OP: &str = "all_reduce";

/// Arguments of `unsloth_all_reduce_forward`: `out = op(x of rank 0, x of rank 1, ..)` on all ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_all_reduce_params {
    /// `sizeof(unsloth_all_reduce_params)`.
    pub struct_size: u32,
    /// `UNSLOTH_REDUCE_OP_*`, the same on all ranks.
    pub op: unsloth_reduce_op,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// `[..]`, f32, f16, bf16, i32, i64 or i8, contiguous; as many elements of one dtype on all ranks.
    pub x: unsloth_tensor,
    /// The shape and dtype of `x`, contiguous. In place if it is the same tensor or absent.
    pub out: unsloth_tensor,
}
params!(unsloth_all_reduce_params, [x, out]);

impl WithC for unsloth_all_reduce_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let x = unsafe { in_out(OP, ("x", "out"), &self.x, &self.out) }?;
        let x = x.ok_or_else(|| absent(OP, "x"))?;
        let comm = &*comm_from(OP, self.comm)?;
        let op = reduce_op_from(OP, self.op)?;
        run(&Params { comm, x, op })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_reduce_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_reduce_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Queues it on `stream`; every rank of the group calls it. Needs no workspace. A rank of a local group waits for the others.
///
/// In a local group numbers are reduced in the order of ranks, in f32 (integers in 64 bits), and rounded once: every rank has the same
/// bits, and has them again.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_reduce_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_reduce_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
