//! Lists in memory that a thread keeps from one call to the next.

use std::alloc::Layout;
use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::error::{Error, Result};

/// A list of up to `N` values that is as large as a pointer: one that is full of problems takes longer to move than
/// a small product takes to run. A thread's first lists allocate; then it has their memory.
pub(crate) struct List<T, const N: usize> {
    /// Nothing while the list is empty and has not been otherwise.
    values: Option<NonNull<ArrayVec<T, N>>>,
}

impl<T, const N: usize> List<T, N> {
    /// Without values.
    pub const fn new() -> Self {
        List { values: None }
    }

    /// Adds a value to the end, or returns it if there are `N`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn push(&mut self, op: &'static str, value: T) -> Result<Option<T>> {
        let values = match self.values {
            Some(values) => values,
            None => {
                let layout = Layout::new::<ArrayVec<T, N>>();
                let Some(memory) = take(layout) else {
                    return Err(Error::out_of_host_memory(op, layout.size()));
                };
                let values = memory.cast::<ArrayVec<T, N>>();
                // SAFETY: the memory has this layout and is nobody else's.
                unsafe { values.write(ArrayVec::new()) };
                *self.values.insert(values)
            }
        };
        // SAFETY: the list is there since it was written, and is borrowed as `self` is.
        let full = unsafe { (*values.as_ptr()).try_push(value) }.err();
        Ok(full.map(|full| full.element()))
    }

    /// Takes all values out, in their order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        // SAFETY: as in `push`.
        let values = self.values.map(|values| unsafe { &mut *values.as_ptr() });
        values.into_iter().flat_map(|values| values.drain(..))
    }
}

impl<T, const N: usize> Drop for List<T, N> {
    fn drop(&mut self) {
        if let Some(values) = self.values {
            // SAFETY: the list is there, nobody borrows it, and its memory is not used again but by who takes it.
            unsafe {
                values.drop_in_place();
                give_back(values.cast(), Layout::new::<ArrayVec<T, N>>());
            }
        }
    }
}

impl<T, const N: usize> Deref for List<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as in `push`.
        self.values
            .map_or(&[], |values| unsafe { (*values.as_ptr()).as_slice() })
    }
}

impl<T: fmt::Debug, const N: usize> fmt::Debug for List<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Pieces that a thread keeps at most: a call has few lists at a time.
const MOST_KEPT: usize = 8;

/// Memory that no list of the thread uses.
struct Kept(ArrayVec<(NonNull<u8>, Layout), MOST_KEPT>);

impl Drop for Kept {
    fn drop(&mut self) {
        for (memory, layout) in self.0.drain(..) {
            // SAFETY: it came from the global allocator with this layout, and no list has it.
            unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
        }
    }
}

thread_local! {
    static KEPT: RefCell<Kept> = const { RefCell::new(Kept(ArrayVec::new_const())) };
}

/// Memory of this layout, whose size is not zero, from the global allocator, unless there is none.
fn take(layout: Layout) -> Option<NonNull<u8>> {
    // While a thread ends it has kept nothing.
    let kept = KEPT.try_with(|kept| {
        let kept = &mut kept.borrow_mut().0;
        let at = kept.iter().position(|(_, other)| *other == layout)?;
        Some(kept.swap_remove(at).0)
    });
    // SAFETY: the size is not zero.
    let new = || NonNull::new(unsafe { std::alloc::alloc(layout) });
    kept.ok().flatten().or_else(new)
}

/// Keeps memory, or gives it back if there is enough.
///
/// # Safety
/// It came from [`take`] with this layout, and nobody uses it.
unsafe fn give_back(memory: NonNull<u8>, layout: Layout) {
    let is_kept = KEPT.try_with(|kept| kept.borrow_mut().0.try_push((memory, layout)).is_ok());
    if !is_kept.unwrap_or(false) {
        // SAFETY: as the caller promises.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn lists_have_up_to_so_many_values_and_drop_them() {
        let value = Rc::new(());
        let mut list = List::<_, 2>::new();
        assert!(list.is_empty() && list.drain().next().is_none());
        for expected in [false, false, true] {
            let full = list.push("test", value.clone()).unwrap();
            assert_eq!(full.is_some(), expected);
        }
        assert_eq!((list.len(), Rc::strong_count(&value)), (2, 3));
        drop(list);
        assert_eq!(Rc::strong_count(&value), 1);
        let mut none = List::<_, 0>::new();
        assert!(none.push("test", value).unwrap().is_some());
    }

    #[test]
    fn values_are_taken_out_in_order() {
        let mut list = List::<_, 3>::new();
        for round in 0..2 {
            for i in 0..3 {
                list.push("test", 10 * round + i).unwrap();
            }
            let expected = [0, 1, 2].map(|i| 10 * round + i);
            assert_eq!(*list, expected);
            assert!(list.drain().eq(expected));
            assert!(list.is_empty());
        }
    }

    /// A thread's next list of a layout has the memory of one before, and only so many pieces are kept.
    #[test]
    fn memory_is_used_again() {
        let list = || {
            let mut list = List::<[u64; 5], 7>::new();
            list.push("test", [1; 5]).unwrap();
            list
        };
        let first = list();
        let at = first.as_ptr();
        let second = list();
        assert_ne!(second.as_ptr(), at);
        drop(first);
        assert_eq!(list().as_ptr(), at);
        let many: [_; 2 * MOST_KEPT] = std::array::from_fn(|_| list());
        drop(many);
        KEPT.with(|kept| assert_eq!(kept.borrow().0.len(), MOST_KEPT));
        drop(second);
        assert_eq!(*list(), [[1; 5]]);
    }
}
