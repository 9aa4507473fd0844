//! Contexts, devices, streams and memory through the C ABI, used well and misused.

mod common;

use std::ffi::CStr;
use std::ptr;

use common::abi::{Handle, assert_fails, last_message};
use unsloth::ffi::context::*;
use unsloth::ffi::memory::*;
use unsloth::ffi::status::*;

fn context_params() -> unsloth_context_params {
    unsloth_context_params {
        struct_size: size_of::<unsloth_context_params>() as u32,
        backend: UNSLOTH_BACKEND_CPU,
        device: 0,
        num_threads: 0,
        memory_limit: 0,
    }
}

fn stats(ctx: &Handle) -> unsloth_memory_stats {
    let mut stats = unsloth_memory_stats {
        struct_size: size_of::<unsloth_memory_stats>() as u32,
        reserved: 0,
        in_use: 0,
        peak: 0,
        limit: 0,
        num_allocations: 0,
        pool_size: 0,
    };
    // SAFETY: `stats` is a live local of the stated size.
    let status = unsafe { unsloth_memory_stats_get(ctx.0, &mut stats) };
    assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
    stats
}

fn device_info() -> unsloth_device_info {
    unsloth_device_info {
        struct_size: size_of::<unsloth_device_info>() as u32,
        backend: 99,
        device: 99,
        compute_capability_major: 99,
        compute_capability_minor: 99,
        num_units: 0,
        total_memory: 0,
        free_memory: 0,
        name: [0; 128],
    }
}

#[test]
fn the_cpu_is_described() {
    let mut count = 0;
    let mut info = device_info();
    // SAFETY: pointers to live locals.
    unsafe {
        assert_eq!(
            unsloth_device_count(UNSLOTH_BACKEND_CPU, &mut count),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_eq!(
            unsloth_device_info_get(UNSLOTH_BACKEND_CPU, 0, &mut info),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_eq!(
            (count, info.backend, info.device),
            (1, UNSLOTH_BACKEND_CPU, 0)
        );
        assert_eq!(
            (info.compute_capability_major, info.compute_capability_minor),
            (0, 0)
        );
        assert!(info.num_units >= 1);
        assert!(
            !CStr::from_ptr(info.name.as_ptr())
                .to_str()
                .unwrap()
                .is_empty()
        );
    }
}

#[test]
fn misused_device_queries() {
    let mut count = -5;
    let mut info = device_info();
    // SAFETY: pointers to live locals, or NULL, which is refused.
    unsafe {
        assert_fails(
            unsloth_device_count(9, &mut count),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "device_count: backend is 9, allowed: 0 (cpu), 1 (cuda)",
        );
        assert_eq!(count, -5);
        assert_fails(
            unsloth_device_count(UNSLOTH_BACKEND_CPU, ptr::null_mut()),
            UNSLOTH_STATUS_NULL_POINTER,
            "device_count: count is NULL",
        );
        assert_fails(
            unsloth_device_info_get(UNSLOTH_BACKEND_CPU, 1, &mut info),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "device_info: device 1 is outside 0 to 0",
        );
        info.struct_size = 3;
        assert_fails(
            unsloth_device_info_get(UNSLOTH_BACKEND_CPU, 0, &mut info),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "device_info: struct_size is 3, at least 168 is needed",
        );
        assert_eq!(info.device, 99, "a failed call writes nothing");
    }
}

#[test]
fn misused_context_creation() {
    type Spoil = fn(&mut unsloth_context_params);
    let misuse: &[(Spoil, unsloth_status, &str)] = &[
        (
            |p| p.backend = 7,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "context_create: backend is 7, allowed: 0 (cpu), 1 (cuda)",
        ),
        (
            |p| p.device = 1,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "context: device 1 is outside 0 to 0",
        ),
        (
            |p| p.device = -1,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "context: device -1 is outside 0 to 0",
        ),
        (
            |p| p.num_threads = u32::MAX,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "context: num_threads 4294967295 is above the maximum 4096",
        ),
        (
            |p| p.struct_size = 0,
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "context_create: struct_size is 0, at least 24 is needed",
        ),
    ];
    for (spoil, status, message) in misuse {
        let mut params = context_params();
        spoil(&mut params);
        let mut ctx = ptr::null_mut();
        // SAFETY: pointers to live locals.
        assert_fails(
            unsafe { unsloth_context_create(&params, &mut ctx) },
            *status,
            message,
        );
        assert!(ctx.is_null());
    }
    // SAFETY: NULL is refused.
    let status = unsafe { unsloth_context_create(&context_params(), ptr::null_mut()) };
    assert_fails(
        status,
        UNSLOTH_STATUS_NULL_POINTER,
        "context_create: ctx is NULL",
    );
}

#[test]
fn a_missing_backend_says_so() {
    let mut params = context_params();
    params.backend = UNSLOTH_BACKEND_CUDA;
    let mut ctx = ptr::null_mut();
    // SAFETY: pointers to live locals.
    let status = unsafe { unsloth_context_create(&params, &mut ctx) };
    if status == UNSLOTH_STATUS_SUCCESS {
        // A build with CUDA on a machine with a GPU.
        // SAFETY: nothing uses what goes with it.
        assert_eq!(
            unsafe { unsloth_context_destroy(ctx) },
            UNSLOTH_STATUS_SUCCESS
        );
        return;
    }
    assert_eq!(status, UNSLOTH_STATUS_BACKEND_UNAVAILABLE);
    assert!(
        last_message().contains("the cuda backend is unavailable: "),
        "{}",
        last_message()
    );
    assert!(ctx.is_null());
}

#[test]
fn params_of_other_sizes() {
    #[repr(C)]
    struct Newer {
        params: unsloth_context_params,
        addition: u64,
    }
    let mut newer = Newer {
        params: context_params(),
        addition: 0,
    };
    newer.params.struct_size = size_of::<Newer>() as u32;
    let mut ctx = ptr::null_mut();
    // SAFETY: `newer` is a live local of the stated size.
    unsafe {
        assert_eq!(
            unsloth_context_create(&raw const newer.params, &mut ctx),
            UNSLOTH_STATUS_SUCCESS,
            "a newer struct that asks for nothing new is served"
        );
        assert_eq!(unsloth_context_destroy(ctx), UNSLOTH_STATUS_SUCCESS);
        newer.addition = 1;
        assert_fails(
            unsloth_context_create(&raw const newer.params, &mut ctx),
            UNSLOTH_STATUS_UNSUPPORTED,
            "context_create: struct_size is 32: fields past byte 24 are set, which this version does not know",
        );
    }
}

#[test]
fn memory_is_copied_set_and_counted() {
    let ctx = Handle::cpu();
    let host: Vec<u8> = (0..100).collect();
    let mut back = vec![0u8; 100];
    let (mut a, mut b) = (ptr::null_mut(), ptr::null_mut());
    let none = ptr::null_mut();
    // SAFETY: every range lies in memory allocated here, with the sizes stated.
    unsafe {
        assert_eq!(
            unsloth_memory_alloc(ctx.0, 100, &mut a),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_eq!(
            unsloth_memory_alloc(ctx.0, 300, &mut b),
            UNSLOTH_STATUS_SUCCESS
        );
        assert!((a as usize).is_multiple_of(256) && (b as usize).is_multiple_of(256));
        let s = stats(&ctx);
        assert_eq!(
            (s.in_use, s.peak, s.limit, s.num_allocations),
            (400, 400, 0, 2)
        );
        let copy = |dst, src, kind| unsloth_memory_copy(ctx.0, dst, src, 100, kind, none);
        assert_eq!(
            copy(a, host.as_ptr().cast(), UNSLOTH_COPY_KIND_HOST_TO_DEVICE),
            0
        );
        assert_eq!(copy(b, a, UNSLOTH_COPY_KIND_DEVICE_TO_DEVICE), 0);
        assert_eq!(
            copy(
                back.as_mut_ptr().cast(),
                b,
                UNSLOTH_COPY_KIND_DEVICE_TO_HOST
            ),
            0
        );
        assert_eq!(unsloth_stream_synchronize(ctx.0, none), 0);
        assert_eq!(back, host);
        assert_eq!(unsloth_memory_set(ctx.0, b, 7, 50, none), 0);
        assert_eq!(
            copy(
                back.as_mut_ptr().cast(),
                b,
                UNSLOTH_COPY_KIND_DEVICE_TO_HOST
            ),
            0
        );
        assert!(back[..50].iter().all(|&x| x == 7) && back[50..] == host[50..]);
    }
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_memory_free(ctx.0, b) },
        UNSLOTH_STATUS_SUCCESS
    );
    let s = stats(&ctx);
    assert_eq!((s.in_use, s.peak, s.num_allocations), (100, 400, 1));
    // SAFETY: the context is live.
    assert_eq!(
        unsafe { unsloth_memory_peak_reset(ctx.0) },
        UNSLOTH_STATUS_SUCCESS
    );
    assert_eq!(stats(&ctx).peak, 100);
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_memory_free(ctx.0, b) },
        UNSLOTH_STATUS_INVALID_ARGUMENT,
        "freed twice"
    );
    assert!(last_message().contains("is not a live allocation of this context"));
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_memory_free(ctx.0, ptr::null_mut()) },
        UNSLOTH_STATUS_SUCCESS
    );
    // `a` is left for the context to free.
}

#[test]
fn memory_limits_and_impossible_sizes() {
    let ctx = Handle::cpu();
    let mut p = ptr::null_mut();
    // SAFETY: the context is live, and `p` a live local.
    unsafe {
        assert_eq!(
            unsloth_memory_limit_set(ctx.0, 1000),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_fails(
            unsloth_memory_alloc(ctx.0, 1001, &mut p),
            UNSLOTH_STATUS_OUT_OF_MEMORY,
            "memory: 1001 bytes could not be allocated: 0 of the limit of 1000 bytes are in use",
        );
        assert!(p.is_null());
        assert_eq!(unsloth_memory_limit_set(ctx.0, 0), UNSLOTH_STATUS_SUCCESS);
        for size in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert_eq!(
                unsloth_memory_alloc(ctx.0, size, &mut p),
                UNSLOTH_STATUS_OUT_OF_MEMORY
            );
        }
        assert_eq!(stats(&ctx).in_use, 0, "failed allocations are not counted");
        assert_eq!(
            unsloth_memory_alloc(ctx.0, 0, &mut p),
            UNSLOTH_STATUS_SUCCESS
        );
        assert!(!p.is_null());
        assert_eq!(unsloth_memory_free(ctx.0, p), UNSLOTH_STATUS_SUCCESS);
    }
}

#[test]
fn misused_copies() {
    let ctx = Handle::cpu();
    let mut data = [0u8; 64];
    let p: *mut std::ffi::c_void = data.as_mut_ptr().cast();
    let none = ptr::null_mut();
    // SAFETY: the ranges are inside `data`, or the call is refused before it touches them.
    unsafe {
        let copy = |dst, src, size, kind| unsloth_memory_copy(ctx.0, dst, src, size, kind, none);
        assert_fails(
            copy(p, p.wrapping_byte_add(32), 16, 0),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "memory_copy: kind is 0, allowed: 1 (host to device), 2 (device to host), 3 (device to device)",
        );
        assert_fails(
            copy(p, p.wrapping_byte_add(8), 16, 3),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "memory_copy: dst overlaps src within 16 bytes",
        );
        assert_fails(
            copy(ptr::null_mut(), p, 16, 3),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_copy: dst is NULL",
        );
        assert_fails(
            copy(p, ptr::null_mut(), 16, 3),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_copy: src is NULL",
        );
        assert_eq!(copy(p, p, usize::MAX, 3), UNSLOTH_STATUS_INVALID_ARGUMENT);
        assert_eq!(
            copy(ptr::null_mut(), ptr::null_mut(), 0, 3),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_fails(
            unsloth_memory_set(ctx.0, ptr::null_mut(), 0, 1, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_set: dst is NULL",
        );
    }
}

#[test]
fn statuses_and_versions_have_names() {
    let text = |p| {
        // SAFETY: the functions return static strings.
        unsafe { CStr::from_ptr(p) }.to_str().unwrap().to_string()
    };
    for status in 0..=11 {
        assert!(text(unsloth_status_name(status)).starts_with("UNSLOTH_STATUS_"));
        assert_ne!(
            text(unsloth_status_name(status)),
            "UNSLOTH_STATUS_UNKNOWN",
            "{status}"
        );
    }
    assert_eq!(text(unsloth_status_name(-1)), "UNSLOTH_STATUS_UNKNOWN");
    assert_eq!(text(unsloth_version()), env!("CARGO_PKG_VERSION"));
    assert!(text(unsloth_build_info()).contains("backends: cpu"));
}

#[test]
fn messages_are_cut_to_the_buffer_and_kept_per_thread() {
    // SAFETY: NULL is refused; buffers have the capacities stated.
    unsafe {
        unsloth_device_count(0, ptr::null_mut());
        let whole = "device_count: count is NULL";
        assert_eq!(unsloth_last_error_message(ptr::null_mut(), 0), whole.len());
        let mut buffer = [0xffu8; 8];
        assert_eq!(
            unsloth_last_error_message(buffer.as_mut_ptr().cast(), 7),
            whole.len()
        );
        assert_eq!(&buffer, b"device\0\xff");
        let other = std::thread::spawn(|| unsloth_last_error_message(ptr::null_mut(), 0));
        assert_eq!(other.join().unwrap(), 0, "another thread has no message");
    }
}

#[test]
fn streams_of_the_cpu() {
    let ctx = Handle::cpu();
    let mut stream = ptr::without_provenance_mut(1);
    // SAFETY: `stream` is a live local.
    unsafe {
        assert_eq!(
            unsloth_stream_create(ctx.0, &mut stream),
            UNSLOTH_STATUS_SUCCESS
        );
        assert!(stream.is_null());
        assert_eq!(
            unsloth_stream_destroy(ctx.0, stream),
            UNSLOTH_STATUS_SUCCESS
        );
        assert_fails(
            unsloth_stream_create(ctx.0, ptr::null_mut()),
            UNSLOTH_STATUS_NULL_POINTER,
            "stream_create: stream is NULL",
        );
    }
}
