//! Copies and fills of raw memory, queued on a stream.

use crate::context::{Context, Device, Stream};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;

/// Between which memories a copy goes. The discriminants are those of the C ABI (`UNSLOTH_COPY_KIND_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CopyKind {
    /// From the host to the context's device.
    HostToDevice = 1,
    /// From the context's device to the host.
    DeviceToHost = 2,
    /// Within the context's device.
    DeviceToDevice = 3,
}

impl CopyKind {
    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<CopyKind> {
        use CopyKind::{DeviceToDevice, DeviceToHost, HostToDevice};
        [HostToDevice, DeviceToHost, DeviceToDevice]
            .into_iter()
            .find(|k| *k as u32 == value)
    }
}

/// Queues a copy of `size` bytes.
///
/// # Safety
/// Both ranges are valid on the sides that `kind` names until the copy has run, and do not overlap.
///
/// # Errors
/// The driver refuses.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub unsafe fn copy(
    context: &Context,
    dst: *mut u8,
    src: *const u8,
    size: usize,
    kind: CopyKind,
    stream: Stream,
) -> Result<()> {
    match context.device() {
        Device::Cpu(_) => {
            if size > 0 {
                // SAFETY: the caller's promise; device and host are the same memory here.
                unsafe { std::ptr::copy_nonoverlapping(src, dst, size) };
            }
            Ok(())
        }
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's promise.
        Device::Cuda(cuda) => unsafe { cuda.copy("memory_copy", dst, src, size, kind, stream) },
    }
}

/// Queues a copy of `size` bytes from memory of another context to memory of `context`, of the same backend, on a stream of
/// `context`. Devices that can reach each other's memory are given access to it at the first copy between them; others copy by way
/// of the host. That first copy should not be one that is captured.
///
/// # Safety
/// Both ranges are valid on their contexts' devices until the copy has run, and do not overlap.
///
/// # Errors
/// The backends differ, or the driver refuses.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub unsafe fn copy_peer(
    context: &Context,
    dst: *mut u8,
    src_context: &Context,
    src: *const u8,
    size: usize,
    stream: Stream,
) -> Result<()> {
    #[cfg(feature = "cuda")]
    const OP: &str = "memory_copy_peer";
    match (context.device(), src_context.device()) {
        // SAFETY: the caller's promise; the two contexts share the host's memory.
        (Device::Cpu(_), Device::Cpu(_)) => unsafe {
            copy(context, dst, src, size, CopyKind::DeviceToDevice, stream)
        },
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's promise.
        (Device::Cuda(to), Device::Cuda(from)) => unsafe {
            to.copy_peer(OP, dst, from, src, size, stream)
        },
        #[cfg(feature = "cuda")]
        _ => {
            let problem = format!(
                "is on the {} backend, ctx on the {} backend: copies between host and device have a kind",
                src_context.backend(),
                context.backend()
            );
            Err(Error::invalid(OP, "src_ctx", problem))
        }
    }
}

/// Queues setting `size` bytes to `value`.
///
/// # Safety
/// The range is valid on the context's device until the work has run.
///
/// # Errors
/// The driver refuses.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub unsafe fn set(
    context: &Context,
    dst: *mut u8,
    value: u8,
    size: usize,
    stream: Stream,
) -> Result<()> {
    match context.device() {
        Device::Cpu(_) => {
            if size > 0 {
                // SAFETY: the caller's promise.
                unsafe { std::ptr::write_bytes(dst, value, size) };
            }
            Ok(())
        }
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's promise.
        Device::Cuda(cuda) => unsafe { cuda.set("memory_set", dst, value, size, stream) },
    }
}
