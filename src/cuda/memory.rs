//! Memory and streams of a device.

use super::Cuda;
use super::device::NON_BLOCKING;
use super::driver::{CUdeviceptr, CUpointer_attribute, CUstream, OUT_OF_MEMORY};
use super::staging::Ring;
use crate::alloc::boxed;
use crate::backend::{Allocation, Backend, CopyKind, Device, ProductShape, Stream, Upload};
use crate::error::{Error, Result, text};

fn raw(stream: Stream) -> CUstream {
    stream.as_raw().cast()
}

fn pointer(ptr: CUdeviceptr) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(ptr as usize)
}

fn is_out_of_memory(result: &Result<()>) -> bool {
    matches!(result, Err(Error::Cuda { code, .. }) if *code == OUT_OF_MEMORY)
}

impl Cuda {
    /// Writes zeros, and waits for them. A context is current.
    ///
    /// # Safety
    /// The range is allocated, and nobody else uses it.
    pub unsafe fn zero(&self, op: &'static str, ptr: CUdeviceptr, bytes: usize) -> Result<()> {
        let driver = self.resources.primary.driver;
        // SAFETY: the caller's promise; the stream is this device's own.
        unsafe {
            driver.memset(op, ptr, 0, bytes, self.internal)?;
            driver.stream_synchronize(op, self.internal)
        }
    }

    /// Tries to allocate, again without what the pool keeps if there is too little memory.
    fn allocate(
        &self,
        op: &'static str,
        size: usize,
        mut attempt: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut result = attempt();
        if is_out_of_memory(&result)
            && let Some(pool) = &self.pool
            && pool.trim(op, 0).is_ok()
        {
            result = attempt();
        }
        if !is_out_of_memory(&result) {
            return result;
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes; a context is current.
        unsafe {
            let driver = self.resources.primary.driver;
            driver.mem_info(op, &mut free, &mut total)?;
        }
        Err(Error::OutOfMemory {
            op,
            requested: size as u64,
            reason: text!("{free} of the device's {total} bytes are free"),
        })
    }
}

impl Device for Cuda {
    fn backend(&self) -> Backend {
        Backend::Cuda
    }

    fn ordinal(&self) -> i32 {
        self.resources.ordinal()
    }

    fn staging(&self, op: &'static str, size: usize) -> Result<Box<dyn Upload>> {
        Ok(boxed(op, Ring::new(op, self, size)?)?)
    }

    /// Allocates zeroed memory. Every stream may use it at once.
    ///
    /// It comes from the device itself, not from the pool: it lives long, and the device has it back when it is freed. It can be given
    /// to NCCL and to other processes, too.
    fn alloc(&self, op: &'static str, size: usize) -> Result<Allocation> {
        let driver = self.resources.primary.driver;
        let _entered = self.resources.primary.enter(op)?;
        // The caller gets an address even for zero bytes, for which the driver has none.
        let bytes = size.max(1);
        let mut ptr = 0;
        // SAFETY: `ptr` is valid for a write, and a context is current; the range was just allocated.
        unsafe {
            self.allocate(op, size, || driver.mem_alloc(op, &mut ptr, bytes))?;
            if let Err(error) = self.zero(op, ptr, bytes) {
                let _ = driver.mem_free(op, ptr);
                return Err(error);
            }
        }
        Ok(Allocation {
            ptr: pointer(ptr),
            size,
            pooled: false,
        })
    }

    /// Allocates memory in the order of a stream, with unspecified contents, and says whether it is the pool's.
    ///
    /// # Safety
    /// The stream is live, of this device, and not captured.
    unsafe fn alloc_async(
        &self,
        op: &'static str,
        size: usize,
        stream: Stream,
    ) -> Result<Allocation> {
        let Some(pool) = &self.pool else {
            return self.alloc(op, size);
        };
        let _entered = self.resources.primary.enter(op)?;
        let mut ptr = 0;
        self.allocate(op, size, || {
            // SAFETY: the caller's promise; a context is current.
            ptr = unsafe { pool.alloc(op, size.max(1), raw(stream)) }?;
            Ok(())
        })?;
        Ok(Allocation {
            ptr: pointer(ptr),
            size,
            pooled: true,
        })
    }

    /// Frees memory, after everything queued on the device.
    ///
    /// # Safety
    /// `ptr` came from this device, and is not used again.
    unsafe fn free(&self, op: &'static str, memory: Allocation) -> Result<()> {
        let driver = self.resources.primary.driver;
        let _entered = self.resources.primary.enter(op)?;
        let ptr = memory.ptr.addr() as u64;
        // SAFETY: the caller's promise.
        unsafe {
            if !memory.pooled {
                return driver.mem_free(op, ptr);
            }
            driver.context_synchronize(op)?;
            driver.pool_free(op, ptr, self.internal)
        }
    }

    /// Frees memory after everything queued on a stream; memory that is not the pool's has to wait for it.
    ///
    /// # Safety
    /// As [`Device::free`], but work on `stream` may use the memory; the stream is live, of this device, and not captured.
    unsafe fn free_async(
        &self,
        op: &'static str,
        memory: Allocation,
        stream: Stream,
    ) -> Result<()> {
        let driver = self.resources.primary.driver;
        let _entered = self.resources.primary.enter(op)?;
        let ptr = memory.ptr.addr() as u64;
        // SAFETY: the caller's promise.
        unsafe {
            if memory.pooled {
                return driver.pool_free(op, ptr, raw(stream));
            }
            driver.stream_synchronize(op, raw(stream))?;
            driver.mem_free(op, ptr)
        }
    }

    /// Bytes that the pool holds of the device's memory.
    fn pool_size(&self, op: &'static str) -> Result<u64> {
        match &self.pool {
            Some(pool) => pool.size(op),
            None => Ok(0),
        }
    }

    /// Returns what the pool holds and nobody uses to the device, until it holds `keep` bytes.
    fn trim_pool(&self, op: &'static str, keep: usize) -> Result<()> {
        let Some(pool) = &self.pool else {
            return Ok(());
        };
        let _entered = self.resources.primary.enter(op)?;
        pool.trim(op, keep)
    }

    /// Whether work queued on a stream becomes part of a graph instead of running.
    fn is_capturing(&self, op: &'static str, stream: Stream) -> Result<bool> {
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: a `Stream` is live and of this device: that is the promise of whoever made it.
        unsafe { self.resources.primary.driver.is_capturing(op, raw(stream)) }
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// Both ranges are valid on their sides until the copy has run; the stream is live and of this device.
    unsafe fn copy(
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
    /// As [`Device::copy`].
    unsafe fn upload(
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
    unsafe fn set(
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

    fn check_stream(&self, _: &'static str, _: Stream) -> Result<()> {
        // The driver knows its streams.
        Ok(())
    }

    fn warm_up(&self, op: &'static str, products: &[ProductShape]) -> Result<()> {
        self.warm_up_products(op, products)
    }

    fn synchronize(&self, op: &'static str, stream: Stream) -> Result<()> {
        let _entered = self.resources.primary.enter(op)?;
        // SAFETY: a `Stream` is live and of this device: that is the promise of whoever made it.
        unsafe {
            self.resources
                .primary
                .driver
                .stream_synchronize(op, raw(stream))
        }
    }

    fn synchronize_device(&self, op: &'static str) -> Result<()> {
        let primary = &self.resources.primary;
        let _entered = primary.enter(op)?;
        // SAFETY: a context is current.
        unsafe { primary.driver.context_synchronize(op) }
    }

    fn create_stream(&self, op: &'static str) -> Result<Stream> {
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
    /// The stream is the default one or came from [`Device::create_stream`], and is not used again.
    unsafe fn destroy_stream(&self, op: &'static str, stream: Stream) -> Result<()> {
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
