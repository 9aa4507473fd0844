//! Memory and streams of a device.

use super::Cuda;
use super::device::NON_BLOCKING;
use super::driver::{CUpointer_attribute, CUstream};
use crate::context::Stream;
use crate::error::Result;
use crate::memory::CopyKind;

fn raw(stream: Stream) -> CUstream {
    stream.as_raw().cast()
}

impl Cuda {
    /// Allocates zeroed memory, or says that there is none. Every stream may use it at once.
    pub fn alloc(&self, op: &'static str, size: usize) -> Result<Option<*mut u8>> {
        let primary = &self.resources.primary;
        let driver = primary.driver;
        let internal = self.resources.internal;
        let _entered = primary.enter(op)?;
        // An address is due even for no bytes, and the driver gives none for zero.
        let size = size.max(1);
        // SAFETY: a context is current; the range was just allocated.
        unsafe {
            let Some(ptr) = driver.allocate(op, size)? else {
                return Ok(None);
            };
            let zeroed = driver
                .memset(op, ptr, 0, size, internal)
                .and_then(|()| driver.stream_synchronize(op, internal));
            if let Err(error) = zeroed {
                let _ = driver.mem_free(op, ptr);
                return Err(error);
            }
            Ok(Some(std::ptr::with_exposed_provenance_mut(ptr as usize)))
        }
    }

    /// Frees memory, after everything queued on the device.
    ///
    /// # Safety
    /// `ptr` came from [`Cuda::alloc`] and is not used again.
    pub unsafe fn free(&self, op: &'static str, ptr: *mut u8) -> Result<()> {
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.resources
                .primary
                .driver
                .mem_free(op, ptr.addr() as u64)
        }
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// Both ranges are valid on their sides until the copy has run; the stream is live and of this device.
    pub unsafe fn copy(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        kind: CopyKind,
        stream: Stream,
    ) -> Result<()> {
        if size == 0 {
            return Ok(());
        }
        let driver = self.resources.primary.driver;
        let _entered = self.resources.primary.enter(op)?;
        let (from, to) = (src.addr() as u64, dst.addr() as u64);
        // SAFETY: the caller's promise.
        unsafe {
            match kind {
                CopyKind::HostToDevice => {
                    driver.host_to_device(op, to, src.cast(), size, raw(stream))
                }
                CopyKind::DeviceToHost => {
                    driver.device_to_host(op, dst.cast(), from, size, raw(stream))
                }
                CopyKind::DeviceToDevice => {
                    driver.device_to_device(op, to, from, size, raw(stream))
                }
            }
        }
    }

    /// Queues a copy to the device that is done with `src` when it returns.
    ///
    /// # Safety
    /// As [`Cuda::copy`].
    pub unsafe fn upload(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        let driver = self.resources.primary.driver;
        // SAFETY: the caller's promise.
        unsafe { self.copy(op, dst, src, size, CopyKind::HostToDevice, stream) }?;
        // The driver stages pageable memory before it returns, but reads page-locked memory, of which alone it knows, later.
        let mut kind = 0u32;
        let mut attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let mut value = (&raw mut kind).cast();
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: `kind` is valid for a write of the attribute's 32 bits; of an address that it does not know the driver writes zero.
        unsafe {
            driver.pointer_attributes(op, 1, &mut attribute, &mut value, src.addr() as u64)?;
            match kind {
                0 => Ok(()),
                _ => driver.stream_synchronize(op, raw(stream)),
            }
        }
    }

    /// Queues setting bytes.
    ///
    /// # Safety
    /// The range is valid until the work has run; the stream is live and of this device.
    pub unsafe fn set(
        &self,
        op: &'static str,
        dst: *mut u8,
        value: u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        if size == 0 {
            return Ok(());
        }
        let _entered = self.resources.primary.enter(op)?;
        let driver = self.resources.primary.driver;
        // SAFETY: the caller's promise.
        unsafe { driver.memset(op, dst.addr() as u64, value, size, raw(stream)) }
    }

    pub fn synchronize(&self, op: &'static str, stream: Stream) -> Result<()> {
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: a `Stream` is live and of this device: that is the promise of whoever made it.
        unsafe {
            self.resources
                .primary
                .driver
                .stream_synchronize(op, raw(stream))
        }
    }

    pub fn create_stream(&self, op: &'static str) -> Result<Stream> {
        let mut stream = std::ptr::null_mut();
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: valid for a write; a context is current; what the driver makes is a live stream of this device.
        unsafe {
            let driver = self.resources.primary.driver;
            driver.stream_create(op, &mut stream, NON_BLOCKING)?;
            Ok(Stream::from_raw(stream.cast()))
        }
    }

    /// Ends a stream after the work queued on it.
    ///
    /// # Safety
    /// The stream is the default one or came from [`Cuda::create_stream`], and is not used again.
    pub unsafe fn destroy_stream(&self, op: &'static str, stream: Stream) -> Result<()> {
        if stream == Stream::DEFAULT {
            return Ok(());
        }
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.resources
                .primary
                .driver
                .stream_destroy(op, raw(stream))
        }
    }
}
