//! What `std` ends the process for where the host has no memory, with errors instead: boxes, shared
//! ownership, growing a vector.

use std::alloc::Layout;
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::error::{Error, Result};

/// A [`Box`] of `value`.
///
/// # Errors
/// There is no memory; `value` has been dropped.
pub(crate) fn boxed<T>(op: &'static str, value: T) -> Result<Box<T>> {
    let layout = Layout::new::<T>();
    if layout.size() == 0 {
        // This allocates nothing.
        return Ok(Box::new(value));
    }
    // SAFETY: the layout's size is not zero.
    let memory: *mut T = unsafe { std::alloc::alloc(layout) }.cast();
    if memory.is_null() {
        return Err(Error::out_of_host_memory(op, layout.size()));
    }
    // SAFETY: the memory is `T`'s size, aligned for it and nobody else's, so it may be written. It
    // came from the global allocator with `T`'s layout and holds a `T`, which is what a box owns.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// Adds `value` to the end.
///
/// # Errors
/// There is no memory; `value` has been dropped, and the others are as they were.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CUDA backend loads lists
pub(crate) fn push<T>(op: &'static str, list: &mut Vec<T>, value: T) -> Result<()> {
    list.try_reserve(1)
        .map_err(|_| Error::out_of_host_memory(op, size_of::<T>()))?;
    list.push(value);
    Ok(())
}

/// A value with several owners, dropped with the last: an [`Arc`](std::sync::Arc) without weak
/// references.
pub(crate) struct Shared<T> {
    counted: NonNull<Counted<T>>,
}

struct Counted<T> {
    owners: AtomicUsize,
    value: T,
}

// SAFETY: owners on several threads have `&T`, and whoever is the last drops the `T`.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above; who has a `&Shared<T>` can make an owner of it.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Errors
    /// There is no memory; `value` has been dropped.
    pub fn new(op: &'static str, value: T) -> Result<Shared<T>> {
        let owners = AtomicUsize::new(1);
        let counted = boxed(op, Counted { owners, value })?;
        Ok(Shared {
            counted: NonNull::from(Box::leak(counted)),
        })
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: made from a box, which lives as long as there are owners, of which this is one.
        unsafe { self.counted.as_ref() }
    }

    /// Whether both own the same value.
    pub fn is(&self, other: &Shared<T>) -> bool {
        self.counted == other.counted
    }

    /// Whether there is no other owner. Only where nobody else can reach this one does it stay so.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CUDA backend asks
    pub fn is_alone(&self) -> bool {
        // What others did before they gave up their part is seen from here on.
        self.counted().owners.load(Ordering::Acquire) == 1
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        // No order: this owner keeps the value alive, and hands the new one on by other means.
        let before = self.counted().owners.fetch_add(1, Ordering::Relaxed);
        if before > isize::MAX as usize {
            // Owners have been leaked until the count is about to wrap around.
            std::process::abort();
        }
        Shared {
            counted: self.counted,
        }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // What this owner did comes before its release, and all releases before the value's drop.
        if self.counted().owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            // SAFETY: the pointer came from a box, and the last owner is gone, so nobody uses it.
            drop(unsafe { Box::from_raw(self.counted.as_ptr()) });
        }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dropped<'a>(&'a AtomicUsize);

    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_last_owner_drops_the_value() {
        let drops = AtomicUsize::new(0);
        let first = Shared::new("test", Dropped(&drops)).unwrap();
        let other = Shared::new("test", Dropped(&drops)).unwrap();
        assert!(first.is(&first.clone()) && !first.is(&other) && first.is_alone());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let owner = first.clone();
                scope.spawn(move || {
                    for _ in 0..1000 {
                        drop(owner.clone());
                    }
                });
            }
        });
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        drop(first);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        drop(other);
        assert_eq!(drops.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn boxes_own_what_they_are_given() {
        assert_eq!(*boxed("test", [7u64; 9]).unwrap(), [7; 9]);
        assert_eq!(*boxed("test", ()).unwrap(), ());
        let drops = AtomicUsize::new(0);
        drop(boxed("test", Dropped(&drops)).unwrap());
        assert_eq!(drops.into_inner(), 1);
    }
}
