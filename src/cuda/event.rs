//! Events of CUDA streams.

use std::ffi::c_int;

use super::Cuda;
use super::device::Primary;
use super::driver::{CUevent, CUresult};
use crate::backend::Stream;
use crate::error::{Error, Result};

/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to wait for.
pub(super) const NO_TIMING: u32 = 2;

/// Work before the event is still to be done.
const NOT_READY: c_int = CUresult::CUDA_ERROR_NOT_READY as c_int;

pub(crate) struct Event {
    event: CUevent,
    ordinal: i32,
    primary: Primary,
}

// SAFETY: an event is a handle of the driver's, which any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above, several at a time.
unsafe impl Sync for Event {}

impl Cuda {
    pub fn create_event(&self, op: &'static str, timing: bool) -> Result<Event> {
        let ordinal = self.resources.ordinal();
        let primary = Primary::retain(op, self.resources.primary.driver, ordinal)?;
        let mut event = std::ptr::null_mut();
        let flags = if timing { 0 } else { NO_TIMING };
        {
            let _entered = primary.enter(op)?;
            // SAFETY: `event` is valid for a write; a context is current.
            unsafe { primary.driver.event_create(op, &mut event, flags) }?;
        }
        Ok(Event {
            event,
            ordinal,
            primary,
        })
    }

    /// Lets a stream of this device wait for an event, of any device.
    pub fn wait_event(&self, op: &'static str, stream: Stream, event: &Event) -> Result<()> {
        event.wait_in(op, &self.resources.primary, stream)
    }
}

impl Event {
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Lets a stream of the event's device wait for it.
    pub fn wait(&self, op: &'static str, stream: Stream) -> Result<()> {
        self.wait_in(op, &self.primary, stream)
    }

    fn wait_in(&self, op: &'static str, of_stream: &Primary, stream: Stream) -> Result<()> {
        let _entered = of_stream.enter(op)?;
        let raw = stream.as_raw().cast();
        // SAFETY: the event is live, and a `Stream` is live and of this device by the promise of whoever
        // made it; no flags.
        unsafe { of_stream.driver.stream_wait_event(op, raw, self.event, 0) }
    }

    pub fn record(&self, op: &'static str, stream: Stream) -> Result<()> {
        let _entered = self.primary.enter(op)?;
        let raw = stream.as_raw().cast();
        // SAFETY: the event is live, and a `Stream` is live by the promise of whoever made it; the driver
        // refuses one of another device.
        unsafe { self.primary.driver.event_record(op, self.event, raw) }
    }

    pub fn is_done(&self, op: &'static str) -> Result<bool> {
        let _entered = self.primary.enter(op)?;
        // SAFETY: the event is live.
        match unsafe { self.primary.driver.event_query(op, self.event) } {
            Ok(()) => Ok(true),
            Err(Error::Cuda {
                code: NOT_READY, ..
            }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub fn synchronize(&self, op: &'static str) -> Result<()> {
        let _entered = self.primary.enter(op)?;
        // SAFETY: the event is live.
        unsafe { self.primary.driver.event_synchronize(op, self.event) }
    }

    pub fn milliseconds_since(&self, op: &'static str, start: &Event) -> Result<f32> {
        let _entered = self.primary.enter(op)?;
        let mut milliseconds = 0.0;
        // SAFETY: the result is valid for a write; both events are live.
        unsafe {
            let driver = self.primary.driver;
            driver.event_elapsed(op, &mut milliseconds, start.event, self.event)?;
        }
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        const OP: &str = "event_destroy";
        if let Ok(_entered) = self.primary.enter(OP) {
            // SAFETY: made by `create_event`, and not used again. The driver keeps it for work that waits.
            let _ = unsafe { self.primary.driver.event_destroy(OP, self.event) };
        }
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event")
            .field("ordinal", &self.ordinal)
            .finish_non_exhaustive()
    }
}
