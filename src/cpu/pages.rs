//! Memory in huge pages. What reads gigabytes once, as products with few rows read weights, waits
//! for the tables that say where pages lie: with pages 512 times as large they fit the caches.

/// Bytes from which memory is in pages of its own.
const LEAST: usize = 4 << 20;

/// What a huge page is aligned to, on x86-64 and mostly on other processors. It is only advice.
const HUGE: usize = 2 << 20;

/// Whether memory of so many bytes is to be mapped here.
pub(super) fn serve(size: usize) -> bool {
    cfg!(target_os = "linux") && size >= LEAST
}

/// Bytes of whole pages; `None` if they cannot be counted.
#[cfg(target_os = "linux")]
fn whole_pages(size: usize) -> Option<usize> {
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    size.checked_next_multiple_of(page)
}

/// Zeros, in huge pages if the system has them to give; NULL if there is no memory. Pages that are
/// not touched take none.
#[cfg(target_os = "linux")]
pub(super) fn map(size: usize) -> *mut u8 {
    let Some(used) = whole_pages(size) else {
        return std::ptr::null_mut();
    };
    let Some(all) = used.checked_add(HUGE) else {
        return std::ptr::null_mut();
    };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, wherever there is room.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), all, access, kind, -1, 0) };
    if map == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    let before = map.addr().next_multiple_of(HUGE) - map.addr();
    let start = map.wrapping_byte_add(before);
    // SAFETY: what lies before and behind the memory is of the mapping, in whole pages, and nobody
    // knows of it; whether it goes, and whether the advice is taken, changes nothing for the
    // caller.
    unsafe {
        if before > 0 {
            libc::munmap(map, before);
        }
        if before < HUGE {
            libc::munmap(start.wrapping_byte_add(used), HUGE - before);
        }
        libc::madvise(start, used, libc::MADV_HUGEPAGE);
    }
    start.cast()
}

/// # Safety
/// [`map`] gave the memory, of so many bytes, and it is not used again.
#[cfg(target_os = "linux")]
pub(super) unsafe fn unmap(memory: *mut u8, size: usize) {
    if let Some(used) = whole_pages(size) {
        // SAFETY: the caller's promise.
        unsafe { libc::munmap(memory.cast(), used) };
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn map(_: usize) -> *mut u8 {
    std::ptr::null_mut()
}

/// # Safety
/// None: nothing is ever mapped.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn unmap(_: *mut u8, _: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeros_to_its_last_byte() {
        for size in [LEAST, LEAST + 1, 3 * HUGE + 4097] {
            assert!(serve(size) && !serve(LEAST - 1));
            let memory = map(size);
            assert!(!memory.is_null() && memory.addr().is_multiple_of(HUGE));
            // SAFETY: the memory, which is given back once.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(memory, size);
                assert!(bytes.iter().all(|byte| *byte == 0));
                bytes.fill(1);
                unmap(memory, size);
            }
        }
        for size in [usize::MAX, usize::MAX / 2] {
            assert!(map(size).is_null());
        }
    }
}
