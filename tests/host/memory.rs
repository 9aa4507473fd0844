//! Memory in the order of streams, between contexts, and at its limits.

use std::ptr;

use crate::common::abi::{Handle, assert_fails};
use crate::common::contexts;
use unsloth::ffi::memory::*;
use unsloth::ffi::status::*;
use unsloth::memory::{self, CopyKind};
use unsloth::{Backend, Buffer, Context, ContextOptions, Error, Stream};

const MIB: usize = 1 << 20;

/// A word of four bytes of this value.
fn bytes_of(value: u8) -> i32 {
    i32::from_ne_bytes([value; 4])
}

/// Runs with a stream of the context's own.
fn with_stream(ctx: &Context, run: impl FnOnce(Stream)) {
    let stream = ctx.create_stream().unwrap();
    run(stream);
    ctx.synchronize(stream).unwrap();
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}

/// A buffer that is made and freed for every step gives each step what it wrote, though all of them
/// may be the same memory.
#[test]
fn steps_take_turns_with_the_same_memory() {
    const STEPS: usize = 40;
    for ctx in contexts() {
        let results = Buffer::new(&ctx, STEPS * MIB).unwrap();
        let before = ctx.memory_stats();
        with_stream(&ctx, |stream| {
            for step in 0..STEPS {
                // SAFETY: this stream alone uses the buffer; the results have room for a step of
                // each number.
                unsafe {
                    let scratch = Buffer::new_async(&ctx, 8 * MIB, stream).unwrap();
                    assert!(scratch.as_ptr().addr().is_multiple_of(256));
                    let value = step as u8 + 1;
                    memory::set(&ctx, scratch.as_ptr(), value, scratch.size(), stream).unwrap();
                    let to = results.as_ptr().wrapping_add(step * MIB);
                    let from = scratch.as_ptr().wrapping_add(7 * MIB);
                    let kind = CopyKind::DeviceToDevice;
                    memory::copy(&ctx, to, from, MIB, kind, stream).unwrap();
                    scratch.free_async(stream).unwrap();
                }
            }
            let stats = ctx.memory_stats();
            assert_eq!(stats.in_use, before.in_use);
            assert_eq!(stats.num_allocations, before.num_allocations);
            assert_eq!(stats.peak, (STEPS + 8) as u64 * MIB as u64);
            // Memory of the steps before is used again, not added to.
            assert!(stats.pool_size < 64 * MIB as u64, "{stats:?}");
            for step in 0..STEPS {
                let read = results.to_vec::<i32>(step * MIB, MIB / 4, stream).unwrap();
                assert!(
                    read.iter().all(|&x| x == bytes_of(step as u8 + 1)),
                    "step {step}"
                );
            }
        });
        ctx.trim_memory_pool(0).unwrap();
        assert_eq!(ctx.memory_stats().pool_size, 0);
    }
}

/// Buffers of either kind may end in either way.
#[test]
fn every_way_to_end_a_buffer() {
    for ctx in contexts() {
        with_stream(&ctx, |stream| {
            for pooled in [false, true] {
                for in_order in [false, true] {
                    // SAFETY: used on no other stream.
                    unsafe {
                        let buffer = match pooled {
                            false => Buffer::new(&ctx, 3 * MIB),
                            true => Buffer::new_async(&ctx, 3 * MIB, stream),
                        };
                        let buffer = buffer.unwrap();
                        memory::set(&ctx, buffer.as_ptr(), 1, buffer.size(), stream).unwrap();
                        match in_order {
                            false => drop(buffer),
                            true => buffer.free_async(stream).unwrap(),
                        }
                    }
                    assert_eq!(ctx.memory_stats().in_use, 0);
                    assert_eq!(ctx.memory_stats().num_allocations, 0);
                }
            }
        });
    }
}

#[test]
fn what_is_not_there_is_not_counted() {
    for ctx in contexts() {
        let size = 1usize << 60;
        // SAFETY: nothing is allocated.
        let errors = unsafe {
            [
                Buffer::new(&ctx, size).unwrap_err(),
                Buffer::new_async(&ctx, size, Stream::DEFAULT).unwrap_err(),
            ]
        };
        for error in errors {
            let text = error.to_string();
            let Error::OutOfMemory {
                requested, reason, ..
            } = error
            else {
                panic!("{text}");
            };
            assert_eq!(requested, size as u64);
            match ctx.backend() {
                Backend::Cpu => assert_eq!(reason, "the host has too little free memory"),
                _ => assert!(reason.contains(" bytes are free"), "{reason}"),
            }
        }
        assert_eq!(ctx.memory_stats().in_use, 0);
        assert!(
            Buffer::new(&ctx, 100).is_ok(),
            "the context is as good as before"
        );
    }
}

#[test]
fn the_limit_counts_both_kinds() {
    for ctx in contexts() {
        ctx.set_memory_limit(Some(1000));
        let first = Buffer::new(&ctx, 600).unwrap();
        // SAFETY: used nowhere.
        let error = unsafe { Buffer::new_async(&ctx, 401, Stream::DEFAULT) }.unwrap_err();
        assert_eq!(
            error.to_string(),
            "memory: 401 bytes could not be allocated: 600 of the limit of 1000 bytes are in use"
        );
        // SAFETY: used nowhere.
        let second = unsafe { Buffer::new_async(&ctx, 400, Stream::DEFAULT) }.unwrap();
        assert_eq!(ctx.memory_stats().in_use, 1000);
        drop((first, second));
        assert_eq!(ctx.memory_stats().peak, 1000);
    }
}

/// Two contexts of every backend; on different devices where there are several.
fn pairs() -> Vec<(Context, Context)> {
    let make = |backend, device| {
        Context::new(&ContextOptions {
            backend,
            device,
            ..ContextOptions::default()
        })
        .unwrap()
    };
    let mut pairs = Vec::new();
    for backend in Backend::ALL {
        let count = backend.device_count().unwrap_or(0);
        if count > 0 {
            pairs.push((make(backend, 0), make(backend, 0)));
        }
        if count > 1 {
            pairs.push((make(backend, 0), make(backend, 1)));
            pairs.push((make(backend, 1), make(backend, 0)));
        }
    }
    pairs
}

#[test]
fn contexts_copy_to_each_other() {
    let data: Vec<i32> = (0..300_000).collect();
    for (here, there) in pairs() {
        for pooled in [false, true] {
            let mut from = Buffer::new(&there, data.len() * 4).unwrap();
            from.copy_from_slice(0, &data, Stream::DEFAULT).unwrap();
            there.synchronize(Stream::DEFAULT).unwrap();
            with_stream(&here, |stream| {
                // SAFETY: the buffer is used on this stream; the ranges lie in the buffers.
                unsafe {
                    let to = match pooled {
                        false => Buffer::new(&here, from.size()),
                        true => Buffer::new_async(&here, from.size(), stream),
                    };
                    let to = to.unwrap();
                    memory::set(&here, to.as_ptr(), 0xff, to.size(), stream).unwrap();
                    let (dst, src) = (to.as_ptr(), from.as_ptr().wrapping_add(400));
                    memory::copy_peer(&here, dst, &there, src, 1_000_004, stream).unwrap();
                    memory::copy_peer(&here, dst, &there, src, 0, stream).unwrap();
                    let read = to.to_vec::<i32>(0, data.len(), stream).unwrap();
                    assert_eq!(read[..250_001], data[100..250_101]);
                    assert!(read[250_001..].iter().all(|&x| x == -1));
                }
            });
        }
    }
}

#[test]
fn backends_do_not_copy_to_each_other() {
    let contexts = contexts();
    let [cpu, cuda] = &contexts[..] else { return };
    let mut data = [0u8; 4];
    // SAFETY: refused before anything is touched.
    let error = unsafe {
        memory::copy_peer(
            cpu,
            data.as_mut_ptr(),
            cuda,
            8 as *const u8,
            4,
            Stream::DEFAULT,
        )
    };
    assert_eq!(
        error.unwrap_err().to_string(),
        "memory_copy_peer: src_ctx is on the cuda backend, ctx on the cpu backend: copies between host and device have a kind"
    );
}

/// What runs at once is refused while a stream is captured, and leaves the capture as it was.
#[cfg(feature = "cuda")]
#[test]
fn captures_are_refused() {
    use crate::common::graph::Graph;
    for ctx in contexts() {
        if ctx.backend() != Backend::Cuda {
            continue;
        }
        with_stream(&ctx, |stream| {
            // SAFETY: used on this stream alone.
            let buffer = unsafe { Buffer::new_async(&ctx, MIB, stream) }.unwrap();
            // SAFETY: as above.
            let doomed = unsafe { Buffer::new_async(&ctx, MIB, stream) }.unwrap();
            let graph = Graph::capture(&ctx, stream, || {
                // SAFETY: as above.
                unsafe {
                    let error = Buffer::new_async(&ctx, MIB, stream).unwrap_err();
                    assert_eq!(
                        error.to_string(),
                        "memory: stream is being captured into a graph: allocate before the capture"
                    );
                    memory::set(&ctx, buffer.as_ptr(), 5, MIB, stream).unwrap();
                }
            });
            // SAFETY: as above.
            unsafe { doomed.free_async(stream) }.unwrap();
            assert_eq!(ctx.memory_stats().in_use, MIB as u64);
            graph.launch(stream);
            let read = buffer.to_vec::<i32>(0, MIB / 4, stream).unwrap();
            assert!(read.iter().all(|&x| x == bytes_of(5)));
        });
    }
}

#[test]
fn through_the_c_abi() {
    let (ctx, other) = (Handle::cpu(), Handle::cpu());
    let none = ptr::null_mut();
    let (mut a, mut b, mut c) = (none, none, none);
    let mut back = [0u8; 64];
    // SAFETY: every range lies in memory allocated here, with the sizes stated, or the call is
    // refused.
    unsafe {
        assert_eq!(unsloth_memory_alloc_async(ctx.0, 64, &mut a, none), 0);
        assert_eq!(unsloth_memory_alloc_async(other.0, 64, &mut b, none), 0);
        assert!((a as usize).is_multiple_of(256));
        assert_eq!(unsloth_memory_set(other.0, b, 3, 64, none), 0);
        assert_eq!(unsloth_memory_copy_peer(ctx.0, a, other.0, b, 64, none), 0);
        let kind = UNSLOTH_COPY_KIND_DEVICE_TO_HOST;
        let to = back.as_mut_ptr().cast();
        assert_eq!(unsloth_memory_copy(ctx.0, to, a, 64, kind, none), 0);
        assert_eq!(back, [3; 64]);

        assert_fails(
            unsloth_memory_alloc_async(ctx.0, 64, ptr::null_mut(), none),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_alloc_async: ptr is NULL",
        );
        assert_eq!(unsloth_memory_limit_set(ctx.0, 100), 0);
        assert_fails(
            unsloth_memory_alloc_async(ctx.0, 40, &mut c, none),
            UNSLOTH_STATUS_OUT_OF_MEMORY,
            "memory_alloc_async: 40 bytes could not be allocated: 64 of the limit of 100 bytes are in use",
        );
        assert!(c.is_null());
        assert_eq!(
            unsloth_memory_free_async(ctx.0, b, none),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "of another context"
        );
        assert_eq!(unsloth_memory_free_async(ctx.0, none, none), 0);
        assert_eq!(unsloth_memory_free_async(other.0, b, none), 0);
        assert_eq!(
            unsloth_memory_free_async(other.0, b, none),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "freed twice"
        );
        assert_eq!(unsloth_memory_free(ctx.0, a), 0, "freed in the other way");
        assert_eq!(unsloth_memory_pool_trim(ctx.0, 0), 0);

        let p = back.as_mut_ptr().cast();
        assert_fails(
            unsloth_memory_copy_peer(ctx.0, p, ptr::null_mut(), p, 1, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_copy_peer: src_ctx is NULL",
        );
        assert_fails(
            unsloth_memory_copy_peer(ctx.0, none, other.0, p, 1, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_copy_peer: dst is NULL",
        );
        assert_fails(
            unsloth_memory_copy_peer(ctx.0, p, other.0, none, 1, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "memory_copy_peer: src is NULL",
        );
        assert_fails(
            unsloth_memory_copy_peer(ctx.0, p, other.0, p.wrapping_byte_add(8), 16, none),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "memory_copy_peer: dst overlaps src within 16 bytes",
        );
        assert_fails(
            unsloth_memory_copy_peer(ctx.0, p, other.0, p, usize::MAX, none),
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "memory_copy_peer: size 18446744073709551615 overflows the address space",
        );
    }
}
