//! A Rust program with a subscriber of its own receives what C's callback would.

use std::sync::Mutex;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use unsloth::Context;
use unsloth::ffi::log::{UNSLOTH_LOG_LEVEL_INFO, unsloth_log_set};
use unsloth::ffi::status::UNSLOTH_STATUS_UNSUPPORTED;

static TOLD: Mutex<Vec<(String, Level, String)>> = Mutex::new(Vec::new());

struct Keep;

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Keep {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("unsloth") && *metadata.level() <= Level::INFO
    }
    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let metadata = event.metadata();
        let told = (metadata.target().to_owned(), *metadata.level(), message.0);
        TOLD.lock().unwrap().push(told);
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn the_program_has_its_own_subscriber() {
    tracing::subscriber::set_global_default(Keep).unwrap();
    drop(Context::cpu().unwrap());
    let told = TOLD.lock().unwrap();
    let [(target, level, message)] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!((target.as_str(), *level), ("unsloth::context", Level::INFO));
    assert!(message.starts_with("context: cpu 0 ("), "{message}");
    drop(told);
    // SAFETY: no callback, and so nothing that must live.
    let status = unsafe { unsloth_log_set(UNSLOTH_LOG_LEVEL_INFO, None, std::ptr::null_mut()) };
    assert_eq!(status, UNSLOTH_STATUS_UNSUPPORTED);
}
