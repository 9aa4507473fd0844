//! Bytes in use, their peak and their limit.

use std::sync::Mutex;

use crate::error::{Error, Result, text};

/// What a context has allocated, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Allocated now.
    pub in_use: u64,
    /// The most that was ever allocated at a time since the context was made or the peak reset.
    pub peak: u64,
    /// The most that may be allocated at a time, if limited.
    pub limit: Option<u64>,
    /// Live allocations.
    pub num_allocations: u64,
    /// Held by the pool that [`Buffer::new_async`](crate::Buffer::new_async) allocates from, used
    /// or not. This part is the driver's count: what an allocation is rounded up to is in it, and
    /// what was freed until [`Context::trim_memory_pool`].
    ///
    /// [`Context::trim_memory_pool`]: crate::Context::trim_memory_pool
    pub pool_size: u64,
}

/// Counts a context's allocations and holds them to the limit.
#[derive(Debug)]
pub(crate) struct Accountant {
    stats: Mutex<MemoryStats>,
}

impl Accountant {
    pub fn new(limit: Option<u64>) -> Self {
        Accountant {
            stats: Mutex::new(MemoryStats {
                limit,
                ..MemoryStats::default()
            }),
        }
    }

    pub fn stats(&self) -> MemoryStats {
        *self.lock()
    }

    pub fn set_limit(&self, limit: Option<u64>) {
        self.lock().limit = limit;
    }

    pub fn reset_peak(&self) {
        let mut stats = self.lock();
        stats.peak = stats.in_use;
    }

    /// Counts `bytes` as used, unless that would pass the limit.
    pub fn reserve(&self, op: &'static str, bytes: u64) -> Result<()> {
        let mut stats = self.lock();
        let in_use = stats.in_use.saturating_add(bytes);
        if let Some(limit) = stats.limit
            && in_use > limit
        {
            return Err(Error::OutOfMemory {
                op,
                requested: bytes,
                reason: text!("{} of the limit of {limit} bytes are in use", stats.in_use),
            });
        }
        stats.in_use = in_use;
        stats.peak = stats.peak.max(in_use);
        stats.num_allocations += 1;
        Ok(())
    }

    /// Takes back what [`Accountant::reserve`] counted.
    pub fn release(&self, bytes: u64) {
        let mut stats = self.lock();
        stats.in_use = stats.in_use.saturating_sub(bytes);
        stats.num_allocations = stats.num_allocations.saturating_sub(1);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, MemoryStats> {
        // Plain counters stay meaningful if a thread panicked while it held them.
        self.stats
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_and_limit() {
        let a = Accountant::new(Some(100));
        a.reserve("t", 60).unwrap();
        let error = a.reserve("t", 41).unwrap_err();
        assert_eq!(
            error.to_string(),
            "t: 41 bytes could not be allocated: 60 of the limit of 100 bytes are in use"
        );
        a.reserve("t", 40).unwrap();
        a.release(60);
        let stats = a.stats();
        assert_eq!(
            (stats.in_use, stats.peak, stats.num_allocations),
            (40, 100, 1)
        );
        a.reset_peak();
        assert_eq!(a.stats().peak, 40);
    }
}
