//! A tensor to a rank, and one from a rank.

use crate::error::Result;
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{count, unsloth_implementation, unsloth_stream};
use crate::ops::send_receive::Params;

const OP: &str = "send_receive";

/// Arguments of `unsloth_send_receive_forward`: `x` goes to rank `to`, and `out` comes from rank `from`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_send_receive_params {
    /// `sizeof(unsloth_send_receive_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// With `x`: which rank it goes to.
    pub to: i32,
    /// With `out`: which rank it comes from. A rank that sends to itself also receives from itself.
    pub from: i32,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// Optional: what is sent, `[..]`, f32, f16, bf16, i32, i64, i8 or bool; contiguous. One of the two at least is there.
    pub x: unsloth_tensor,
    /// Optional: what is received, of as many elements as are sent and of their dtype; contiguous. It may not overlap `x`.
    pub out: unsloth_tensor,
}
params!(unsloth_send_receive_params, [reserved, x, out]);

impl WithC for unsloth_send_receive_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let (x, out) = unsafe {
            (
                self.x.optional_input(OP, "x")?,
                self.out.optional_output(OP, "out")?,
            )
        };
        let comm = &*comm_from(OP, self.comm)?;
        let x = match x {
            Some(x) => Some((x, count(OP, "to", self.to.into())?)),
            None => None,
        };
        let out = match out {
            Some(out) => Some((out, count(OP, "from", self.from.into())?)),
            None => None,
        };
        run(&Params { comm, x, out })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_send_receive_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_send_receive_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Queues it on `stream`. Only the two ranks of a transfer call it, each with its side; one that sends and receives, as in a ring, does
/// both in one call. Needs no workspace. A rank of a local group waits for the other one.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_send_receive_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_send_receive_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
