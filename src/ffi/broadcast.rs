//! What one rank has, for all ranks.

use crate::error::Result;
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{absent, in_out, unsloth_tensor};
use crate::ffi::{count, unsloth_implementation, unsloth_stream};
use crate::ops::broadcast::Params;
use crate::tensor::InOut;

const OP: &str = "broadcast";

/// Arguments of `unsloth_broadcast_forward`: `out = x of rank root` on all ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_broadcast_params {
    /// `sizeof(unsloth_broadcast_params)`.
    pub struct_size: u32,
    /// The rank that has it, the same on all ranks.
    pub root: i32,
    /// This rank's part in the group; of the same context.
    pub comm: *mut unsloth_comm,
    /// What the root has: the shape and dtype of `out`, contiguous. Others may leave it out, and its data is not looked at there. In
    /// place if it is absent or the same tensor as `out`.
    pub x: unsloth_tensor,
    /// `[..]`, f32, f16, bf16, i32, i64, i8 or bool, contiguous; as many elements of one dtype on all ranks.
    pub out: unsloth_tensor,
}
params!(unsloth_broadcast_params, [x, out]);

impl WithC for unsloth_broadcast_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let x = unsafe {
            match self.x.is_absent() {
                true => Some(InOut::InPlace(self.out.output(OP, "out")?)),
                false if self.out.is_absent() => None,
                false => in_out(OP, ("x", "out"), &self.x, &self.out)?,
            }
        };
        let x = x.ok_or_else(|| absent(OP, "out"))?;
        let comm = &*comm_from(OP, self.comm)?;
        let root = count(OP, "root", self.root.into())?;
        run(&Params { comm, x, root })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at, nor are the other ranks. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_broadcast_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_broadcast_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Queues it on `stream`; every rank of the group calls it. Needs no workspace. A rank of a local group waits for the others.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_broadcast_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_broadcast_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
