//! Rows from every rank to every rank.

use crate::error::Result;
use crate::ffi::comm::{comm_from, counts_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::all_to_all::Params;

const OP: &str = "all_to_all";

/// Arguments of `unsloth_all_to_all_forward`: `out` is what rank 0 sends to this one, then what rank 1 does, and so on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_all_to_all_params {
    /// `sizeof(unsloth_all_to_all_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// Optional: the rows of `x` for each rank, one entry for each, on the host; NULL for as many for each.
    pub send_counts: *const i64,
    /// Optional: the rows of `out` from each rank, which are those that it sends; NULL for as many from each.
    pub receive_counts: *const i64,
    /// `[rows, ..]`: the rows for rank 0, then those for rank 1, and so on. f32, f16, bf16, i32, i64, i8 or bool, of one dtype on all ranks; contiguous.
    pub x: unsloth_tensor,
    /// Rows like those of `x`, contiguous; it may not overlap `x`.
    pub out: unsloth_tensor,
}
params!(unsloth_all_to_all_params, [reserved, x, out]);

impl WithC for unsloth_all_to_all_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let (x, out) = unsafe { (self.x.input(OP, "x")?, self.out.output(OP, "out")?) };
        let comm = &*comm_from(OP, self.comm)?;
        // SAFETY: the caller promises an entry for each rank.
        let (send_counts, receive_counts) = unsafe {
            (
                counts_from(OP, "send_counts", self.send_counts, comm.size())?,
                counts_from(OP, "receive_counts", self.receive_counts, comm.size())?,
            )
        };
        run(&Params {
            comm,
            x,
            out,
            send_counts,
            receive_counts,
        })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its counts to an entry for each rank; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_to_all_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_to_all_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Queues it on `stream`; every rank of the group calls it. Needs no workspace. A rank of a local group waits for the others.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its counts to an entry for each rank; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_all_to_all_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_all_to_all_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
