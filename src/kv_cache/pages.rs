//! The pool of pages: which are free, and how many sequences share each of the others.

use crate::error::Result;

use super::reserve;

/// Index of a page.
pub(super) type Page = u32;

/// Reference counts of every page and a stack of the free ones.
#[derive(Debug)]
pub(super) struct Pages {
    counts: Vec<u32>,
    free: Vec<Page>,
    num_shared: usize,
    peak_used: usize,
}

impl Pages {
    /// Of a page.
    pub const BYTES: usize = size_of::<u32>() + size_of::<Page>();

    /// `num` free pages; `num` fits a page index.
    pub fn new(op: &'static str, num: usize) -> Result<Pages> {
        let (mut counts, mut free) = (Vec::new(), Vec::new());
        reserve(op, &mut counts, num)?;
        reserve(op, &mut free, num)?;
        counts.resize(num, 0);
        // The lowest index is on top.
        free.extend((0..num as Page).rev());
        Ok(Pages {
            counts,
            free,
            num_shared: 0,
            peak_used: 0,
        })
    }

    /// What it has allocated.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.counts.capacity() * size_of::<u32>() + self.free.capacity() * size_of::<Page>()
    }

    pub fn capacity(&self) -> usize {
        self.counts.len()
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn num_used(&self) -> usize {
        self.capacity() - self.num_free()
    }

    /// Pages that more than one sequence holds.
    pub fn num_shared(&self) -> usize {
        self.num_shared
    }

    pub fn peak_used(&self) -> usize {
        self.peak_used
    }

    /// Takes a free page, with one reference.
    pub fn take(&mut self) -> Option<Page> {
        let page = self.free.pop()?;
        self.counts[page as usize] = 1;
        self.peak_used = self.peak_used.max(self.num_used());
        Some(page)
    }

    pub fn count(&self, page: Page) -> u32 {
        self.counts[page as usize]
    }

    pub fn is_shared(&self, page: Page) -> bool {
        self.count(page) > 1
    }

    /// Adds a reference to a page in use.
    pub fn share(&mut self, page: Page) {
        let count = &mut self.counts[page as usize];
        debug_assert!(*count > 0);
        *count += 1;
        if *count == 2 {
            self.num_shared += 1;
        }
    }

    /// Takes a reference away; the last one frees the page.
    pub fn release(&mut self, page: Page) {
        let count = &mut self.counts[page as usize];
        debug_assert!(*count > 0);
        *count -= 1;
        match *count {
            0 => self.free.push(page),
            1 => self.num_shared -= 1,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let mut pages = Pages::new("t", 2).unwrap();
        assert_eq!(
            (pages.take(), pages.take(), pages.take()),
            (Some(0), Some(1), None)
        );
        pages.share(0);
        pages.share(0);
        assert_eq!((pages.num_shared(), pages.num_free()), (1, 0));
        pages.release(0);
        assert!(pages.is_shared(0));
        pages.release(0);
        assert!(!pages.is_shared(0) && pages.num_shared() == 0);
        pages.release(0);
        assert_eq!(
            (pages.num_free(), pages.num_used(), pages.peak_used()),
            (1, 1, 2)
        );
        assert_eq!(pages.take(), Some(0));
    }
}
