//! Events of the CPU backend: its work is done when a call returns, so they only take the time.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::backend::{Stream, check_host_stream};
use crate::error::Result;

#[derive(Debug, Default)]
pub(crate) struct Event {
    recorded: Mutex<Option<Instant>>,
}

impl Event {
    pub fn record(&self, op: &'static str, stream: Stream) -> Result<()> {
        check_host_stream(op, stream)?;
        *self.lock() = Some(Instant::now());
        Ok(())
    }

    /// Negative if this one was recorded first, 0 if one was never recorded.
    pub fn milliseconds_since(&self, start: &Event) -> f32 {
        let (Some(start), Some(end)) = (*start.lock(), *self.lock()) else {
            return 0.0;
        };
        let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f32() * 1e3;
        match end >= start {
            true => milliseconds(start, end),
            false => -milliseconds(end, start),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
