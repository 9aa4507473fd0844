//! Logging through the C ABI: who is told what, and when no more.

mod common;

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::abi::{assert_fails, last_message};
use unsloth::ffi::context::*;
use unsloth::ffi::log::*;
use unsloth::ffi::status::*;

/// The sink belongs to the process, so the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the sink; it must have been let.
fn set(level: unsloth_log_level, callback: unsloth_log_callback, user: *mut c_void) {
    // SAFETY: the tests' callbacks are for any thread, and replaced before their data goes.
    let status = unsafe { unsloth_log_set(level, callback, user) };
    assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
}

/// A call that is refused.
fn refused(device: i32) -> String {
    let mut info: unsloth_device_info =
        // SAFETY: a struct of integers, size first.
        unsafe { common::abi::zeroed_params() };
    // SAFETY: `info` is a live local.
    let status = unsafe { unsloth_device_info_get(UNSLOTH_BACKEND_CPU, device, &mut info) };
    assert_eq!(status, UNSLOTH_STATUS_INVALID_ARGUMENT);
    last_message()
}

type Told = Mutex<Vec<(unsloth_log_level, String)>>;

/// Keeps messages in the `Told` at `user`.
unsafe extern "C" fn keep(level: unsloth_log_level, message: *const c_char, user: *mut c_void) {
    // SAFETY: the test gave a live `Told`, and the library a string.
    let (told, message) = unsafe { (&*user.cast::<Told>(), CStr::from_ptr(message)) };
    let message = message.to_str().unwrap().to_owned();
    told.lock().unwrap().push((level, message));
}

#[test]
fn refusals_are_told_at_their_level() {
    let _alone = alone();
    let told = Told::default();
    let user = (&raw const told).cast_mut().cast();
    set(UNSLOTH_LOG_LEVEL_DEBUG, Some(keep), user);
    let message = refused(7);
    assert_eq!(message, "device_info: device 7 is outside 0 to 0");
    assert_eq!(
        *told.lock().unwrap(),
        [(UNSLOTH_LOG_LEVEL_DEBUG, message.clone())]
    );
    set(UNSLOTH_LOG_LEVEL_INFO, Some(keep), user);
    refused(8);
    set(UNSLOTH_LOG_LEVEL_OFF, Some(keep), user);
    refused(9);
    assert_eq!(told.lock().unwrap().len(), 1);
    set(UNSLOTH_LOG_LEVEL_TRACE, Some(keep), user);
    refused(10);
    set(UNSLOTH_LOG_LEVEL_OFF, None, ptr::null_mut());
    assert_eq!(told.lock().unwrap().len(), 2);
}

#[test]
fn a_context_is_told_of() {
    let _alone = alone();
    let told = Told::default();
    set(
        UNSLOTH_LOG_LEVEL_INFO,
        Some(keep),
        (&raw const told).cast_mut().cast(),
    );
    drop(common::abi::Handle::cpu());
    set(UNSLOTH_LOG_LEVEL_OFF, None, ptr::null_mut());
    let told = told.into_inner().unwrap();
    assert_eq!(told.len(), 1, "{told:?}");
    let (level, message) = &told[0];
    assert_eq!(*level, UNSLOTH_LOG_LEVEL_INFO);
    assert!(message.starts_with("context: cpu 0 ("), "{message}");
}

#[test]
fn levels_are_checked() {
    let _alone = alone();
    for level in [6, u32::MAX] {
        // SAFETY: refused before anything is kept.
        let status = unsafe { unsloth_log_set(level, Some(keep), ptr::null_mut()) };
        let message = format!("log_set: level is {level}, allowed: 0 (off) to 5 (trace)");
        assert_fails(status, UNSLOTH_STATUS_INVALID_ARGUMENT, &message);
    }
}

/// Calls the library, and tries to replace itself.
unsafe extern "C" fn call_again(_: unsloth_log_level, _: *const c_char, user: *mut c_void) {
    // SAFETY: the test gave a live counter.
    let calls = unsafe { &*user.cast::<AtomicUsize>() };
    calls.fetch_add(1, Ordering::Relaxed);
    refused(3);
    // SAFETY: refused before anything is kept.
    let status = unsafe { unsloth_log_set(UNSLOTH_LOG_LEVEL_OFF, None, ptr::null_mut()) };
    let message = "log_set: callback may not be replaced from inside a callback";
    assert_fails(status, UNSLOTH_STATUS_INVALID_ARGUMENT, message);
}

#[test]
fn callbacks_may_call_but_not_replace_themselves() {
    let _alone = alone();
    let calls = AtomicUsize::new(0);
    let user = (&raw const calls).cast_mut().cast();
    set(UNSLOTH_LOG_LEVEL_TRACE, Some(call_again), user);
    let message = refused(2);
    set(UNSLOTH_LOG_LEVEL_OFF, None, ptr::null_mut());
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    // The callback's own failures do not replace what the call said.
    assert_eq!(message, "device_info: device 2 is outside 0 to 0");
}

/// Fails if it is called behind its end.
unsafe extern "C" fn live(_: unsloth_log_level, _: *const c_char, user: *mut c_void) {
    // SAFETY: the test gave a flag that outlives all threads.
    let ended = unsafe { &*user.cast::<AtomicBool>() };
    if ended.load(Ordering::Relaxed) {
        LATE.fetch_add(1, Ordering::Relaxed);
    }
}

static LATE: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_replaced_callback_is_called_no_more() {
    let _alone = alone();
    let done = AtomicBool::new(false);
    let ends: Vec<AtomicBool> = (0..200).map(|_| AtomicBool::new(false)).collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    refused(100 + thread);
                }
            });
        }
        for (i, ended) in ends.iter().enumerate() {
            let user = (&raw const *ended).cast_mut().cast();
            set(UNSLOTH_LOG_LEVEL_TRACE, Some(live), user);
            if let Some(before) = i.checked_sub(1) {
                ends[before].store(true, Ordering::Relaxed);
            }
        }
        set(UNSLOTH_LOG_LEVEL_OFF, None, ptr::null_mut());
        ends[ends.len() - 1].store(true, Ordering::Relaxed);
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(LATE.load(Ordering::Relaxed), 0);
}
