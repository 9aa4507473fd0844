//! The host's memory as a device's: work is done when a call returns, and there is one stream.

use std::alloc::Layout;

use super::{Cpu, pages};
use crate::alloc::boxed;
use crate::backend::{
    Allocation, Backend, CopyKind, Device, ProductShape, Stream, Upload, check_host_stream,
};
use crate::error::{Error, Result};
use crate::tensor::Workspace;

fn layout(size: usize) -> Option<Layout> {
    Layout::from_size_align(size.max(1), Workspace::ALIGNMENT).ok()
}

impl Device for Cpu {
    fn backend(&self) -> Backend {
        Backend::Cpu
    }

    fn ordinal(&self) -> i32 {
        0
    }

    fn alloc(&self, op: &'static str, size: usize) -> Result<Allocation> {
        let ptr = match layout(size) {
            Some(_) if pages::serve(size) => pages::map(size),
            // SAFETY: the layout's size is not zero.
            Some(layout) => unsafe { std::alloc::alloc_zeroed(layout) },
            None => std::ptr::null_mut(),
        };
        if ptr.is_null() {
            return Err(Error::out_of_host_memory(op, size));
        }
        Ok(Allocation {
            ptr,
            size,
            pooled: false,
        })
    }

    unsafe fn alloc_async(
        &self,
        op: &'static str,
        size: usize,
        stream: Stream,
    ) -> Result<Allocation> {
        check_host_stream(op, stream)?;
        self.alloc(op, size)
    }

    unsafe fn free(&self, _: &'static str, memory: Allocation) -> Result<()> {
        // SAFETY: `alloc` has such memory from there, with this layout, and the caller promises that it is
        // not used again.
        unsafe {
            match layout(memory.size) {
                _ if pages::serve(memory.size) => pages::unmap(memory.ptr, memory.size),
                Some(layout) => std::alloc::dealloc(memory.ptr, layout),
                None => {}
            }
        }
        Ok(())
    }

    unsafe fn free_async(
        &self,
        op: &'static str,
        memory: Allocation,
        stream: Stream,
    ) -> Result<()> {
        check_host_stream(op, stream)?;
        // SAFETY: the caller's promise is the same; nothing is ever queued.
        unsafe { self.free(op, memory) }
    }

    fn pool_size(&self, _: &'static str) -> Result<u64> {
        Ok(0)
    }

    fn trim_pool(&self, _: &'static str, _: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn copy(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        _: CopyKind,
        stream: Stream,
    ) -> Result<()> {
        check_host_stream(op, stream)?;
        if size > 0 {
            // SAFETY: the caller promises that both ranges are valid and apart; whatever the kind, they
            // are the host's.
            unsafe { std::ptr::copy_nonoverlapping(src, dst, size) };
        }
        Ok(())
    }

    unsafe fn upload(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy(op, dst, src, size, CopyKind::HostToDevice, stream) }
    }

    fn staging(&self, op: &'static str, _: usize) -> Result<Box<dyn Upload>> {
        Ok(boxed(op, AtOnce)?)
    }

    unsafe fn set(
        &self,
        op: &'static str,
        dst: *mut u8,
        value: u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        check_host_stream(op, stream)?;
        if size > 0 {
            // SAFETY: the caller promises that the range is valid.
            unsafe { std::ptr::write_bytes(dst, value, size) };
        }
        Ok(())
    }

    fn check_stream(&self, op: &'static str, stream: Stream) -> Result<()> {
        check_host_stream(op, stream)
    }

    fn warm_up(&self, _: &'static str, _: &[ProductShape]) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, op: &'static str, stream: Stream) -> Result<()> {
        check_host_stream(op, stream)
    }

    fn synchronize_device(&self, _: &'static str) -> Result<()> {
        Ok(())
    }

    fn create_stream(&self, _: &'static str) -> Result<Stream> {
        Ok(Stream::DEFAULT)
    }

    unsafe fn destroy_stream(&self, op: &'static str, stream: Stream) -> Result<()> {
        check_host_stream(op, stream)
    }

    fn is_capturing(&self, op: &'static str, stream: Stream) -> Result<bool> {
        check_host_stream(op, stream)?;
        Ok(false)
    }
}

/// Copies before it returns.
#[derive(Debug)]
struct AtOnce;

impl Upload for AtOnce {
    unsafe fn upload(
        &mut self,
        op: &'static str,
        to: *mut u8,
        data: &[u8],
        stream: Stream,
    ) -> Result<()> {
        check_host_stream(op, stream)?;
        // SAFETY: the caller promises that the destination is valid; `data` is borrowed, so it is no part
        // of what the library's own buffer holds.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }
}
