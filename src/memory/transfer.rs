//! Copies and fills of raw memory, queued on a stream.

use crate::context::{Context, Device, Stream};
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
