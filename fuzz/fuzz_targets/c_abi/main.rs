//! Calls the C ABI as a careless caller would: structs that are nearly right, over memory of exactly the size that they describe.
//!
//! Whatever the arguments, a call returns in time, reads and writes nothing outside its tensors (the address sanitizer watches),
//! does not panic, and leaves every byte as it was if it fails. Queries foretell what the call itself says.

#![no_main]

mod arena;
mod attention;
mod cache;
mod call;
mod collectives;
mod decoder_layer;
mod dense;
mod estimates;
mod input;
mod loss;
mod operations;
mod optimizer;
mod rows;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use libfuzzer_sys::fuzz_target;
use unsloth::ffi::context::{unsloth_context, unsloth_context_create, unsloth_context_params};
use unsloth::ffi::status::*;

use input::Input;

/// Which context this execution's calls are made on.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);

/// The number of that context.
fn chosen() -> usize {
    CHOSEN.load(Ordering::Relaxed)
}

/// A context that all executions share: most of them one whose calls stay on the calling thread, which saves waking another; one
/// in 16 a context with two threads.
fn context() -> *mut unsloth_context {
    static CONTEXTS: [OnceLock<usize>; 2] = [const { OnceLock::new() }; 2];
    let chosen = chosen();
    let ticket = CONTEXTS[chosen].get_or_init(|| {
        let params = unsloth_context_params {
            struct_size: size_of::<unsloth_context_params>() as u32,
            backend: 0,
            device: 0,
            num_threads: chosen as u32 + 1,
            memory_limit: 1 << 22,
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

/// What an execution may do; its first byte chooses. Any number of entries is reached by seeds that begin with every byte.
const CHOICES: usize = 6 + operations::ALL.len();

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let choice = usize::from(input.byte()) % CHOICES;
    CHOSEN.store(usize::from(input.one_in(16)), Ordering::Relaxed);
    match choice {
        0..3 => cache::run(&mut input),
        3 => estimates::run(&mut input),
        4 => optimizer::run(&mut input),
        5 => collectives::run(&mut input),
        _ => operations::run(operations::ALL[choice - 6], &mut input),
    }
});
