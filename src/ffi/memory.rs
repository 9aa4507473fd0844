//! Memory on a context's device.

use std::ffi::c_void;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, guard, stream_from, unsloth_stream};
use crate::memory::{self, Buffer, CopyKind};

/// Between which memories a copy goes.
pub type unsloth_copy_kind = u32;
/// From the host to the context's device.
pub const UNSLOTH_COPY_KIND_HOST_TO_DEVICE: unsloth_copy_kind = 1;
/// From the context's device to the host.
pub const UNSLOTH_COPY_KIND_DEVICE_TO_HOST: unsloth_copy_kind = 2;
/// Within the context's device.
pub const UNSLOTH_COPY_KIND_DEVICE_TO_DEVICE: unsloth_copy_kind = 3;

/// What a context has allocated.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_memory_stats {
    /// `sizeof(unsloth_memory_stats)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes allocated now, KV caches included.
    pub in_use: u64,
    /// The most bytes that were allocated at a time since the context was made or the peak reset.
    pub peak: u64,
    /// The most bytes that may be allocated at a time; 0 for no limit.
    pub limit: u64,
    /// Live allocations.
    pub num_allocations: u64,
}
params!(unsloth_memory_stats, min_size = 40);

/// Allocates `size` bytes on the context's device, aligned to 256 bytes, and writes the address to `ptr`. The contents are zero.
/// Freed with `unsloth_memory_free`, or with the context. A size of zero gives an address that may only be freed.
///
/// Allocates, so it may not be called while a graph is captured. `UNSLOTH_STATUS_OUT_OF_MEMORY` names what stood in the way.
///
/// # Safety
/// `ptr` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_alloc(
    ctx: *mut unsloth_context,
    size: usize,
    ptr: *mut *mut c_void,
) -> unsloth_status {
    const OP: &str = "memory_alloc";
    guard(OP, || {
        check_out(OP, "ptr", ptr)?;
        let object = context_from(OP, ctx)?;
        let buffer = Buffer::new(&object.context, size)?;
        let address = buffer.as_ptr();
        object
            .allocations
            .lock()
            .unwrap_or_else(|p| p.into_inner())
            .insert(address as usize, buffer);
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { ptr.write(address.cast()) };
        Ok(())
    })
}

/// Frees memory of `unsloth_memory_alloc` of the same context. NULL is fine; any other address is
/// `UNSLOTH_STATUS_INVALID_ARGUMENT`. No work that uses it may still be queued.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_memory_free(
    ctx: *mut unsloth_context,
    ptr: *mut c_void,
) -> unsloth_status {
    const OP: &str = "memory_free";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        if ptr.is_null() {
            return Ok(());
        }
        let mut allocations = object.allocations.lock().unwrap_or_else(|p| p.into_inner());
        let found = allocations.remove(&(ptr as usize));
        drop(allocations);
        match found {
            Some(buffer) => drop(buffer),
            None => {
                let problem = format!("{ptr:p} is not a live allocation of this context");
                return Err(Error::invalid(OP, "ptr", problem));
            }
        }
        Ok(())
    })
}

/// Queues a copy of `size` bytes on `stream`. The two ranges may not overlap. With the CUDA backend a copy from or to pageable host
/// memory may be staged and return late; pinned memory keeps it asynchronous.
///
/// # Safety
/// `dst` and `src` are NULL (with `size` 0) or valid for `size` bytes on the sides that `kind` names, until the copy has run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_copy(
    ctx: *mut unsloth_context,
    dst: *mut c_void,
    src: *const c_void,
    size: usize,
    kind: unsloth_copy_kind,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "memory_copy";
    guard(OP, || {
        let context = &context_from(OP, ctx)?.context;
        let kind = CopyKind::from_raw(kind).ok_or_else(|| {
            let problem = format!(
                "is {kind}, allowed: 1 (host to device), 2 (device to host), 3 (device to device)"
            );
            Error::invalid(OP, "kind", problem)
        })?;
        check_range(OP, "dst", dst.cast_const(), size)?;
        check_range(OP, "src", src, size)?;
        let apart = (dst as usize).abs_diff(src as usize) >= size;
        if !apart {
            return Err(Error::invalid(
                OP,
                "dst",
                format!("overlaps src within {size} bytes"),
            ));
        }
        // SAFETY: the ranges are the caller's promise; that they do not overlap was checked.
        unsafe {
            memory::copy(
                context,
                dst.cast(),
                src.cast(),
                size,
                kind,
                stream_from(stream),
            )
        }
    })
}

/// Queues setting `size` bytes of device memory to `value` on `stream`.
///
/// # Safety
/// `dst` is NULL (with `size` 0) or valid for writing `size` bytes on the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_set(
    ctx: *mut unsloth_context,
    dst: *mut c_void,
    value: u8,
    size: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "memory_set";
    guard(OP, || {
        let context: &Context = &context_from(OP, ctx)?.context;
        check_range(OP, "dst", dst.cast_const(), size)?;
        // SAFETY: the range is the caller's promise.
        unsafe { memory::set(context, dst.cast(), value, size, stream_from(stream)) }
    })
}

/// Describes in `stats` what the context has allocated; the caller has set `struct_size` (`UNSLOTH_MEMORY_STATS_INIT`).
///
/// # Safety
/// `stats` is NULL or points to `stats->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_stats_get(
    ctx: *mut unsloth_context,
    stats: *mut unsloth_memory_stats,
) -> unsloth_status {
    const OP: &str = "memory_stats";
    guard(OP, || {
        check_out(OP, "stats", stats)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, stats.cast_const()) }?;
        let counted = context_from(OP, ctx)?.context.memory_stats();
        out.in_use = counted.in_use;
        out.peak = counted.peak;
        out.limit = counted.limit.unwrap_or(0);
        out.num_allocations = counted.num_allocations;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, stats) };
        Ok(())
    })
}

/// Makes the peak equal to what is in use.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_memory_peak_reset(ctx: *mut unsloth_context) -> unsloth_status {
    const OP: &str = "memory_peak_reset";
    guard(OP, || {
        context_from(OP, ctx)?.context.reset_memory_peak();
        Ok(())
    })
}

/// Changes the most bytes that may be allocated at a time; 0 for no limit. What is allocated already stays.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_memory_limit_set(
    ctx: *mut unsloth_context,
    limit: u64,
) -> unsloth_status {
    const OP: &str = "memory_limit_set";
    guard(OP, || {
        context_from(OP, ctx)?
            .context
            .set_memory_limit((limit != 0).then_some(limit));
        Ok(())
    })
}

/// A range of `size` bytes neither starts at NULL nor wraps around.
fn check_range(
    op: &'static str,
    name: &'static str,
    ptr: *const c_void,
    size: usize,
) -> Result<()> {
    if size > isize::MAX as usize || (ptr as usize).checked_add(size).is_none() {
        return Err(Error::invalid(
            op,
            "size",
            format!("{size} overflows the address space"),
        ));
    }
    if ptr.is_null() && size > 0 {
        return Err(Error::NullPointer {
            op,
            argument: name.into(),
        });
    }
    Ok(())
}
