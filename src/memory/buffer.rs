//! Owned memory of a context.

use std::alloc::Layout as AllocLayout;

use crate::context::{Context, Device, Stream};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::tensor::{TensorMut, TensorRef, Workspace};

/// Uninitialised-or-written memory on a context's device, freed when dropped; aligned to [`Workspace::ALIGNMENT`] bytes.
///
/// A buffer keeps its context alive. Contents are zero when it is made.
#[derive(Debug)]
pub struct Buffer {
    ptr: *mut u8,
    size: usize,
    context: Context,
}

// SAFETY: a Buffer owns its memory; shared access only reads the pointer.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `size` zeroed bytes on the device of `context`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limit would be passed or the device has no more.
    pub fn new(context: &Context, size: usize) -> Result<Buffer> {
        const OP: &str = "memory";
        let bytes = size as u64;
        context.accountant().reserve(OP, bytes)?;
        let allocated = match context.device() {
            Device::Cpu(_) => Ok(host_alloc(size)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.alloc(OP, size),
        };
        let allocated = allocated.and_then(|ptr| {
            ptr.ok_or_else(|| Error::OutOfMemory {
                op: OP,
                requested: bytes,
                reason: "the device has too little free memory".into(),
            })
        });
        match allocated {
            Ok(ptr) => Ok(Buffer {
                ptr,
                size,
                context: context.clone(),
            }),
            Err(error) => {
                context.accountant().release(bytes);
                Err(error)
            }
        }
    }

    /// A buffer with the bytes of `data`.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn from_slice<T: Element>(context: &Context, data: &[T]) -> Result<Buffer> {
        let mut buffer = Buffer::new(context, std::mem::size_of_val(data))?;
        buffer.copy_from_slice(0, data, Stream::DEFAULT)?;
        context.synchronize(Stream::DEFAULT)?;
        Ok(buffer)
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Address on the device; never NULL, aligned to [`Workspace::ALIGNMENT`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Queues a copy of `data` to `offset` bytes into the buffer.
    ///
    /// # Errors
    /// The range is outside the buffer, or the driver refuses.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn copy_from_slice<T: Element>(
        &mut self,
        offset: usize,
        data: &[T],
        stream: Stream,
    ) -> Result<()> {
        let bytes = std::mem::size_of_val(data);
        self.check_range(offset, bytes)?;
        match self.context.device() {
            Device::Cpu(_) => {
                // SAFETY: the range was checked, and `self` is borrowed mutably so `data` is not part of it.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        data.as_ptr().cast(),
                        self.ptr.add(offset),
                        bytes,
                    );
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let to = self.ptr.wrapping_add(offset);
                // SAFETY: the range was checked, and the copy is done with `data` when it returns.
                unsafe { cuda.upload("memory", to, data.as_ptr().cast(), bytes, stream) }
            }
        }
    }

    /// Copies `count` elements from `offset` bytes into the buffer to the host, after everything queued on `stream`.
    ///
    /// # Errors
    /// The range is outside the buffer or misaligned, or the driver refuses.
    pub fn to_vec<T: Element>(
        &self,
        offset: usize,
        count: usize,
        stream: Stream,
    ) -> Result<Vec<T>> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid(
                "memory",
                "count",
                format!("{count} overflows the address space"),
            )
        })?;
        self.check_range(offset, bytes)?;
        if T::DTYPE == DType::Bool {
            return Err(Error::unsupported(
                "memory",
                "dtype",
                "bool cannot be read back; read i8",
            ));
        }
        let mut out: Vec<T> = Vec::with_capacity(count);
        match self.context.device() {
            Device::Cpu(_) => {
                self.context.synchronize(stream)?;
                // SAFETY: the source range was checked; the destination has room for `count` elements; every bit pattern is a
                // value of the remaining element types (bool was refused).
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        self.ptr.add(offset),
                        out.as_mut_ptr().cast(),
                        bytes,
                    );
                    out.set_len(count);
                }
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let from = self.ptr.wrapping_add(offset).cast_const();
                let to = out.as_mut_ptr().cast();
                let kind = crate::memory::CopyKind::DeviceToHost;
                // SAFETY: as above, and nothing looks at the elements before the copy has run.
                unsafe {
                    cuda.copy("memory", to, from, bytes, kind, stream)?;
                    cuda.synchronize("memory", stream)?;
                    out.set_len(count);
                }
            }
        }
        Ok(out)
    }

    /// A view of part of the buffer, from `offset` bytes on.
    ///
    /// # Errors
    /// The view does not fit the buffer or is misaligned.
    pub fn tensor(&self, offset: usize, dtype: DType, layout: Layout) -> Result<TensorRef<'_>> {
        self.check_view(offset, dtype, &layout)?;
        // SAFETY: the range lies in memory that `self` owns and that was initialised when it was made.
        Ok(unsafe { TensorRef::from_raw(self.ptr.add(offset), dtype, layout) })
    }

    /// A writable view of part of the buffer, from `offset` bytes on.
    ///
    /// # Errors
    /// The view does not fit the buffer or is misaligned.
    pub fn tensor_mut(
        &mut self,
        offset: usize,
        dtype: DType,
        layout: Layout,
    ) -> Result<TensorMut<'_>> {
        self.check_view(offset, dtype, &layout)?;
        // SAFETY: the range lies in memory that `self` owns, borrowed mutably for as long as the view lives.
        Ok(unsafe { TensorMut::from_raw(self.ptr.add(offset), dtype, layout) })
    }

    /// The whole buffer as a workspace.
    pub fn workspace(&mut self) -> Workspace<'_> {
        // SAFETY: `self` owns the memory and is borrowed mutably for as long as the workspace lives.
        unsafe { Workspace::from_raw(self.ptr, self.size) }
    }

    fn check_view(&self, offset: usize, dtype: DType, layout: &Layout) -> Result<()> {
        self.check_range(offset, layout.span() * dtype.size())?;
        if offset.is_multiple_of(dtype.size()) {
            return Ok(());
        }
        Err(Error::invalid(
            "memory",
            "offset",
            format!("{offset} is not a multiple of {} bytes", dtype.size()),
        ))
    }

    fn check_range(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.size)
        {
            return Ok(());
        }
        Err(Error::invalid(
            "memory",
            "range",
            format!(
                "of {bytes} bytes from {offset} is outside the buffer of {} bytes",
                self.size
            ),
        ))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.context.device() {
            // SAFETY: allocated by `host_alloc` with this size, and dropped once.
            Device::Cpu(_) => unsafe { host_free(self.ptr, self.size) },
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                // SAFETY: allocated by the device, and dropped once. A lost context has freed it already.
                let _ = unsafe { cuda.free("memory", self.ptr) };
            }
        }
        self.context.accountant().release(self.size as u64);
    }
}

fn host_layout(size: usize) -> Option<AllocLayout> {
    AllocLayout::from_size_align(size.max(1), Workspace::ALIGNMENT).ok()
}

fn host_alloc(size: usize) -> Option<*mut u8> {
    let layout = host_layout(size)?;
    // SAFETY: the layout's size is not zero.
    let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
    (!ptr.is_null()).then_some(ptr)
}

/// # Safety
/// `ptr` came from `host_alloc(size)` and has not been freed.
unsafe fn host_free(ptr: *mut u8, size: usize) {
    if let Some(layout) = host_layout(size) {
        // SAFETY: the caller's promise, with the layout computed as at allocation.
        unsafe { std::alloc::dealloc(ptr, layout) }
    }
}
