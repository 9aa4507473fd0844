//! Memory for the length of a call.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::tensor::Scratch;

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

/// Floats in equal parts, zeros at first where they are new. Memory that the system hands out is zeros already and is not touched, so each
/// page is first written by the thread that needs it.
pub(crate) struct Floats {
    floats: NonNull<f32>,
    /// Of what was allocated; of size zero in a workspace.
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
    /// Floats from part to part, and the memory of all.
    fn sizes(parts: usize, len: usize) -> Option<(usize, Layout)> {
        if len == 0 {
            return Some((0, Layout::new::<()>()));
        }
        let stride = len.checked_next_multiple_of(APART)?.checked_add(APART)?;
        let layout = Layout::array::<f32>(stride.checked_mul(parts)?).ok()?;
        Some((stride, layout))
    }

    /// Bytes of a workspace in which there is room for them.
    pub fn bytes(parts: usize, len: usize) -> usize {
        Floats::sizes(parts, len).map_or(usize::MAX, |(_, layout)| layout.size())
    }

    /// In a workspace where it has room for them, and of any values then; else as [`Floats::new`],
    /// after `probed` bytes were found free.
    ///
    /// # Errors
    /// There is no memory.
    pub fn in_or_new(
        op: &'static str,
        scratch: Scratch,
        (parts, len): (usize, usize),
        probed: usize,
    ) -> Result<Floats> {
        match (Floats::sizes(parts, len), NonNull::new(scratch.ptr)) {
            (Some((stride, layout)), Some(start)) if layout.size() <= scratch.size => Ok(Floats {
                floats: start.cast(),
                layout: Layout::new::<()>(),
                len,
                stride,
                parts,
            }),
            _ => {
                if probed > 0 {
                    probe(op, probed)?;
                }
                Floats::new(op, parts, len)
            }
        }
    }

    /// # Errors
    /// There is no memory.
    pub fn new(op: &'static str, parts: usize, len: usize) -> Result<Floats> {
        let bytes = len.saturating_mul(4).saturating_mul(parts);
        let failed = || Error::out_of_host_memory(op, bytes);
        let (stride, layout) = Floats::sizes(parts, len).ok_or_else(failed)?;
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
            stride,
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
