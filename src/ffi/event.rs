//! Events: points in the work of streams.

use crate::context::Event;
use crate::error::{Error, text};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::handle::Table;
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, guard, stream_from, unsloth_stream};

/// A point in the work of a stream, for another stream or the host to wait for. Opaque; made by
/// `unsloth_event_create`, ended by `unsloth_event_destroy`. Several threads may use one event at a
/// time. It keeps what it needs of its device and may be destroyed after its context.
///
/// The CPU backend's work is done when the call that queues it returns: its events have nothing to
/// wait for, take the time, and are checked as others are.
pub struct unsloth_event {
    _opaque: [u8; 0],
}

/// A flag of `unsloth_event_create`: the event takes the time, for `unsloth_event_elapsed`. One
/// without it is cheaper to record and to wait for.
pub const UNSLOTH_EVENT_TIMING: u32 = 1;

pub(crate) static EVENTS: Table<Event> = Table::new("unsloth_event", 3);

/// Makes an event on the context's device and writes its handle to `event`; the caller ends it with
/// `unsloth_event_destroy`. `flags` is 0 or `UNSLOTH_EVENT_TIMING`. May be called during a capture.
///
/// # Safety
/// `event` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_create(
    ctx: *mut unsloth_context,
    flags: u32,
    event: *mut *mut unsloth_event,
) -> unsloth_status {
    const OP: &str = "event_create";
    guard(OP, || {
        check_out(OP, "event", event)?;
        let object = context_from(OP, ctx)?;
        if flags & !UNSLOTH_EVENT_TIMING != 0 {
            let problem = text!("is {flags:#x}, allowed: 0, 1 (timing)");
            return Err(Error::invalid(OP, "flags", problem));
        }
        let made = object.context.create_event(flags != 0)?;
        let handle = EVENTS.insert(OP, made)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { event.write(handle) };
        Ok(())
    })
}

/// Ends an event; NULL is fine. Streams that wait for it go on waiting for the point that it was
/// recorded at.
///
/// # Safety
/// `event` is NULL or was made by `unsloth_event_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_destroy(event: *mut unsloth_event) -> unsloth_status {
    const OP: &str = "event_destroy";
    guard(OP, || {
        if !event.is_null() {
            drop(EVENTS.remove(OP, "event", event)?);
        }
        Ok(())
    })
}

/// Moves the event behind everything queued on `stream`. Waits that were queued before keep the
/// point of before. While `stream` is captured into a graph the point is one in the graph, and the
/// event serves to make other streams join the capture (`unsloth_stream_wait_event`) and this one
/// wait for them.
///
/// # Safety
/// `stream` is NULL or a live stream of the event's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_record(
    event: *mut unsloth_event,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "event_record";
    guard(OP, || {
        let event = EVENTS.get(OP, "event", event)?;
        // SAFETY: the caller promises a live stream of the event's device.
        event.record(unsafe { stream_from(stream) })
    })
}

/// Lets what is queued on `stream` from now on wait, on the device, for the point that `event` was
/// last recorded at; for nothing if it never was. The host does not wait. The event may be of
/// another device, and of another context, of the same backend.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_stream_wait_event(
    ctx: *mut unsloth_context,
    stream: unsloth_stream,
    event: *mut unsloth_event,
) -> unsloth_status {
    const OP: &str = "stream_wait_event";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        let event = EVENTS.get(OP, "event", event)?;
        // SAFETY: the caller promises a live stream of the context's device.
        let stream = unsafe { stream_from(stream) };
        object.context.wait_event(stream, &event)
    })
}

/// Writes to `done` whether the work before the event has finished (1) or not (0); 1 if it was never
/// recorded. Does not wait.
///
/// `UNSLOTH_STATUS_CUDA_ERROR` for an error of earlier asynchronous work, and for an event that was
/// last recorded in a captured stream.
///
/// # Safety
/// `done` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_query(
    event: *mut unsloth_event,
    done: *mut u32,
) -> unsloth_status {
    const OP: &str = "event_query";
    guard(OP, || {
        check_out(OP, "done", done)?;
        let is_done = EVENTS.get(OP, "event", event)?.is_done()?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { done.write(u32::from(is_done)) };
        Ok(())
    })
}

/// Lets the calling thread wait until the work before the event has finished; returns at once if it
/// was never recorded. May not be called while a graph is captured. Errors as of
/// `unsloth_event_query`.
///
/// # Safety
/// `event` was made by `unsloth_event_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_synchronize(event: *mut unsloth_event) -> unsloth_status {
    const OP: &str = "event_synchronize";
    guard(OP, || EVENTS.get(OP, "event", event)?.synchronize())
}

/// Writes to `milliseconds` the time from `start` to `end`, which are of one device, were made with
/// `UNSLOTH_EVENT_TIMING` and recorded, and are done (`unsloth_event_synchronize`). On a GPU it is
/// the device's time, with a resolution of about half a microsecond.
///
/// # Safety
/// `milliseconds` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_event_elapsed(
    start: *mut unsloth_event,
    end: *mut unsloth_event,
    milliseconds: *mut f32,
) -> unsloth_status {
    const OP: &str = "event_elapsed";
    guard(OP, || {
        check_out(OP, "milliseconds", milliseconds)?;
        let start = EVENTS.get(OP, "start", start)?;
        let end = EVENTS.get(OP, "end", end)?;
        let elapsed = end.milliseconds_since(&start)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { milliseconds.write(elapsed) };
        Ok(())
    })
}
