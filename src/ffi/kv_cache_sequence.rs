//! The sequences of a KV cache.

use crate::error::{Error, text};
use crate::ffi::kv_cache::{cache_from, unsloth_kv_cache};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, count, guard, stream_from, unsloth_stream, write_optional};
use crate::kv_cache::SequenceId;

/// What a sequence holds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_sequence_info {
    /// `sizeof(unsloth_kv_cache_sequence_info)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Tokens in the cache.
    pub length: i64,
    /// Position of the next token: tokens in the cache and evicted ones.
    pub position: i64,
    /// The first evicted position; `length` if none was.
    pub evicted_from: i64,
    /// Evicted tokens, a range of positions that starts at `evicted_from`.
    pub num_evicted: i64,
    /// Pages held, reserved ones included.
    pub num_pages: i64,
    /// Pages that other sequences hold too.
    pub num_shared_pages: i64,
    /// Tokens that can be added before a page must be found.
    pub num_reserved: i64,
}
params!(unsloth_kv_cache_sequence_info, [reserved]);

/// Makes an empty sequence and writes its identifier, a positive number, to `sequence`. Identifiers of sequences that were freed are
/// recognised, and refused with `UNSLOTH_STATUS_INVALID_HANDLE`.
///
/// # Safety
/// `sequence` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_create(
    cache: *mut unsloth_kv_cache,
    sequence: *mut i64,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_create";
    guard(OP, || {
        check_out(OP, "sequence", sequence)?;
        let id = cache_from(OP, cache)?.create_sequence()?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { sequence.write(id.as_raw()) };
        Ok(())
    })
}

/// Ends a sequence and gives back its pages.
///
/// # Safety
/// `cache` was made by `unsloth_kv_cache_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_free(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_free";
    guard(OP, || {
        cache_from(OP, cache)?.free_sequence(SequenceId::from_raw(sequence))
    })
}

/// Makes a sequence with the same tokens and writes its identifier to `fork`. The two share every page until one of them writes to
/// it: the last page, if it is not full, is copied by the first of them to be extended.
///
/// # Safety
/// `fork` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_fork(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    fork: *mut i64,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_fork";
    guard(OP, || {
        check_out(OP, "fork", fork)?;
        let id = cache_from(OP, cache)?.fork_sequence(SequenceId::from_raw(sequence))?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { fork.write(id.as_raw()) };
        Ok(())
    })
}

/// Cuts a sequence to the tokens before position `num_tokens`, and gives back pages beyond them, reserved ones too.
/// `UNSLOTH_STATUS_INVALID_ARGUMENT` if that is beyond its end or inside what was evicted.
///
/// # Safety
/// `cache` was made by `unsloth_kv_cache_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_truncate(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    num_tokens: i64,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_truncate";
    guard(OP, || {
        let mut cache = cache_from(OP, cache)?;
        let num_tokens = count(OP, "num_tokens", num_tokens)?;
        cache.truncate_sequence(SequenceId::from_raw(sequence), num_tokens)
    })
}

/// Gives back the pages between the first `num_sinks` and the last `window` tokens, and writes how many tokens that were to
/// `num_evicted` unless NULL.
///
/// Whole pages go: up to `page_size - 1` tokens more than asked for stay on either side. The positions of the tokens that stay do
/// not change, nor does that of the next one; block tables and lengths count only what stays, so attention sees the sinks directly
/// followed by the window. What is evicted stays one range of positions: where a larger window and fewer sinks than before would
/// split it, nothing happens.
///
/// # Safety
/// `num_evicted` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_evict(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    num_sinks: i64,
    window: i64,
    num_evicted: *mut i64,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_evict";
    guard(OP, || {
        let mut cache = cache_from(OP, cache)?;
        let (num_sinks, window) = (
            count(OP, "num_sinks", num_sinks)?,
            count(OP, "window", window)?,
        );
        if !num_evicted.is_null() {
            check_out(OP, "num_evicted", num_evicted)?;
        }
        let evicted = cache.evict_sequence(SequenceId::from_raw(sequence), num_sinks, window)?;
        // SAFETY: the caller's promise.
        unsafe { write_optional(OP, "num_evicted", num_evicted, || evicted as i64) }
    })
}

/// Takes pages for `num_tokens` more tokens, so that extending the sequence by these cannot run out of pages (unless the sequence is
/// forked in between). `UNSLOTH_STATUS_OUT_OF_PAGES` leaves everything as it was.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_reserve(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    num_tokens: i64,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_reserve";
    guard(OP, || {
        let mut cache = cache_from(OP, cache)?;
        let num_tokens = count(OP, "num_tokens", num_tokens)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { stream_from(stream) };
        cache.reserve_sequence(SequenceId::from_raw(sequence), num_tokens, stream)
    })
}

/// Describes a sequence in `info`, whose `struct_size` the caller has set (`UNSLOTH_KV_CACHE_SEQUENCE_INFO_INIT`).
///
/// # Safety
/// `info` is NULL or points to `info->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_info_get(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    info: *mut unsloth_kv_cache_sequence_info,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_info";
    guard(OP, || {
        check_out(OP, "info", info)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, info.cast_const()) }?;
        let found = cache_from(OP, cache)?.sequence(SequenceId::from_raw(sequence))?;
        out.length = found.length as i64;
        out.position = found.position as i64;
        out.evicted_from = found.evicted_from as i64;
        out.num_evicted = found.num_evicted as i64;
        out.num_pages = found.num_pages as i64;
        out.num_shared_pages = found.num_shared_pages as i64;
        out.num_reserved = found.num_reserved as i64;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, info) };
        Ok(())
    })
}

/// Copies the page indices of a sequence, in the order of its tokens and reserved ones last, to `pages`, which has room for
/// `capacity` of them, and writes their number to `num_pages`. With `capacity` 0 (`pages` may then be NULL) it only counts; a
/// smaller capacity than that number is otherwise `UNSLOTH_STATUS_INVALID_ARGUMENT`.
///
/// # Safety
/// `pages` is NULL or has room for `capacity` entries; `num_pages` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_sequence_pages_get(
    cache: *mut unsloth_kv_cache,
    sequence: i64,
    pages: *mut i32,
    capacity: usize,
    num_pages: *mut usize,
) -> unsloth_status {
    const OP: &str = "kv_cache_sequence_pages";
    guard(OP, || {
        check_out(OP, "num_pages", num_pages)?;
        let cache = cache_from(OP, cache)?;
        let found = cache.sequence_pages(SequenceId::from_raw(sequence))?;
        if capacity > 0 {
            check_out(OP, "pages", pages)?;
            if capacity < found.len() {
                let problem = text!("is {capacity}, the sequence has {} pages", found.len());
                return Err(Error::invalid(OP, "capacity", problem));
            }
            // Page indices fit an i32 (Config::validate), so they look the same as u32.
            // SAFETY: `found.len() <= capacity`, and the caller promises that much room.
            unsafe { std::ptr::copy_nonoverlapping(found.as_ptr().cast(), pages, found.len()) };
        }
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { num_pages.write(found.len()) };
        Ok(())
    })
}
