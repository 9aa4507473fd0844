//! The C ABI, one file per section of `include/unsloth.h`, which cbindgen writes from these files.
//!
//! Functions here check pointers, convert arguments, call [`ops`](crate::ops) and map errors to statuses; nothing else. Every
//! body runs inside `guard`, so no panic crosses the boundary.
//!
//! Names follow C's conventions, as the header shows them.
#![allow(non_camel_case_types)]

pub mod all_gather;
pub mod all_reduce;
pub mod all_reduce_rms_norm;
pub mod all_to_all;
pub mod argmax;
pub mod attention;
pub mod attention_block;
pub mod attention_merge;
pub mod broadcast;
pub mod cast;
pub mod checkpoint;
pub mod comm;
pub mod context;
pub mod context_parallel_attention;
pub mod context_parallel_tokens;
pub mod cross_entropy;
pub mod decoder_layer;
pub mod dlpack;
pub mod embedding;
pub mod estimate;
pub mod event;
mod handle;
pub mod kv_cache;
pub mod kv_cache_sequence;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod linear_logprob;
pub mod log;
pub mod memory;
pub mod mlp;
mod operation;
pub mod optimizer;
pub mod optimizer_handle;
pub mod parallel;
mod params;
pub mod pipeline;
pub mod qk_norm_rope;
pub mod quantize;
pub mod reduce_scatter;
pub mod rms_norm;
pub mod rope;
pub mod send_receive;
pub mod shard;
mod slots;
pub mod status;
pub mod swiglu;
pub mod tensor;
pub mod weight_repack;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::context::Stream;
use crate::error::{Error, Result, text};
use status::{UNSLOTH_STATUS_SUCCESS, set_last_error, unsloth_status};

/// A queue of work on a device. With the CUDA backend a `CUstream` or `cudaStream_t` of the caller's, or NULL for the
/// default stream. The CPU backend runs each call to its end and takes NULL.
pub type unsloth_stream = *mut c_void;

/// Which implementation runs a call; see the `unsloth_*_supported` functions.
pub type unsloth_implementation = u32;
/// The CPU backend.
pub const UNSLOTH_IMPLEMENTATION_CPU: unsloth_implementation = 1;
/// The CUDA backend's kernels for every architecture.
pub const UNSLOTH_IMPLEMENTATION_CUDA: unsloth_implementation = 2;
/// The CUDA backend's kernels for the matrix and copy instructions of Hopper (compute capability 9.0).
pub const UNSLOTH_IMPLEMENTATION_CUDA_HOPPER: unsloth_implementation = 3;

/// Runs the body of an exported function: errors and panics become statuses, and their messages the thread's last message.
pub(crate) fn guard(op: &'static str, body: impl FnOnce() -> Result<()>) -> unsloth_status {
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return UNSLOTH_STATUS_SUCCESS,
        Ok(Err(error)) => error,
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            let message = text!("{}", said.unwrap_or("panic"));
            Error::Internal { op, message }
        }
    };
    crate::log::failed(&error);
    set_last_error(&error)
}

/// The caller's stream.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
pub(crate) unsafe fn stream_from(stream: unsloth_stream) -> Stream {
    // SAFETY: the caller's promise.
    unsafe { Stream::from_raw(stream) }
}

/// A flag of a parameter struct.
pub(crate) fn flag(op: &'static str, name: &'static str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::invalid(op, name, text!("is {value}, allowed: 0, 1"))),
    }
}

/// A size or number, not negative.
pub(crate) fn count(op: &'static str, name: &'static str, value: i64) -> Result<usize> {
    usize::try_from(value)
        .map_err(|_| Error::invalid(op, name, text!("is {value}, at least 0 is needed")))
}

/// Checks a pointer that the function writes a result through.
pub(crate) fn check_out<T>(op: &'static str, name: &'static str, ptr: *mut T) -> Result<()> {
    check_pointer(op, name, ptr.cast_const())
}

/// Checks a pointer that the function may write a result through: NULL says that none is wanted.
pub(crate) fn check_optional_out<T>(
    op: &'static str,
    name: &'static str,
    ptr: *mut T,
) -> Result<()> {
    if ptr.is_null() {
        return Ok(());
    }
    check_out(op, name, ptr)
}

/// Checks that a pointer is not NULL and is aligned.
pub(crate) fn check_pointer<T>(op: &'static str, name: &'static str, ptr: *const T) -> Result<()> {
    if ptr.is_null() {
        return Err(Error::NullPointer {
            op,
            argument: name.into(),
        });
    }
    if !ptr.is_aligned() {
        let problem = text!("{ptr:p} is not aligned to {} bytes", align_of::<T>());
        return Err(Error::invalid(op, name, problem));
    }
    Ok(())
}

/// Writes through an optional result pointer.
///
/// # Safety
/// `ptr` is NULL or valid for a write.
pub(crate) unsafe fn write_optional<T>(
    op: &'static str,
    name: &'static str,
    ptr: *mut T,
    value: impl FnOnce() -> T,
) -> Result<()> {
    if ptr.is_null() {
        return Ok(());
    }
    check_out(op, name, ptr)?;
    // SAFETY: not NULL and aligned; the caller promises that it is valid.
    unsafe { ptr.write(value()) };
    Ok(())
}
