//! Reduction over all ranks, of which each gets its rows.

use crate::error::Result;
use crate::ffi::comm::{comm_from, counts_from, reduce_op_from, unsloth_comm, unsloth_reduce_op};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::reduce_scatter::Params;

const OP: &str = "reduce_scatter";

/// Arguments of `unsloth_reduce_scatter_forward`: `out` is this rank's rows of `op(x of rank 0, x of rank 1, ..)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_reduce_scatter_params {
    /// `sizeof(unsloth_reduce_scatter_params)`.
    pub struct_size: u32,
    /// `UNSLOTH_REDUCE_OP_*`, the same on all ranks.
    pub op: unsloth_reduce_op,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// Optional: the rows of each rank, one entry for each, on the host, the same on all ranks; NULL for as many of each.
    pub counts: *const i64,
    /// The rows of all ranks, `[rows, ..]`, f32, f16, bf16, i32, i64 or i8, contiguous; as many elements of one dtype on all ranks.
    pub x: unsloth_tensor,
    /// This rank's rows, of the dtype of `x`; contiguous. In place if it is absent or this rank's rows of `x`, which then become the
    /// result; the other rows stay as they are.
    pub out: unsloth_tensor,
}
params!(unsloth_reduce_scatter_params, [x, out]);

impl WithC for unsloth_reduce_scatter_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run; one that is in
        // place is written and not read through `x`.
        let (x, out) = unsafe {
            let out = self.out.optional_output(OP, "out")?;
            (self.x.output(OP, "x")?, out)
        };
        let comm = &*comm_from(OP, self.comm)?;
        let op = reduce_op_from(OP, self.op)?;
        // SAFETY: the caller promises an entry for each rank, and tensors as above.
        let params = unsafe {
            let counts = counts_from(OP, "counts", self.counts, comm.size())?;
            Params::new(comm, x, out, op, counts)
        };
        run(&params)
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its counts to an entry for each rank; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_reduce_scatter_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_reduce_scatter_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Queues it on `stream`; every rank of the group calls it. Needs no workspace. A rank of a local group waits for the others.
///
/// Numbers are those of `unsloth_all_reduce_forward`, in a local group bit for bit.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its counts to an entry for each rank; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_reduce_scatter_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_reduce_scatter_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
