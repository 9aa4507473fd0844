//! Copies and fills of raw memory, queued on a stream.

use crate::backend::{CopyKind, Stream};
use crate::context::Context;
use crate::error::Result;

/// Queues a copy of `size` bytes.
///
/// # Safety
/// Both ranges are valid on the sides that `kind` names until the copy has run, and do not overlap.
///
/// # Errors
/// The driver refuses.
pub unsafe fn copy(
    context: &Context,
    dst: *mut u8,
    src: *const u8,
    size: usize,
    kind: CopyKind,
    stream: Stream,
) -> Result<()> {
    let device = context.device();
    // SAFETY: the caller's promise: both ranges are valid on their sides until the copy has run.
    unsafe { device.copy("memory_copy", dst, src, size, kind, stream) }
}

/// Queues a copy of `size` bytes from memory of another context to memory of `context`, of the same
/// backend, on a stream of `context`. Devices that can reach each other's memory are given access to it
/// at the first copy between them; others copy by way of the host. That first copy should not be one
/// that is captured.
///
/// # Safety
/// Both ranges are valid on their contexts' devices until the copy has run, and do not overlap.
///
/// # Errors
/// The backends differ, or the driver refuses.
pub unsafe fn copy_peer(
    context: &Context,
    dst: *mut u8,
    src_context: &Context,
    src: *const u8,
    size: usize,
    stream: Stream,
) -> Result<()> {
    // SAFETY: the caller's promise: both ranges are valid on their devices until the copy has run.
    unsafe { context.copy_peer("memory_copy_peer", dst, src_context, src, size, stream) }
}

/// Queues setting `size` bytes to `value`.
///
/// # Safety
/// The range is valid on the context's device until the work has run.
///
/// # Errors
/// The driver refuses.
pub unsafe fn set(
    context: &Context,
    dst: *mut u8,
    value: u8,
    size: usize,
    stream: Stream,
) -> Result<()> {
    // SAFETY: the caller's promise: the range is valid until the work has run.
    unsafe { context.device().set("memory_set", dst, value, size, stream) }
}
