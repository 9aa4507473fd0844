//! The KV cache through the C ABI: arguments that must be refused, handles of every kind of wrong,
//! threads.

use crate::common::TestTensor;
use crate::common::abi::{Handle, absent, assert_fails, c_tensor, last_message, zeroed_params};
use unsloth::ffi::attention::unsloth_attention_params;
use unsloth::ffi::context::{unsloth_context_create, unsloth_context_destroy};
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::kv_cache_sequence::*;
use unsloth::ffi::status::*;
use unsloth::{Context, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const NULL: unsloth_status = UNSLOTH_STATUS_NULL_POINTER;
const OK: unsloth_status = UNSLOTH_STATUS_SUCCESS;

fn good() -> unsloth_kv_cache_params {
    // SAFETY: a struct of integers.
    let mut p: unsloth_kv_cache_params = unsafe { zeroed_params() };
    (p.dtype, p.num_layers, p.num_kv_heads, p.head_dim) = (DType::F32 as u32, 2, 1, 4);
    (p.page_size, p.num_pages, p.max_batch_size) = (4, 6, 3);
    p
}

/// A cache that is destroyed with its owner.
struct Cache(*mut unsloth_kv_cache);

// SAFETY: a handle is a number.
unsafe impl Sync for Cache {}

impl Cache {
    fn new(ctx: &Handle) -> Cache {
        let mut cache = std::ptr::null_mut();
        // SAFETY: good parameters, and a pointer to a live local.
        let got = unsafe { unsloth_kv_cache_create(ctx.0, &good(), &mut cache) };
        assert_eq!(got, OK, "{}", last_message());
        Cache(cache)
    }

    fn sequence(&self) -> i64 {
        let mut id = 0;
        // SAFETY: a pointer to a live local.
        let got = unsafe { unsloth_kv_cache_sequence_create(self.0, &mut id) };
        assert_eq!(got, OK, "{}", last_message());
        id
    }

    fn free(&self, id: i64) -> unsloth_status {
        // SAFETY: the cache is live.
        unsafe { unsloth_kv_cache_sequence_free(self.0, id) }
    }

    fn extend(&self, ids: &[i64], counts: &[i64]) -> unsloth_status {
        assert_eq!(ids.len(), counts.len());
        let (ids_ptr, counts_ptr) = (ids.as_ptr(), counts.as_ptr());
        // SAFETY: both have this many entries.
        unsafe {
            unsloth_kv_cache_extend(self.0, ids_ptr, counts_ptr, ids.len(), std::ptr::null_mut())
        }
    }

    fn info(&self, id: i64) -> unsloth_kv_cache_sequence_info {
        // SAFETY: a struct of integers.
        unsafe {
            let mut info = zeroed_params();
            let got = unsloth_kv_cache_sequence_info_get(self.0, id, &mut info);
            assert_eq!(got, OK, "{}", last_message());
            info
        }
    }

    fn stats(&self) -> unsloth_kv_cache_stats {
        // SAFETY: a struct of numbers.
        unsafe {
            let mut stats = zeroed_params();
            assert_eq!(unsloth_kv_cache_stats_get(self.0, &mut stats), OK);
            stats
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: nothing uses what goes with it.
        assert_eq!(unsafe { unsloth_kv_cache_destroy(self.0) }, OK);
    }
}

#[test]
fn shapes() {
    let ctx = Handle::cpu();
    type Spoil = fn(&mut unsloth_kv_cache_params);
    let cases: [(Spoil, &str); 12] = [
        (
            |p| p.struct_size = 80,
            "kv_cache_create: struct_size is 80, at least 88 is needed",
        ),
        (
            |p| p.dtype = 0,
            "kv_cache_create: dtype is 0, allowed: 1 (f32), 2 (f16), 3 (bf16), 7 (f8e4m3)",
        ),
        (
            |p| p.dtype = DType::I32 as u32,
            "kv_cache: dtype is i32, allowed: f32, f16, bf16, f8e4m3",
        ),
        (
            |p| p.page_layout = 2,
            "kv_cache_create: page_layout is 2, allowed: 0 (token-major), 1 (head-major)",
        ),
        (
            |p| p.num_layers = 0,
            "kv_cache: num_layers is 0, allowed: 1 to 2147483647",
        ),
        (
            |p| p.num_kv_heads = -1,
            "kv_cache_create: num_kv_heads is -1, at least 0 is needed",
        ),
        (
            |p| p.head_dim = 0,
            "kv_cache: head_dim is 0, allowed: 1 to 2147483647",
        ),
        (
            |p| p.page_size = 12,
            "kv_cache: page_size is 12, a power of two is needed",
        ),
        (
            |p| p.num_pages = 1 << 31,
            "kv_cache: num_pages is 2147483648, allowed: 1 to 2147483647",
        ),
        (
            |p| p.max_batch_tokens = i64::MIN,
            "kv_cache_create: max_batch_tokens is -9223372036854775808, at least 0 is needed",
        ),
        (
            |p| (p.num_pages, p.head_dim, p.num_layers) = (1 << 30, 1 << 30, 1 << 30),
            "kv_cache: num_pages is 1073741824: the cache would not fit the address space",
        ),
        (
            |p| (p.max_batch_size, p.max_sequence_length) = (i64::from(i32::MAX), 1 << 30),
            "kv_cache: 2305843002065354752 bytes could not be allocated: ",
        ),
    ];
    for (spoil, message) in cases {
        let mut p = good();
        spoil(&mut p);
        let mut cache = std::ptr::null_mut();
        // SAFETY: pointers to live locals.
        let got = unsafe { unsloth_kv_cache_create(ctx.0, &p, &mut cache) };
        if message.ends_with(": ") {
            assert_eq!(got, UNSLOTH_STATUS_OUT_OF_MEMORY, "{}", last_message());
        } else {
            assert_fails(got, INVALID, message);
        }
        assert!(cache.is_null(), "nothing is written");
    }
    // SAFETY: NULL where it is tested, pointers to live locals otherwise.
    unsafe {
        let mut cache = std::ptr::null_mut();
        let null = std::ptr::null_mut();
        let got = unsloth_kv_cache_create(null, &good(), &mut cache);
        assert_fails(got, NULL, "kv_cache_create: ctx is NULL");
        let got = unsloth_kv_cache_create(ctx.0, std::ptr::null(), &mut cache);
        assert_fails(got, NULL, "kv_cache_create: params is NULL");
        let got = unsloth_kv_cache_create(ctx.0, &good(), std::ptr::null_mut());
        assert_fails(got, NULL, "kv_cache_create: cache is NULL");
    }
}

/// Every function refuses NULL, destroyed and foreign handles, and freed sequences.
#[test]
fn handles() {
    let ctx = Handle::cpu();
    let dead = Cache::new(&ctx).0;
    let foreign: *mut unsloth_kv_cache = ctx.0.cast();
    let live = Cache::new(&ctx);
    let stale = live.sequence();
    let stream = std::ptr::null_mut();
    // SAFETY: structs of numbers and tensors, every pointer is to a live local; every handle is checked.
    unsafe {
        assert_eq!(unsloth_kv_cache_sequence_free(live.0, stale), OK);
        let (mut id, mut evicted, mut count, mut page) = (0i64, 0i64, 0usize, 0i32);
        let mut info = zeroed_params();
        let mut stats = zeroed_params();
        let mut batch = zeroed_params();
        let append = zeroed_params();
        let mut attention: unsloth_attention_params = zeroed_params();
        let (mut k, mut v) = (absent(), absent());
        type Call<'a> = Box<dyn FnMut(*mut unsloth_kv_cache, i64) -> unsloth_status + 'a>;
        let calls: Vec<(&str, bool, Call<'_>)> = vec![
            ("sequence_create", false, {
                Box::new(|c, _| unsloth_kv_cache_sequence_create(c, &mut id))
            }),
            (
                "sequence_free",
                true,
                Box::new(|c, s| unsloth_kv_cache_sequence_free(c, s)),
            ),
            ("sequence_fork", true, {
                let mut fork = 0;
                Box::new(move |c, s| unsloth_kv_cache_sequence_fork(c, s, &mut fork))
            }),
            ("sequence_truncate", true, {
                Box::new(|c, s| unsloth_kv_cache_sequence_truncate(c, s, 0))
            }),
            ("sequence_evict", true, {
                Box::new(|c, s| unsloth_kv_cache_sequence_evict(c, s, 0, 0, &mut evicted))
            }),
            ("sequence_reserve", true, {
                Box::new(|c, s| unsloth_kv_cache_sequence_reserve(c, s, 1, stream))
            }),
            ("sequence_info", true, {
                Box::new(|c, s| unsloth_kv_cache_sequence_info_get(c, s, &mut info))
            }),
            ("sequence_pages", true, {
                Box::new(|c, s| unsloth_kv_cache_sequence_pages_get(c, s, &mut page, 1, &mut count))
            }),
            ("extend", true, {
                Box::new(move |c, s| unsloth_kv_cache_extend(c, &s, &1, 1, stream))
            }),
            (
                "batch",
                false,
                Box::new(|c, _| unsloth_kv_cache_batch_get(c, &mut batch)),
            ),
            (
                "append",
                false,
                Box::new(|c, _| unsloth_kv_cache_append(c, &append, stream)),
            ),
            ("layer", false, {
                Box::new(|c, _| unsloth_kv_cache_layer_get(c, 0, &mut k, &mut v))
            }),
            ("attention_prepare", false, {
                Box::new(|c, _| unsloth_kv_cache_attention_prepare(c, 0, &mut attention))
            }),
            (
                "stats",
                false,
                Box::new(|c, _| unsloth_kv_cache_stats_get(c, &mut stats)),
            ),
        ];
        for (name, takes_sequence, mut call) in calls {
            let null = call(std::ptr::null_mut(), stale);
            assert_fails(null, NULL, &format!("kv_cache_{name}: cache is NULL"));
            for handle in [dead, foreign] {
                assert_fails(
                    call(handle, stale),
                    UNSLOTH_STATUS_INVALID_HANDLE,
                    &format!(
                        "kv_cache_{name}: cache is not a live unsloth_kv_cache handle ({:#x})",
                        handle.addr()
                    ),
                );
            }
            if takes_sequence {
                for sequence in [stale, 0, -1, i64::MAX, i64::MIN] {
                    assert_fails(
                        call(live.0, sequence),
                        UNSLOTH_STATUS_INVALID_HANDLE,
                        &format!(
                            "kv_cache_{name}: sequence is not a live sequence handle ({sequence:#x})"
                        ),
                    );
                }
            }
        }
    }
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_kv_cache_destroy(std::ptr::null_mut()) },
        OK
    );
    // SAFETY: nothing uses what goes with it.
    assert_eq!(
        unsafe { unsloth_kv_cache_destroy(dead) },
        UNSLOTH_STATUS_INVALID_HANDLE
    );
    assert_eq!(live.stats().num_sequences, 0);
}

#[test]
fn arguments() {
    let ctx = Handle::cpu();
    let cache = Cache::new(&ctx);
    let ids = [cache.sequence(), cache.sequence(), cache.sequence()];
    let stream = std::ptr::null_mut();
    assert_fails(
        cache.extend(&[ids[0]], &[-1]),
        INVALID,
        "kv_cache_extend: num_tokens is -1, at least 0 is needed",
    );
    assert_fails(
        cache.extend(&[ids[0], ids[1], ids[2], ids[0]], &[1; 4]),
        INVALID,
        "kv_cache_extend: num_sequences is 4, above max_batch_size 3",
    );
    assert_fails(
        cache.extend(&[ids[0], ids[1]], &[9, 16]),
        UNSLOTH_STATUS_OUT_OF_PAGES,
        "kv_cache_extend: 7 pages are needed, 6 of 6 are free",
    );
    // SAFETY: NULL where it is tested, pointers to live locals otherwise.
    unsafe {
        let got = unsloth_kv_cache_extend(cache.0, std::ptr::null(), &1, 1, stream);
        assert_fails(got, NULL, "kv_cache_extend: sequences is NULL");
        let got = unsloth_kv_cache_extend(cache.0, &ids[0], std::ptr::null(), 1, stream);
        assert_fails(got, NULL, "kv_cache_extend: num_tokens is NULL");
        let got = unsloth_kv_cache_extend(cache.0, &ids[0], &1, usize::MAX, stream);
        assert_fails(
            got,
            INVALID,
            "kv_cache_extend: num_sequences is 18446744073709551615, above max_batch_size 3",
        );
        let got = unsloth_kv_cache_extend(cache.0, std::ptr::null(), std::ptr::null(), 0, stream);
        assert_eq!(got, OK);
        let got = unsloth_kv_cache_sequence_reserve(cache.0, ids[0], -5, stream);
        assert_fails(
            got,
            INVALID,
            "kv_cache_sequence_reserve: num_tokens is -5, at least 0 is needed",
        );
        let mut evicted = 77;
        let got = unsloth_kv_cache_sequence_evict(cache.0, ids[0], -1, 0, &mut evicted);
        assert_fails(
            got,
            INVALID,
            "kv_cache_sequence_evict: num_sinks is -1, at least 0 is needed",
        );
        assert_eq!(evicted, 77);
        let got = unsloth_kv_cache_sequence_create(cache.0, std::ptr::null_mut());
        assert_fails(got, NULL, "kv_cache_sequence_create: sequence is NULL");
        let got = unsloth_kv_cache_sequence_fork(cache.0, ids[0], std::ptr::null_mut());
        assert_fails(got, NULL, "kv_cache_sequence_fork: fork is NULL");
    }
    assert_eq!(
        (cache.stats().num_sequences, cache.stats().num_used_pages),
        (3, 0)
    );

    assert_eq!(cache.extend(&ids[..2], &[9, 1]), OK, "{}", last_message());
    let mut pages = [-1i32; 4];
    let mut num_pages = 77;
    // SAFETY: capacities are those of the array.
    unsafe {
        let room = pages.as_mut_ptr();
        let got = unsloth_kv_cache_sequence_pages_get(cache.0, ids[0], room, 2, &mut num_pages);
        assert_fails(
            got,
            INVALID,
            "kv_cache_sequence_pages: capacity is 2, the sequence has 3 pages",
        );
        assert_eq!((pages, num_pages), ([-1; 4], 77));
        let null = std::ptr::null_mut();
        let got = unsloth_kv_cache_sequence_pages_get(cache.0, ids[0], null, 4, &mut num_pages);
        assert_fails(got, NULL, "kv_cache_sequence_pages: pages is NULL");
        let got = unsloth_kv_cache_sequence_pages_get(cache.0, ids[0], null, 0, &mut num_pages);
        assert_eq!((got, num_pages), (OK, 3));
        let got = unsloth_kv_cache_sequence_pages_get(cache.0, ids[0], room, 4, &mut num_pages);
        assert_eq!((got, pages), (OK, [0, 1, 2, -1]));
    }
    let info = cache.info(ids[0]);
    assert_eq!((info.length, info.position, info.num_pages), (9, 9, 3));
    assert_eq!(info.num_reserved, 3);
}

#[test]
fn append() {
    let ctx = Handle::cpu();
    let cache = Cache::new(&ctx);
    let id = cache.sequence();
    assert_eq!(cache.extend(&[id], &[2]), OK);
    let rust = Context::cpu().unwrap();
    let k = TestTensor::of(DType::F32, &[2, 1, 4], &[1.0; 8]).upload(&rust);
    let v = TestTensor::of(DType::F32, &[2, 1, 4], &[2.0; 8]).upload(&rust);
    // SAFETY: zero is a value of the struct, whose tensors lie in live memory.
    let good: unsloth_kv_cache_append_params = unsafe {
        unsloth_kv_cache_append_params {
            k: c_tensor(&k),
            v: c_tensor(&v),
            ..zeroed_params()
        }
    };
    let (mut pages_k, mut pages_v) = (absent(), absent());
    // SAFETY: pointers to live locals.
    let got = unsafe { unsloth_kv_cache_layer_get(cache.0, 0, &mut pages_k, &mut pages_v) };
    assert_eq!(got, OK);
    assert_eq!(pages_k.shape[..4], [6, 4, 1, 4]);
    type Spoil = Box<dyn Fn(&mut unsloth_kv_cache_append_params)>;
    let cases: Vec<(Spoil, unsloth_status, &str)> = vec![
        (
            Box::new(|p| p.layer = 2),
            INVALID,
            "kv_cache_append: layer is 2, the cache has 2 layers",
        ),
        (
            Box::new(|p| p.layer = -1),
            INVALID,
            "kv_cache_append: layer is -1, at least 0 is needed",
        ),
        (
            Box::new(|p| p.k = absent()),
            INVALID,
            "kv_cache_append: k is absent (rank 0), it is required",
        ),
        (
            Box::new(|p| p.v.dtype = DType::I64 as u32),
            INVALID,
            "kv_cache_append: v has dtype i64, allowed: f32, f16, bf16",
        ),
        (
            Box::new(|p| p.k.shape[0] = 3),
            INVALID,
            "kv_cache_append: k has shape [3, 1, 4], expected [2, 1, 4]",
        ),
        (
            Box::new(|p| p.k.data = std::ptr::null_mut()),
            NULL,
            "kv_cache_append: data of k is NULL",
        ),
        (
            Box::new(|p| p.v.strides = [4, 4, 2, 0, 0, 0]),
            INVALID,
            "kv_cache_append: v has stride 2 along its last dimension, allowed: 1",
        ),
        (
            Box::new(move |p| p.v.data = pages_k.data),
            INVALID,
            "kv_cache_append: v overlaps the pages of the layer",
        ),
        (
            Box::new(|p| p.rotate = 2),
            INVALID,
            "kv_cache_append: rotate is 2, allowed: 0, 1",
        ),
        (
            Box::new(|p| (p.rotate, p.rotation.rotary_dim) = (1, 6)),
            INVALID,
            "kv_cache_append: rotary_dim is 6, above the head_dim 4",
        ),
        (
            Box::new(|p| p.q = p.k),
            INVALID,
            "kv_cache_append: q is there without a rotation: queries are only rotated",
        ),
        (
            Box::new(|p| (p.rotate, p.q_out) = (1, p.k)),
            INVALID,
            "kv_cache_append: q is absent (rank 0), it is required",
        ),
        (
            Box::new(|p| (p.rotate, p.q, p.q.dtype) = (1, p.k, DType::F16 as u32)),
            INVALID,
            "kv_cache_append: q has dtype f16, k has f32",
        ),
        (
            Box::new(|p| (p.rotate, p.q, p.q.shape[0]) = (1, p.k, 1)),
            INVALID,
            "kv_cache_append: q has shape [1, 1, 4], expected [2, 1, 4]",
        ),
        (
            Box::new(|p| (p.rotate, p.q, p.q_out, p.q_out.shape[1]) = (1, p.v, p.v, 2)),
            INVALID,
            "kv_cache_append: q_out has shape [2, 2, 4], q has [2, 1, 4]",
        ),
        (
            Box::new(|p| (p.rotate, p.q) = (1, p.k)),
            INVALID,
            "kv_cache_append: q_out overlaps k",
        ),
        (Box::new(|p| p.struct_size = 12), INVALID, ""),
    ];
    for (spoil, status, message) in cases {
        let mut p = good;
        spoil(&mut p);
        // SAFETY: what passes validation lies in live memory.
        let got = unsafe { unsloth_kv_cache_append(cache.0, &p, std::ptr::null_mut()) };
        if message.is_empty() {
            assert_eq!(got, status);
        } else {
            assert_fails(got, status, message);
        }
        // SAFETY: the first tokens of page 0, on the host.
        let written = unsafe { std::slice::from_raw_parts(pages_k.data.cast::<f32>(), 8) };
        assert_eq!(written, [0.0; 8], "{message}");
    }
    // SAFETY: good arguments.
    unsafe {
        let got = unsloth_kv_cache_append(cache.0, &good, std::ptr::null_mut());
        assert_eq!(got, OK, "{}", last_message());
        let written = std::slice::from_raw_parts(pages_k.data.cast::<f32>(), 12);
        assert_eq!(
            (&written[..8], &written[8..]),
            (&[1.0; 8][..], &[0.0; 4][..])
        );
    }
    // SAFETY: as above.
    let got = unsafe {
        assert_eq!(unsloth_kv_cache_sequence_truncate(cache.0, id, 1), OK);
        unsloth_kv_cache_append(cache.0, &good, std::ptr::null_mut())
    };
    assert_fails(
        got,
        INVALID,
        "kv_cache_append: cache has no current batch: it must be extended first, and again after its sequences changed",
    );
}

/// A cache outlives the handle of its context.
#[test]
fn the_context_may_go_first() {
    let mut ctx = std::ptr::null_mut();
    // SAFETY: a pointer to a live local.
    assert_eq!(
        unsafe { unsloth_context_create(std::ptr::null(), &mut ctx) },
        OK
    );
    let owner = Handle(ctx);
    let cache = Cache::new(&owner);
    std::mem::forget(owner);
    // SAFETY: nothing uses what goes with it.
    assert_eq!(unsafe { unsloth_context_destroy(ctx) }, OK);
    let id = cache.sequence();
    assert_eq!(cache.extend(&[id], &[5]), OK);
    assert_eq!(cache.info(id).length, 5);
}

/// Eight threads grow, fork and free sequences of one cache; no page is lost or given out twice.
#[test]
fn threads_take_turns() {
    let ctx = Handle::cpu();
    let cache = &Cache::new(&ctx);
    std::thread::scope(|scope| {
        for seed in 0..8i64 {
            scope.spawn(move || {
                for round in 0..200 {
                    let id = cache.sequence();
                    let n = (seed + round) % 6 + 1;
                    match cache.extend(&[id], &[n]) {
                        OK => {
                            assert_eq!(cache.info(id).length, n);
                            let mut fork = 0;
                            // SAFETY: a pointer to a live local.
                            let got =
                                unsafe { unsloth_kv_cache_sequence_fork(cache.0, id, &mut fork) };
                            assert_eq!((got, cache.info(fork).length), (OK, n));
                            assert_eq!(cache.free(fork), OK);
                        }
                        UNSLOTH_STATUS_OUT_OF_PAGES => assert_eq!(cache.info(id).length, 0),
                        _ => panic!("{}", last_message()),
                    }
                    assert_eq!(cache.free(id), OK);
                }
            });
        }
    });
    let stats = cache.stats();
    assert_eq!((stats.num_sequences, stats.num_free_pages), (0, 6));
    assert!(stats.peak_used_pages > 1);
}
