//! The stream of a communicator's own, for collectives beside the caller's work.
//!
//! The caller's stream forks to it at an event and waits at another one where what was made is needed, so that
//! a capture of the caller's stream has both. All are made with the communicator: a launch makes nothing.

use std::ptr;

use arrayvec::ArrayVec;

use crate::backend::Stream;
use crate::cuda::device::{NON_BLOCKING, Primary};
use crate::cuda::{Cuda, Event};
use crate::error::{Error, Result, text};
use crate::problem::collective::MOST_BESIDE;

/// As urgent as a stream may be: the driver takes the greatest priority that there is. A collective has few
/// blocks, which come before those of the product that runs beside it, or they would have to wait for its end.
const PRIORITY: i32 = -100;

/// The stream and its events.
#[derive(Debug)]
pub(super) struct Side {
    stream: Stream,
    primary: Primary,
    /// Where the caller's stream forks.
    fork: Event,
    /// Behind the last collective of each number.
    done: ArrayVec<Event, MOST_BESIDE>,
}

impl Side {
    pub fn new(op: &'static str, cuda: &Cuda) -> Result<Side> {
        let fork = cuda.create_event(op, false)?;
        let mut done = ArrayVec::new();
        for _ in 0..MOST_BESIDE {
            done.push(cuda.create_event(op, false)?);
        }
        let primary = cuda.retained(op)?;
        let mut stream = ptr::null_mut();
        let entered = primary.enter(op)?;
        // SAFETY: valid for a write; a context is current.
        unsafe {
            let driver = primary.driver;
            driver.stream_create_with_priority(op, &mut stream, NON_BLOCKING, PRIORITY)
        }?;
        drop(entered);
        Ok(Side {
            // SAFETY: a live stream of the device, until this is dropped.
            stream: unsafe { Stream::from_raw(stream.cast()) },
            primary,
            fork,
            done,
        })
    }

    /// Queues what `queue` has for the stream that it is given, behind all that the caller's stream has so far.
    /// That has to wait for it with [`Side::join`], but for what failed, which it waits for here. By one thread at
    /// a time.
    pub fn beside(
        &self,
        op: &'static str,
        number: usize,
        stream: Stream,
        queue: impl FnOnce(Stream) -> Result<()>,
    ) -> Result<()> {
        let done = self.done(op, number)?;
        self.fork.record(op, stream)?;
        self.fork.wait(op, self.stream)?;
        let queued = queue(self.stream);
        let recorded = done.record(op, self.stream);
        let result = queued.and(recorded);
        if result.is_err() {
            // A capture has to find the two streams joined.
            let _ = done.wait(op, stream);
        }
        result
    }

    /// Lets the caller's stream wait for the last work that had this number, and so for all before it.
    pub fn join(&self, op: &'static str, number: usize, stream: Stream) -> Result<()> {
        self.done(op, number)?.wait(op, stream)
    }

    fn done(&self, op: &'static str, number: usize) -> Result<&Event> {
        self.done.get(number).ok_or_else(|| Error::Internal {
            op,
            message: text!("has no event {number} of work beside its stream"),
        })
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        const OP: &str = "comm_destroy";
        if let Ok(_entered) = self.primary.enter(OP) {
            let raw = self.stream.as_raw().cast();
            // SAFETY: made by `new`, and not used again; its work runs to its end.
            let _ = unsafe { self.primary.driver.stream_destroy(OP, raw) };
        }
    }
}
