//! Devices, contexts and streams.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::Mutex;

use crate::alloc::Shared;
use crate::backend::ProductShape;
use crate::context::{Backend, Context, ContextOptions};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ffi::handle::Table;
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_dtype;
use crate::ffi::{check_out, check_pointer, count, guard, stream_from, unsloth_stream};
use crate::memory::Buffer;

/// Where operations run.
pub type unsloth_backend = u32;
/// The host processor; tensors are host memory. Always there, and the default.
pub const UNSLOTH_BACKEND_CPU: unsloth_backend = 0;
/// An NVIDIA GPU; tensors are device memory.
pub const UNSLOTH_BACKEND_CUDA: unsloth_backend = 1;

/// A backend on one device. Opaque; made by `unsloth_context_create`, ended by `unsloth_context_destroy`. Several threads may use
/// one context at a time.
///
/// A child of `fork` may not use its parent's contexts and caches, whose threads and driver it does
/// not have: calls with them, destroying them included, give `UNSLOTH_STATUS_INVALID_HANDLE` there.
/// It may make its own, on the CPU; CUDA's driver refuses to work in a child of a process that used
/// it.
pub struct unsloth_context {
    _opaque: [u8; 0],
}

/// How to make a context; all zero is the CPU with every hardware thread and no memory limit.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_context_params {
    /// `sizeof(unsloth_context_params)`.
    pub struct_size: u32,
    /// Where operations run.
    pub backend: unsloth_backend,
    /// Device ordinal; 0 for the CPU.
    pub device: i32,
    /// Threads of the CPU backend; 0 means all that the process may use. Other backends ignore it.
    pub num_threads: u32,
    /// Most bytes allocated through the context at a time; 0 for no limit.
    pub memory_limit: u64,
}
params!(unsloth_context_params, []);

/// A device as its driver or operating system describes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_device_info {
    /// `sizeof(unsloth_device_info)`, set by the caller.
    pub struct_size: u32,
    /// The backend it belongs to.
    pub backend: unsloth_backend,
    /// Device ordinal.
    pub device: i32,
    /// CUDA compute capability, major part; 0 for the CPU.
    pub compute_capability_major: u32,
    /// CUDA compute capability, minor part; 0 for the CPU.
    pub compute_capability_minor: u32,
    /// Multiprocessors of a GPU, hardware threads of a CPU.
    pub num_units: u32,
    /// Memory in bytes; 0 if unknown.
    pub total_memory: u64,
    /// Memory free at the time of the call, in bytes; 0 if unknown.
    pub free_memory: u64,
    /// The vendor's name, NUL-terminated UTF-8.
    pub name: [c_char; 128],
}
params!(unsloth_device_info, []);

/// What a context handle stands for.
pub(crate) struct ContextObject {
    pub context: Context,
    /// What `unsloth_memory_alloc` gave out, by address. Dropped, and so freed, with the handle.
    pub allocations: Mutex<HashMap<usize, Buffer>>,
}

pub(crate) static CONTEXTS: Table<ContextObject> = Table::new("unsloth_context", 1);

/// The context behind a handle, which stays alive with what is returned.
pub(crate) fn context_from(
    op: &'static str,
    ctx: *const unsloth_context,
) -> Result<Shared<ContextObject>> {
    CONTEXTS.get(op, "ctx", ctx)
}

pub(crate) fn backend_from(op: &'static str, backend: unsloth_backend) -> Result<Backend> {
    Backend::from_raw(backend).ok_or_else(|| {
        Error::invalid(
            op,
            "backend",
            text!("is {backend}, allowed: 0 (cpu), 1 (cuda)"),
        )
    })
}

/// Writes the number of devices of a backend to `count`: 1 for the CPU.
///
/// `UNSLOTH_STATUS_BACKEND_UNAVAILABLE` if the backend is not in this build or has no driver.
///
/// # Safety
/// `count` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_device_count(
    backend: unsloth_backend,
    count: *mut i32,
) -> unsloth_status {
    const OP: &str = "device_count";
    guard(OP, || {
        check_out(OP, "count", count)?;
        let n = backend_from(OP, backend)?.device_count()?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { count.write(n) };
        Ok(())
    })
}

/// Describes a device in `info`, whose `struct_size` the caller has set (`UNSLOTH_DEVICE_INFO_INIT`).
///
/// # Safety
/// `info` is NULL or points to `info->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_device_info_get(
    backend: unsloth_backend,
    device: i32,
    info: *mut unsloth_device_info,
) -> unsloth_status {
    const OP: &str = "device_info";
    guard(OP, || {
        check_out(OP, "info", info)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, info.cast_const()) }?;
        let described = backend_from(OP, backend)?.device_info(device)?;
        out.backend = backend;
        out.device = device;
        (out.compute_capability_major, out.compute_capability_minor) = described.compute_capability;
        out.num_units = described.num_units;
        out.total_memory = described.total_memory;
        out.free_memory = described.free_memory;
        copy_name(&described.name, &mut out.name);
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, info) };
        Ok(())
    })
}

/// Makes a context and writes its handle to `ctx`; the caller ends it with
/// `unsloth_context_destroy`. `params` may be NULL for the defaults.
///
/// The first context on a CUDA device loads the kernels there, which takes a second or so; those
/// that are made while it lives share them and cost little. May not be called while a graph is
/// captured.
///
/// `UNSLOTH_STATUS_BACKEND_UNAVAILABLE` if the backend is not in this build or has no driver.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `ctx` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_create(
    params: *const unsloth_context_params,
    ctx: *mut *mut unsloth_context,
) -> unsloth_status {
    const OP: &str = "context_create";
    guard(OP, || {
        check_out(OP, "ctx", ctx)?;
        let options = if params.is_null() {
            ContextOptions::default()
        } else {
            // SAFETY: not NULL; the caller's promise.
            let p = unsafe { params::read(OP, params) }?;
            ContextOptions {
                backend: backend_from(OP, p.backend)?,
                device: p.device,
                num_threads: p.num_threads as usize,
                memory_limit: (p.memory_limit != 0).then_some(p.memory_limit),
            }
        };
        let object = ContextObject {
            context: Context::new(&options)?,
            allocations: Mutex::new(HashMap::new()),
        };
        let handle = CONTEXTS.insert(OP, object)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { ctx.write(handle) };
        Ok(())
    })
}

/// Ends a context: waits for everything queued on its device by this process, by others than the
/// context too (as `cudaDeviceSynchronize` does), and frees what was allocated with
/// `unsloth_memory_alloc` and not freed. NULL is fine. May not be called while a graph is captured.
///
/// KV caches and events made from the context keep what they need and may be destroyed later. So
/// does a call that another thread is inside: the context then ends with that call. Graphs that
/// captured its calls remain valid as long as the memory that they use and the kernels that they
/// launch, which all contexts of a device share: until the last context of the device, and the last
/// KV cache made from one, is destroyed.
///
/// From compute capability 9.0 and driver 12.3 on, kernels are launched with programmatic stream
/// serialization, in graphs too, whose edges between kernels are then programmatic: a kernel's blocks
/// start while the one before ends, and wait for all its writes before they touch memory.
///
/// An error of earlier asynchronous work is returned; the context has ended nevertheless.
///
/// # Safety
/// No work that is queued afterwards, graphs included, uses memory of the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_destroy(ctx: *mut unsloth_context) -> unsloth_status {
    const OP: &str = "context_destroy";
    guard(OP, || {
        if ctx.is_null() {
            return Ok(());
        }
        let object = CONTEXTS.remove(OP, "ctx", ctx)?;
        let waited = object.context.synchronize_device();
        drop(object);
        waited
    })
}

/// Sizes of a product of a linear layer, `[num_rows, in_features] x [in_features, out_features]`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_product_shape {
    /// Of input, weight and output: `UNSLOTH_DTYPE_F32`, `_F16` or `_BF16`.
    pub dtype: unsloth_dtype,
    /// Zero.
    pub reserved: u32,
    /// Rows (tokens) of input and output.
    pub num_rows: i64,
    /// Columns of the input.
    pub in_features: i64,
    /// Columns of the output.
    pub out_features: i64,
}

/// Loads ahead what linear layers of these shapes would load at their first launch on a GPU:
/// cuBLASLt, its choices of algorithms, and their kernels. Without it the first launch of a shape
/// takes milliseconds more on the host, and the first of a process hundreds: the first prompt of a
/// process ran at a third of the later ones' speed. Shapes that are near each other (numbers of
/// rows up to an eighth apart) share a choice. With `num_products` 0 (`products` may then be NULL)
/// usual shapes of each dtype are taken: that loads the library, but not every kernel.
///
/// Runs the products on a stream of its own, in device memory that it takes for the moment (the
/// greatest tensor of a product, and its workspace of at most 32 MiB, not counted in
/// `unsloth_memory_stats`), and waits for them. What cuBLASLt itself keeps stays, as it would after
/// the first launch. May not be called while a graph is captured. On the CPU, and where there is no
/// cuBLASLt, only the arguments are checked. The kernels of this library need no warming up:
/// `unsloth_context_create` loads them.
///
/// # Safety
/// `products` is NULL or points to `num_products` readable structs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_warm_up(
    ctx: *mut unsloth_context,
    products: *const unsloth_product_shape,
    num_products: usize,
) -> unsloth_status {
    const OP: &str = "context_warm_up";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        let mut shapes = Vec::new();
        if num_products > 0 {
            check_pointer(OP, "products", products)?;
            shapes.try_reserve_exact(num_products).map_err(|_| {
                let bytes = num_products.saturating_mul(size_of::<ProductShape>());
                Error::out_of_host_memory(OP, bytes)
            })?;
        }
        for i in 0..num_products {
            // SAFETY: not NULL and aligned; the caller promises so many structs.
            let product = unsafe { products.add(i).read() };
            if product.reserved != 0 {
                let problem = text!(
                    "has {:#x} in reserved, which must be zero",
                    product.reserved
                );
                return Err(Error::invalid(OP, "products", problem));
            }
            let dtype = DType::from_raw(product.dtype).ok_or_else(|| {
                Error::invalid(OP, "products", text!("has dtype {}", product.dtype))
            })?;
            shapes.push(ProductShape {
                dtype,
                num_rows: count(OP, "num_rows", product.num_rows)?,
                in_features: count(OP, "in_features", product.in_features)?,
                out_features: count(OP, "out_features", product.out_features)?,
            });
        }
        object.context.warm_up(&shapes)
    })
}

/// Makes a stream on the context's device and writes it to `stream`; the caller ends it with `unsloth_stream_destroy`. Streams from
/// anywhere else serve as well. The CPU backend has one stream, NULL, and refuses others everywhere.
///
/// # Safety
/// `stream` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_stream_create(
    ctx: *mut unsloth_context,
    stream: *mut unsloth_stream,
) -> unsloth_status {
    const OP: &str = "stream_create";
    guard(OP, || {
        check_out(OP, "stream", stream)?;
        let created: *mut c_void = context_from(OP, ctx)?.context.create_stream()?.as_raw();
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { stream.write(created) };
        Ok(())
    })
}

/// Ends a stream made by `unsloth_stream_create`, after the work queued on it. NULL is fine.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_stream_destroy(
    ctx: *mut unsloth_context,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "stream_destroy";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise.
        unsafe { object.context.destroy_stream(stream_from(stream)) }
    })
}

/// Waits until everything queued on `stream` has finished. The CPU backend runs each call to its end, so it returns at once.
///
/// # Safety
/// `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_stream_synchronize(
    ctx: *mut unsloth_context,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "stream_synchronize";
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise.
        object.context.synchronize(unsafe { stream_from(stream) })
    })
}

/// Copies a name into a fixed field, cut at a character boundary, NUL-terminated.
fn copy_name(name: &str, field: &mut [c_char]) {
    let mut len = name.len().min(field.len() - 1);
    while !name.is_char_boundary(len) {
        len -= 1;
    }
    field.fill(0);
    for (to, from) in field.iter_mut().zip(&name.as_bytes()[..len]) {
        *to = *from as c_char;
    }
}
