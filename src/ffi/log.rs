//! Logging: what was chosen and why, first uses, refusals.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock};

use arrayvec::ArrayString;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::error::{Error, Result, text};
use crate::ffi::guard;
use crate::ffi::status::unsloth_status;

/// How much is told: messages of this level and of all before it.
pub type unsloth_log_level = u32;
/// Nothing.
pub const UNSLOTH_LOG_LEVEL_OFF: unsloth_log_level = 0;
/// The device's context is lost, or a bug in this library was found.
pub const UNSLOTH_LOG_LEVEL_ERROR: unsloth_log_level = 1;
/// Memory could not be had, or something is missing that costs speed.
pub const UNSLOTH_LOG_LEVEL_WARN: unsloth_log_level = 2;
/// What happens once in a process or a context: devices, modules, libraries that were found.
pub const UNSLOTH_LOG_LEVEL_INFO: unsloth_log_level = 3;
/// First uses, choices that are remembered, and every call that was refused.
pub const UNSLOTH_LOG_LEVEL_DEBUG: unsloth_log_level = 4;
/// Each launch: what was chosen for it (kernel, splits, workspace) and why.
pub const UNSLOTH_LOG_LEVEL_TRACE: unsloth_log_level = 5;

/// Takes a message: one line without its line feed, NUL-terminated UTF-8 of at most 1024 bytes,
/// valid until the callback returns. `level` is the message's, `user` what was given to
/// `unsloth_log_set`.
///
/// The library calls it inside its functions, on the threads that called these or on its own, on
/// several at a time. It must return (no exception, no `longjmp`). It may call the library, which
/// drops the messages of such calls, but not `unsloth_log_set`.
pub type unsloth_log_callback = Option<
    unsafe extern "C" fn(level: unsloth_log_level, message: *const c_char, user: *mut c_void),
>;

/// Sets for the whole process how much is told, and to whom: `callback`, or the standard error
/// stream where that is NULL. Messages are for people to read; their wording may change.
///
/// When it returns, the previous callback is not running and will not be called again, so what its
/// `user` points to may be freed. It waits for callbacks that are running: do not call it while
/// holding a lock that the callback takes. While the level is off, as it is at first, a message
/// costs its function one relaxed load.
///
/// `UNSLOTH_STATUS_UNSUPPORTED` in a Rust program that has set a `tracing` subscriber, which then
/// receives the messages. `UNSLOTH_STATUS_INVALID_ARGUMENT` from inside a callback.
///
/// # Safety
/// `callback` is NULL or a function that may be called with `user` from any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_log_set(
    level: unsloth_log_level,
    callback: unsloth_log_callback,
    user: *mut c_void,
) -> unsloth_status {
    const OP: &str = "log_set";
    guard(OP, || {
        if level > UNSLOTH_LOG_LEVEL_TRACE {
            let problem = text!("is {level}, allowed: 0 (off) to 5 (trace)");
            return Err(Error::invalid(OP, "level", problem));
        }
        if DELIVERING.get() {
            let problem = "may not be replaced from inside a callback";
            return Err(Error::invalid(OP, "callback", problem));
        }
        if level > UNSLOTH_LOG_LEVEL_OFF {
            subscribe(OP)?;
        }
        // Waits for the callbacks that run.
        let mut sink = SINK.write().unwrap_or_else(PoisonError::into_inner);
        *sink = Sink { callback, user };
        LEVEL.store(level, Ordering::Relaxed);
        tracing::callsite::rebuild_interest_cache();
        Ok(())
    })
}

/// Where messages go.
struct Sink {
    callback: unsloth_log_callback,
    user: *mut c_void,
}

// SAFETY: `user` is only given back to the callback, and the caller of `unsloth_log_set` promises that any thread may do so.
unsafe impl Send for Sink {}
// SAFETY: as above, by several at a time.
unsafe impl Sync for Sink {}

/// Held for reading while a message is delivered.
static SINK: RwLock<Sink> = RwLock::new(Sink {
    callback: None,
    user: std::ptr::null_mut(),
});

/// How much is told. Written while the sink is; `tracing` keeps a copy for each place that has a message.
static LEVEL: AtomicU32 = AtomicU32::new(UNSLOTH_LOG_LEVEL_OFF);

thread_local! {
    /// Whether the thread is inside a callback.
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Makes C's sink the program's subscriber, once.
fn subscribe(op: &'static str) -> Result<()> {
    static DONE: OnceLock<bool> = OnceLock::new();
    let ours = DONE.get_or_init(|| tracing::subscriber::set_global_default(ToSink).is_ok());
    match ours {
        true => Ok(()),
        false => {
            let problem = "is of no use: the program has a tracing subscriber, which gets them";
            Err(Error::unsupported(op, "callback", problem))
        }
    }
}

/// The subscriber that hands the library's events to the sink.
struct ToSink;

/// Whether it is an event, not a span, of this crate's.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    let crate_name = metadata.target().split("::").next();
    metadata.is_event() && crate_name == Some(env!("CARGO_CRATE_NAME"))
}

impl Subscriber for ToSink {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.enabled(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_ours(metadata) && number_and_name(*metadata.level()).0 <= LEVEL.load(Ordering::Relaxed)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match LEVEL.load(Ordering::Relaxed) {
            UNSLOTH_LOG_LEVEL_OFF => LevelFilter::OFF,
            UNSLOTH_LOG_LEVEL_ERROR => LevelFilter::ERROR,
            UNSLOTH_LOG_LEVEL_WARN => LevelFilter::WARN,
            UNSLOTH_LOG_LEVEL_INFO => LevelFilter::INFO,
            UNSLOTH_LOG_LEVEL_DEBUG => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn event(&self, event: &Event<'_>) {
        if DELIVERING.replace(true) {
            return;
        }
        let _done = Done;
        deliver(event);
    }

    // Spans are never enabled, so none is made.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Takes the mark away again, after a panic as well.
struct Done;

impl Drop for Done {
    fn drop(&mut self) {
        DELIVERING.set(false);
    }
}

fn number_and_name(level: Level) -> (unsloth_log_level, &'static str) {
    match level {
        Level::ERROR => (UNSLOTH_LOG_LEVEL_ERROR, "error"),
        Level::WARN => (UNSLOTH_LOG_LEVEL_WARN, "warn"),
        Level::INFO => (UNSLOTH_LOG_LEVEL_INFO, "info"),
        Level::DEBUG => (UNSLOTH_LOG_LEVEL_DEBUG, "debug"),
        _ => (UNSLOTH_LOG_LEVEL_TRACE, "trace"),
    }
}

fn deliver(event: &Event<'_>) {
    let (number, name) = number_and_name(*event.metadata().level());
    let sink = SINK.read().unwrap_or_else(PoisonError::into_inner);
    // The level may have changed since the event was let through.
    if number > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let mut line = Line::default();
    event.record(&mut line);
    match sink.callback {
        Some(callback) => {
            let message = line.finish();
            // SAFETY: the message is NUL-terminated; the rest is the promise of who called `unsloth_log_set`.
            unsafe { callback(number, message.as_ptr().cast(), sink.user) };
        }
        None => {
            use std::io::Write;
            // Nobody can be told that the standard error stream is closed.
            let _ = writeln!(std::io::stderr(), "unsloth: {name}: {}", line.text);
        }
    }
}

/// The most bytes of a message, its NUL included.
const MAX_MESSAGE: usize = 1024;

/// A message as it grows: the event's text, then its fields. What does not fit is cut.
#[derive(Default)]
struct Line {
    text: ArrayString<MAX_MESSAGE>,
}

impl Line {
    /// The message as C has it.
    fn finish(mut self) -> ArrayString<MAX_MESSAGE> {
        // `write_str` leaves room.
        self.text.push('\0');
        self.text
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.text.len() + c.len_utf8() >= MAX_MESSAGE {
                return Err(fmt::Error);
            }
            // One line, and no end before its end.
            self.text.push(if c.is_control() { ' ' } else { c });
        }
        Ok(())
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // An error says that there is no room, and the message is cut.
        let _ = match field.name() {
            "message" => write!(self, "{value:?}"),
            name => write!(self, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_a_character_and_hold_no_control_characters() {
        let mut line = Line::default();
        assert!(line.write_str("a\nb\0c").is_ok());
        assert!(line.write_str(&"é".repeat(MAX_MESSAGE)).is_err());
        let text = line.finish();
        assert!(text.starts_with("a b cé"));
        assert_eq!(text.len(), MAX_MESSAGE);
        assert_eq!(text.find('\0'), Some(MAX_MESSAGE - 1));
    }
}
