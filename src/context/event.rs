//! Events: points in the work of streams, for one stream or the host to wait for another.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Backend, Context, Device, Stream};
use crate::cpu;
use crate::cuda;
use crate::error::{Error, Result, text};

/// A point in the work of a stream. Made by [`Context::create_event`]; keeps what it needs of its
/// device, so that it may outlive the context. Several threads may use it at a time.
///
/// The CPU backend's work is done when the call that queues it returns, so there its events have
/// nothing to wait for.
#[derive(Debug)]
pub struct Event {
    point: Point,
    ordinal: i32,
    /// Whether it takes the time.
    timing: bool,
    recorded: AtomicBool,
}

#[derive(Debug)]
enum Point {
    Cpu(cpu::Event),
    Cuda(cuda::Event),
}

impl Context {
    /// Makes an event on the device, which also takes the time if `timing` is set: one that does not
    /// is cheaper to record and to wait for.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn create_event(&self, timing: bool) -> Result<Event> {
        let point = match &self.inner.device {
            Device::Cpu(_) => Point::Cpu(cpu::Event::default()),
            Device::Cuda(cuda) => Point::Cuda(cuda.create_event("event_create", timing)?),
        };
        Ok(Event {
            point,
            ordinal: self.device_ordinal(),
            timing,
            recorded: AtomicBool::new(false),
        })
    }

    /// Lets what is queued on `stream` from now on wait, on the device, for the point that `event` was
    /// last recorded at; for nothing if it never was. The event may be of another device.
    ///
    /// While the event's stream is captured into a graph, `stream` joins the capture.
    ///
    /// # Errors
    /// The event is of another backend, or the driver refuses.
    pub fn wait_event(&self, stream: Stream, event: &Event) -> Result<()> {
        const OP: &str = "stream_wait_event";
        self.device().check_stream(OP, stream)?;
        match (&self.inner.device, &event.point) {
            (Device::Cpu(_), Point::Cpu(_)) => Ok(()),
            (Device::Cuda(cuda), Point::Cuda(event)) => cuda.wait_event(OP, stream, event),
            _ => {
                let (theirs, ours) = (event.backend(), self.backend());
                let problem = text!("is of the {theirs} backend, ctx of the {ours} backend");
                Err(Error::invalid(OP, "event", problem))
            }
        }
    }
}

impl Event {
    /// The backend it belongs to.
    pub fn backend(&self) -> Backend {
        match self.point {
            Point::Cpu(_) => Backend::Cpu,
            Point::Cuda(_) => Backend::Cuda,
        }
    }

    /// Moves the event behind everything queued on `stream`, a stream of its device.
    ///
    /// # Errors
    /// The stream is of another device, or the driver refuses.
    pub fn record(&self, stream: Stream) -> Result<()> {
        const OP: &str = "event_record";
        match &self.point {
            Point::Cpu(event) => event.record(OP, stream)?,
            Point::Cuda(event) => event.record(OP, stream)?,
        }
        self.recorded.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the work before the event has finished; `true` if it was never recorded.
    ///
    /// # Errors
    /// An error of earlier asynchronous work; or the event was last recorded in a captured stream.
    pub fn is_done(&self) -> Result<bool> {
        match &self.point {
            Point::Cpu(_) => Ok(true),
            Point::Cuda(event) => event.is_done("event_query"),
        }
    }

    /// Lets the calling thread wait until the work before the event has finished.
    ///
    /// # Errors
    /// As [`Event::is_done`].
    pub fn synchronize(&self) -> Result<()> {
        match &self.point {
            Point::Cpu(_) => Ok(()),
            Point::Cuda(event) => event.synchronize("event_synchronize"),
        }
    }

    /// Milliseconds between two events of one device, on a GPU with a resolution of about half a
    /// microsecond.
    ///
    /// # Errors
    /// They are of different devices, one does not take the time, was never recorded or is not done
    /// yet; or as [`Event::is_done`].
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        const OP: &str = "event_elapsed";
        for (name, event) in [("start", start), ("end", self)] {
            if !event.timing {
                return Err(Error::invalid(OP, name, "was made without timing"));
            }
            if !event.recorded.load(Ordering::Acquire) {
                return Err(Error::invalid(OP, name, "was never recorded"));
            }
        }
        match (&start.point, &self.point) {
            (Point::Cpu(start), Point::Cpu(end)) => Ok(end.milliseconds_since(start)),
            (Point::Cuda(start), Point::Cuda(end)) if start.ordinal() == end.ordinal() => {
                for (name, event) in [("start", start), ("end", end)] {
                    if !event.is_done(OP)? {
                        return Err(Error::invalid(
                            OP,
                            name,
                            "is not done yet: synchronize first",
                        ));
                    }
                }
                end.milliseconds_since(OP, start)
            }
            _ => {
                let problem = text!(
                    "is of {} {}, start of {} {}",
                    self.backend(),
                    self.ordinal,
                    start.backend(),
                    start.ordinal
                );
                Err(Error::invalid(OP, "end", problem))
            }
        }
    }
}
