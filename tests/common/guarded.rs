//! Memory whose end is the end of what may be read.

use std::ffi::c_void;

use unsloth::{Backend, Buffer, Context, DType, Layout, Stream, TensorRef};

/// Bytes with a page behind them that nobody may touch: reading one too many ends the process.
#[derive(Debug)]
pub struct Guarded {
    map: *mut c_void,
    size: usize,
    start: *const u8,
}

impl Guarded {
    pub fn new(bytes: &[u8]) -> Guarded {
        // SAFETY: plain calls; what they give is checked.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let used = bytes.len().next_multiple_of(page);
        let size = used + page;
        // SAFETY: a new mapping of our own, of which the last page is closed, and the bytes before it
        // are written once.
        unsafe {
            let (access, kind) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let map = libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let closed = libc::mprotect(map.wrapping_byte_add(used), page, libc::PROT_NONE);
            assert_eq!(closed, 0);
            let start = map.cast::<u8>().add(used - bytes.len());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len());
            Guarded { map, size, start }
        }
    }

    /// The bytes as a tensor of the host's.
    pub fn view(&self, dtype: DType, layout: Layout) -> TensorRef<'_> {
        let used = self.map.wrapping_byte_add(self.size).addr() - self.start.addr();
        assert!(dtype.row_bytes(layout.span()) <= used);
        // SAFETY: the bytes are there for as long as the view, and are not written.
        unsafe { TensorRef::from_raw(self.start, dtype, layout) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: what was mapped.
        unsafe { libc::munmap(self.map, self.size) };
    }
}

/// Bytes of a context's memory that end where it does: on a device, where an allocation does.
#[derive(Debug)]
pub enum AtEnd {
    Host(Guarded),
    /// And where in it they begin.
    Device(Buffer, usize),
}

impl AtEnd {
    pub fn new(ctx: &Context, bytes: &[u8]) -> AtEnd {
        if ctx.backend() == Backend::Cpu {
            return AtEnd::Host(Guarded::new(bytes));
        }
        // Allocations are of whole multiples of it.
        let size = bytes.len().next_multiple_of(256);
        let start = size - bytes.len();
        let all = [&vec![0xff; start], bytes].concat();
        let words: Vec<i32> = (all.as_chunks::<4>().0.iter())
            .map(|word| i32::from_ne_bytes(*word))
            .collect();
        let mut buffer = Buffer::new(ctx, size).unwrap();
        buffer.copy_from_slice(0, &words, Stream::DEFAULT).unwrap();
        ctx.synchronize(Stream::DEFAULT).unwrap();
        AtEnd::Device(buffer, start)
    }

    pub fn view(&self, dtype: DType, layout: Layout) -> TensorRef<'_> {
        match self {
            AtEnd::Host(memory) => memory.view(dtype, layout),
            AtEnd::Device(buffer, start) => buffer.tensor(*start, dtype, layout).unwrap(),
        }
    }
}
