//! Calls the C ABI as a careless caller would: structs that are nearly right, over memory of exactly the size that they describe.
//!
//! Whatever the arguments, a call returns in time, reads and writes nothing outside its tensors (the address sanitizer watches),
//! does not panic, and leaves every byte as it was if it fails. Queries foretell what the call itself says.

#![no_main]

mod arena;
mod attention;
mod cache;
mod estimates;
mod input;
mod operations;

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use unsloth::ffi::context::{unsloth_context, unsloth_context_create, unsloth_context_params};
use unsloth::ffi::status::*;

use input::Input;

/// A context for all calls, with two threads.
fn context() -> *mut unsloth_context {
    static CONTEXT: OnceLock<usize> = OnceLock::new();
    let ticket = CONTEXT.get_or_init(|| {
        let params = unsloth_context_params {
            struct_size: size_of::<unsloth_context_params>() as u32,
            backend: 0,
            device: 0,
            num_threads: 2,
            memory_limit: 1 << 26,
        };
        let mut ctx = std::ptr::null_mut();
        // SAFETY: pointers to live locals.
        let status = unsafe { unsloth_context_create(&params, &mut ctx) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS);
        ctx.expose_provenance()
    });
    std::ptr::with_exposed_provenance_mut(*ticket)
}

/// The calling thread's last message.
fn last_message() -> String {
    let mut buffer = [0u8; 512];
    // SAFETY: the buffer has the capacity stated.
    let len = unsafe { unsloth_last_error_message(buffer.as_mut_ptr().cast(), buffer.len()) };
    String::from_utf8_lossy(&buffer[..len.min(buffer.len() - 1)]).into_owned()
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    match input.byte() % 18 {
        0..3 => cache::run(&mut input),
        3 => estimates::run(&mut input),
        choice => operations::run(choice - 4, &mut input),
    }
});
