//! Memory for the length of a call.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Sees whether `bytes` could be allocated, for what allocates them afterwards and would end the
/// process. It is a probe and no promise: what it found free may be somebody else's a moment later.
///
/// # Errors
/// They could not.
pub(crate) fn probe(op: &'static str, bytes: usize) -> Result<()> {
    let failed = || Error::out_of_host_memory(op, bytes);
    let layout = Layout::array::<u8>(bytes.max(1)).map_err(|_| failed())?;
    // SAFETY: the size is not zero.
    let memory = unsafe { std::alloc::alloc(layout) };
    // The compiler may otherwise leave out memory that nobody looks at.
    let memory = NonNull::new(std::hint::black_box(memory)).ok_or_else(failed)?;
    // SAFETY: allocated with this layout just now.
    unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
    Ok(())
}

/// Floats between the parts of two threads, so that none shares a cache line.
const APART: usize = 32;

/// Floats that are zeros at first, in equal parts. Memory that the system hands out is zeros already and is not touched, so each
/// page is first written by the thread that needs it.
pub(crate) struct Floats {
    floats: NonNull<f32>,
    layout: Layout,
    /// Floats of a part.
    len: usize,
    /// Floats from part to part.
    stride: usize,
    parts: usize,
}

// SAFETY: parts are borrowed by one thread each, as `Floats::part` asks for.
unsafe impl Sync for Floats {}

impl Floats {
    /// # Errors
    /// There is no memory.
    pub fn new(op: &'static str, parts: usize, len: usize) -> Result<Floats> {
        let stride = len.checked_next_multiple_of(APART);
        let stride = stride.and_then(|n| n.checked_add(APART));
        let size = stride.and_then(|n| n.checked_mul(parts));
        let bytes = len.saturating_mul(4).saturating_mul(parts);
        let failed = || Error::out_of_host_memory(op, bytes);
        let size = if len == 0 { Some(0) } else { size };
        let layout = size.and_then(|n| Layout::array::<f32>(n).ok());
        let layout = layout.ok_or_else(failed)?;
        let floats = match layout.size() {
            0 => NonNull::dangling(),
            // SAFETY: the size is not zero.
            _ => NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }.cast())
                .ok_or_else(failed)?,
        };
        Ok(Floats {
            floats,
            layout,
            len,
            stride: if len == 0 { 0 } else { stride.unwrap_or(0) },
            parts,
        })
    }

    /// Part `index`, below the number of parts.
    ///
    /// # Safety
    /// Nobody else has the part while it is borrowed.
    #[expect(
        clippy::mut_from_ref,
        reason = "parts do not overlap; that each is borrowed once is what the caller promises"
    )]
    pub unsafe fn part(&self, index: usize) -> &mut [f32] {
        assert!(index < self.parts);
        // SAFETY: the part lies inside the memory, which is initialised; the caller's promise.
        unsafe {
            let start = self.floats.as_ptr().add(index * self.stride);
            std::slice::from_raw_parts_mut(start, self.len)
        }
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout.
            unsafe { std::alloc::dealloc(self.floats.as_ptr().cast(), self.layout) };
        }
    }
}
