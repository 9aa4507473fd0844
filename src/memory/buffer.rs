//! Owned memory of a context.

use crate::backend::{Allocation, CopyKind, Stream};
use crate::context::Context;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::tensor::{TensorMut, TensorRef, Workspace};

const OP: &str = "memory";

const ALLOCATE_OUTSIDE: &str = "allocate before the capture";
pub(crate) const FREE_OUTSIDE: &str = "free after the capture";

/// Memory on a context's device, freed when dropped; aligned to [`Workspace::ALIGNMENT`] bytes.
///
/// A buffer keeps its context alive. Contents are zero when [`Buffer::new`] made it.
#[derive(Debug)]
pub struct Buffer {
    memory: Allocation,
    context: Context,
}

// SAFETY: a Buffer owns its memory; shared access only reads the pointer.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `size` zeroed bytes on the device of `context`. Waits for the device to write them.
    /// With the CPU backend on Linux 4 MiB and more are mapped, in huge pages where the system gives
    /// them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limit would be passed or the device has no more.
    pub fn new(context: &Context, size: usize) -> Result<Buffer> {
        Buffer::allocated(context, size, || context.device().alloc(OP, size))
    }

    /// Allocates `size` bytes in the order of `stream`, with unspecified contents: neither waits for the device nor asks it for memory
    /// that the context's pool has. For memory that comes and goes with steps, such as workspaces. Where the device has no pools, and
    /// on the CPU, it is [`Buffer::new`].
    ///
    /// # Safety
    /// Work of other streams uses the buffer only behind this point of `stream`, by an event or a synchronisation.
    ///
    /// # Errors
    /// As [`Buffer::new`]; [`Error::InvalidArgument`] if the stream is being captured.
    pub unsafe fn new_async(context: &Context, size: usize, stream: Stream) -> Result<Buffer> {
        context.check_not_capturing(OP, stream, ALLOCATE_OUTSIDE)?;
        Buffer::allocated(context, size, || {
            // SAFETY: a `Stream` is live and of the device; that it is not captured was checked.
            unsafe { context.device().alloc_async(OP, size, stream) }
        })
    }

    fn allocated(
        context: &Context,
        size: usize,
        allocate: impl FnOnce() -> Result<Allocation>,
    ) -> Result<Buffer> {
        let bytes = size as u64;
        context.accountant().reserve(OP, bytes)?;
        match allocate() {
            Ok(memory) => Ok(Buffer {
                memory,
                context: context.clone(),
            }),
            Err(error) => {
                context.accountant().release(bytes);
                Err(error)
            }
        }
    }

    /// Frees the buffer in the order of `stream`, without waiting. Its bytes no longer count as in use. A buffer that
    /// [`Buffer::new_async`] did not make waits for the stream.
    ///
    /// # Safety
    /// Work of other streams that uses the buffer is done, or comes before this point of `stream`.
    ///
    /// # Errors
    /// The stream is being captured (the buffer is freed as if dropped), or the driver refuses.
    pub unsafe fn free_async(self, stream: Stream) -> Result<()> {
        self.context.check_not_capturing(OP, stream, FREE_OUTSIDE)?;
        let device = self.context.device();
        // SAFETY: the device gave it out, and `forget` keeps it from being freed again; the caller
        // promises that no work of other streams uses it; the stream is not captured, as was checked.
        unsafe { device.free_async(OP, self.memory, stream) }?;
        self.forget();
        Ok(())
    }

    /// Lets go of memory that has been freed.
    fn forget(self) {
        self.context.accountant().release(self.memory.size as u64);
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, from a buffer that is not dropped.
        drop(unsafe { std::ptr::read(&raw const this.context) });
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
        self.memory.size
    }

    /// Address on the device; never NULL, aligned to [`Workspace::ALIGNMENT`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.ptr
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Queues a copy of `data` to `offset` bytes into the buffer.
    ///
    /// # Errors
    /// The range is outside the buffer, or the driver refuses.
    pub fn copy_from_slice<T: Element>(
        &mut self,
        offset: usize,
        data: &[T],
        stream: Stream,
    ) -> Result<()> {
        let bytes = std::mem::size_of_val(data);
        self.check_range(offset, bytes)?;
        let to = self.memory.ptr.wrapping_add(offset);
        let device = self.context.device();
        // SAFETY: the range was checked, `self` is borrowed mutably so `data` is not part of it, and the
        // copy is done with `data` when it returns.
        unsafe { device.upload(OP, to, data.as_ptr().cast(), bytes, stream) }
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
            Error::invalid(OP, "count", text!("{count} overflows the address space"))
        })?;
        self.check_range(offset, bytes)?;
        if T::DTYPE == DType::Bool {
            return Err(Error::unsupported(
                OP,
                "dtype",
                "bool cannot be read back; read i8",
            ));
        }
        let mut out: Vec<T> = Vec::new();
        out.try_reserve_exact(count)
            .map_err(|_| Error::out_of_host_memory(OP, bytes))?;
        let from = self.memory.ptr.wrapping_add(offset).cast_const();
        let to = out.as_mut_ptr().cast();
        let device = self.context.device();
        // SAFETY: the source range was checked; the destination has room for `count` elements, at which
        // nothing looks before the copy has run; every bit pattern is a value of the remaining element
        // types (bool was refused).
        unsafe {
            device.copy(OP, to, from, bytes, CopyKind::DeviceToHost, stream)?;
            device.synchronize(OP, stream)?;
            out.set_len(count);
        }
        Ok(out)
    }

    /// A view of part of the buffer, from `offset` bytes on.
    ///
    /// # Errors
    /// The view does not fit the buffer or is misaligned.
    pub fn tensor(&self, offset: usize, dtype: DType, layout: Layout) -> Result<TensorRef<'_>> {
        self.check_view(offset, dtype, &layout)?;
        // SAFETY: the range lies in memory that `self` owns, on the host initialised when it was made.
        let view = unsafe { TensorRef::from_raw(self.memory.ptr.add(offset), dtype, layout) };
        Ok(view.on(self.context.place()))
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
        let view = unsafe { TensorMut::from_raw(self.memory.ptr.add(offset), dtype, layout) };
        Ok(view.on(self.context.place()))
    }

    /// The whole buffer as a workspace.
    pub fn workspace(&mut self) -> Workspace<'_> {
        // SAFETY: `self` owns the memory and is borrowed mutably for as long as the workspace lives.
        let workspace = unsafe { Workspace::from_raw(self.memory.ptr, self.memory.size) };
        workspace.on(self.context.place())
    }

    fn check_view(&self, offset: usize, dtype: DType, layout: &Layout) -> Result<()> {
        self.check_range(offset, dtype.row_bytes(layout.span()))?;
        let (len, alignment) = (dtype.block().0, dtype.alignment());
        if !layout.is_in_blocks(len) {
            let problem = text!(
                "has shape {:?} with strides {:?}, which cut blocks of {len} elements of {dtype}",
                layout.shape(),
                layout.strides()
            );
            return Err(Error::invalid(OP, "layout", problem));
        }
        if offset.is_multiple_of(alignment) {
            return Ok(());
        }
        Err(Error::invalid(
            OP,
            "offset",
            text!("{offset} is not a multiple of {alignment} bytes"),
        ))
    }

    pub(super) fn check_range(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.memory.size)
        {
            return Ok(());
        }
        Err(Error::invalid(
            OP,
            "range",
            text!(
                "of {bytes} bytes from {offset} is outside the buffer of {} bytes",
                self.memory.size
            ),
        ))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the device gave it out, and it is dropped once. A lost context has freed it already.
        let _ = unsafe { self.context.device().free(OP, self.memory) };
        self.context.accountant().release(self.memory.size as u64);
    }
}
