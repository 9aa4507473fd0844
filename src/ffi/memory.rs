//! Memory on a context's device.

use std::ffi::c_void;

use crate::context::Context;
use crate::error::{Error, Result, text};
use crate::ffi::context::{CONTEXTS, ContextObject, context_from, unsloth_context};
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
    /// Bytes that the pool for `unsloth_memory_alloc_async` holds of the device's memory, used or not, by the driver's count: what it
    /// rounds allocations up to is in it, and what was freed until `unsloth_memory_pool_trim`. 0 without a pool.
    pub pool_size: u64,
}
params!(unsloth_memory_stats, [reserved]);

/// Allocates `size` bytes on the context's device, aligned to 256 bytes, and writes the address to `ptr`. The contents are zero.
/// Freed with `unsloth_memory_free`, or with the context. A size of zero gives an address that may only be freed.
///
/// With the CPU backend on Linux 4 MiB and more are mapped, in huge pages where the system gives them: what is read from end to end, as
/// weights are for each token, is read faster from there than from a mapped file.
///
/// Waits for the device, so it may not be called while a graph is captured. With the CUDA backend the memory comes from the device
/// itself, not from the pool, and may be shared with other processes and registered with communication libraries.
/// The message of `UNSLOTH_STATUS_OUT_OF_MEMORY` names the context's limit, or how much of the device's memory is free.
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
        let address = give_out(OP, &object, Buffer::new(&object.context, size)?)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { ptr.write(address) };
        Ok(())
    })
}

/// Allocates like `unsloth_memory_alloc`, but in the order of `stream` and with unspecified contents: it neither waits for the device
/// nor, where the context's pool has the memory, asks the device for any. For memory that comes and goes with the steps of a model,
/// such as workspaces. Work of other streams may use the memory behind this point of `stream`, by an event or a synchronisation.
///
/// The pool keeps what is freed until `unsloth_memory_pool_trim` or the end of the context. On devices without pools, and on the CPU,
/// this is `unsloth_memory_alloc`. `UNSLOTH_STATUS_INVALID_ARGUMENT` while `stream` is captured into a graph.
///
/// # Safety
/// `ptr` is NULL or valid for a write; `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_alloc_async(
    ctx: *mut unsloth_context,
    size: usize,
    ptr: *mut *mut c_void,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "memory_alloc_async";
    guard(OP, || {
        check_out(OP, "ptr", ptr)?;
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise; that other streams come behind is part of the function's contract.
        let buffer = unsafe { Buffer::new_async(&object.context, size, stream_from(stream)) };
        let address = give_out(OP, &object, buffer.map_err(|error| error.within(OP))?)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { ptr.write(address) };
        Ok(())
    })
}

/// Keeps a buffer with its context, and gives its address.
fn give_out(op: &'static str, object: &ContextObject, buffer: Buffer) -> Result<*mut c_void> {
    let address = buffer.as_ptr();
    let mut allocations = object.allocations.lock().unwrap_or_else(|p| p.into_inner());
    allocations
        .try_reserve(1)
        .map_err(|_| Error::out_of_host_memory(op, size_of::<(usize, Buffer)>()))?;
    allocations.insert(address as usize, buffer);
    Ok(address.cast())
}

/// Takes the buffer at an address back.
fn take_back(op: &'static str, object: &ContextObject, ptr: *mut c_void) -> Result<Buffer> {
    let mut allocations = object.allocations.lock().unwrap_or_else(|p| p.into_inner());
    allocations.remove(&(ptr as usize)).ok_or_else(|| {
        let problem = text!("{ptr:p} is not a live allocation of this context");
        Error::invalid(op, "ptr", problem)
    })
}

/// Frees memory of `unsloth_memory_alloc` or `unsloth_memory_alloc_async` of the same context, after all work queued on the device.
/// NULL is fine; any other address is `UNSLOTH_STATUS_INVALID_ARGUMENT`. May not be called while a graph is captured.
///
/// # Safety
/// Nothing uses the memory afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_free(
    ctx: *mut unsloth_context,
    ptr: *mut c_void,
) -> unsloth_status {
    const OP: &str = "memory_free";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        if ptr.is_null() {
            return Ok(());
        }
        drop(take_back(OP, &object, ptr)?);
        Ok(())
    })
}

/// Frees memory of `unsloth_memory_alloc_async` of the same context in the order of `stream`, without waiting: work queued on
/// `stream` before may use it, that of other streams must be done or come before this point of `stream`. NULL is fine; any other
/// address, and a stream that is captured into a graph, is `UNSLOTH_STATUS_INVALID_ARGUMENT`. Memory of `unsloth_memory_alloc` is
/// freed as well, after waiting for `stream`.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_free_async(
    ctx: *mut unsloth_context,
    ptr: *mut c_void,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "memory_free_async";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        if ptr.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { stream_from(stream) };
        // Before the buffer is taken, so that a refused call leaves it.
        object
            .context
            .check_not_capturing(OP, stream, memory::FREE_OUTSIDE)?;
        let buffer = take_back(OP, &object, ptr)?;
        // SAFETY: that work of other streams comes before is part of the function's contract.
        unsafe { buffer.free_async(stream) }.map_err(|error| error.within(OP))
    })
}

/// Returns memory that the context's pool holds and no allocation uses to the device, until the pool holds `keep` bytes. Memory that was
/// freed on a stream counts as used until the stream has come there.
///
/// # Safety
/// `ctx` was made by `unsloth_context_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_pool_trim(
    ctx: *mut unsloth_context,
    keep: usize,
) -> unsloth_status {
    const OP: &str = "memory_pool_trim";
    guard(OP, || context_from(OP, ctx)?.context.trim_memory_pool(keep))
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
            let problem = text!(
                "is {kind}, allowed: 1 (host to device), 2 (device to host), 3 (device to device)"
            );
            Error::invalid(OP, "kind", problem)
        })?;
        check_ranges(OP, dst, src, size)?;
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

/// Queues a copy of `size` bytes from memory of the device of `src_ctx` to memory of the device of `ctx`, on `stream`, which is one of
/// `ctx`. The contexts have the same backend, and may be one. The two ranges may not overlap.
///
/// Devices that can reach each other's memory are given access to it at the first copy between them (which therefore should not be
/// one that is captured into a graph); others copy by way of the host.
///
/// # Safety
/// `dst` and `src` are NULL (with `size` 0) or valid for `size` bytes on the devices of `ctx` and `src_ctx`, until the copy has run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_copy_peer(
    ctx: *mut unsloth_context,
    dst: *mut c_void,
    src_ctx: *mut unsloth_context,
    src: *const c_void,
    size: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "memory_copy_peer";
    guard(OP, || {
        let to = &context_from(OP, ctx)?.context;
        let from = &CONTEXTS.get(OP, "src_ctx", src_ctx)?.context;
        check_ranges(OP, dst, src, size)?;
        // SAFETY: the ranges are the caller's promise; that they do not overlap was checked.
        unsafe { memory::copy_peer(to, dst.cast(), from, src.cast(), size, stream_from(stream)) }
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
        out.pool_size = counted.pool_size;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, stats) };
        Ok(())
    })
}

/// Makes the peak equal to what is in use.
///
/// # Safety
/// `ctx` was made by `unsloth_context_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_peak_reset(ctx: *mut unsloth_context) -> unsloth_status {
    const OP: &str = "memory_peak_reset";
    guard(OP, || {
        context_from(OP, ctx)?.context.reset_memory_peak();
        Ok(())
    })
}

/// Changes the most bytes that may be allocated at a time; 0 for no limit. What is allocated already stays.
///
/// # Safety
/// `ctx` was made by `unsloth_context_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_memory_limit_set(
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

/// Both ranges of a copy are plausible, and do not overlap.
fn check_ranges(op: &'static str, dst: *mut c_void, src: *const c_void, size: usize) -> Result<()> {
    check_range(op, "dst", dst.cast_const(), size)?;
    check_range(op, "src", src, size)?;
    if (dst as usize).abs_diff(src as usize) >= size {
        return Ok(());
    }
    let problem = text!("overlaps src within {size} bytes");
    Err(Error::invalid(op, "dst", problem))
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
            text!("{size} overflows the address space"),
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
