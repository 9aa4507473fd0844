//! Batches of the KV cache, attention over them, memory, and errors.

use crate::common::kv_cache::{append_all, download, small};
use crate::common::{TestTensor, contexts, rng};
use unsloth::kv_cache::{Append, Config, KvCache, PageLayout, SequenceId};
use unsloth::ops::attention;
use unsloth::{Buffer, Context, ContextOptions, DType, Error, Layout, Stream, TensorRef};

/// After any history, attention straight from the cache is attention over the tokens that each
/// sequence holds, evicted ones gone.
#[test]
fn attention_sees_what_is_held() {
    let (num_heads, num_kv_heads, dim, dim_v) = (4, 2, 8, 6);
    for ctx in contexts() {
        for page_layout in [PageLayout::TokenMajor, PageLayout::HeadMajor] {
            let config = Config {
                v_head_dim: dim_v,
                page_size: 4,
                page_layout,
                ..Config::new(1, num_kv_heads, dim, 24, DType::F32)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let mut held: Vec<(SequenceId, Vec<[Vec<f64>; 2]>)> = Vec::new();
            let rng = &mut rng();
            let mut last_q = Vec::new();
            let mut extend = |cache: &mut KvCache,
                              held: &mut Vec<(SequenceId, Vec<[Vec<f64>; 2]>)>,
                              counts: &[usize]| {
                let batch: Vec<_> = held
                    .iter()
                    .map(|h| h.0)
                    .zip(counts.iter().copied())
                    .collect();
                cache.extend(&batch, Stream::DEFAULT).unwrap();
                let total: usize = counts.iter().sum();
                let mut normal = |heads: usize, dim: usize| {
                    let layout = Layout::contiguous(&[total, heads, dim]).unwrap();
                    TestTensor::normal(rng, DType::F32, layout)
                };
                let (q, k, v) = (
                    normal(num_heads, dim),
                    normal(num_kv_heads, dim),
                    normal(num_kv_heads, dim_v),
                );
                let (keys, values) = (k.values(), v.values());
                let rows = keys
                    .chunks(num_kv_heads * dim)
                    .zip(values.chunks(num_kv_heads * dim_v));
                let mut rows = rows.map(|(k, v)| [k.to_vec(), v.to_vec()]);
                for (h, &n) in held.iter_mut().zip(counts) {
                    h.1.extend(rows.by_ref().take(n));
                }
                let (dk, dv) = (k.upload(&ctx), v.upload(&ctx));
                let append = Append {
                    layer: 0,
                    k: dk.view(),
                    v: dv.view(),
                    q: None,
                    rotation: None,
                };
                cache.append(&append, Stream::DEFAULT).unwrap();
                last_q = q.values();
            };
            for _ in 0..2 {
                held.push((cache.create_sequence().unwrap(), Vec::new()));
            }
            extend(&mut cache, &mut held, &[19, 7]);
            let fork = cache.fork_sequence(held[1].0).unwrap();
            held.push((fork, held[1].1.clone()));
            extend(&mut cache, &mut held, &[2, 3, 1]);
            // Sinks 0..4, window from 12 on: 8 tokens go.
            assert_eq!(cache.evict_sequence(held[0].0, 2, 7).unwrap(), 8);
            held[0].1.drain(4..12);
            cache.truncate_sequence(held[1].0, 6).unwrap();
            held[1].1.truncate(6);
            let counts = [3, 4, 1];
            extend(&mut cache, &mut held, &counts);

            let total: usize = counts.iter().sum();
            let q = TestTensor::of(DType::F32, &[total, num_heads, dim], &last_q).upload(&ctx);
            let layout = Layout::contiguous(&[total, num_heads, dim_v]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let params = cache.attention(0, q.view(), out.view_mut()).unwrap();
            attend(&ctx, params);
            let out = out.download_output().values();

            let mut start = 0;
            for ((_, tokens), &n) in held.iter().zip(&counts) {
                let side = |which: usize| -> Vec<f64> {
                    tokens
                        .iter()
                        .flat_map(|t| t[which].iter().copied())
                        .collect()
                };
                let shape = |len, heads, dim| [1, len, heads, dim];
                let k = shape(tokens.len(), num_kv_heads, dim);
                let k = TestTensor::of(DType::F32, &k, &side(0)).upload(&ctx);
                let v = shape(tokens.len(), num_kv_heads, dim_v);
                let v = TestTensor::of(DType::F32, &v, &side(1)).upload(&ctx);
                let rows = &last_q[start * num_heads * dim..(start + n) * num_heads * dim];
                let q = TestTensor::of(DType::F32, &shape(n, num_heads, dim), rows).upload(&ctx);
                let layout = Layout::contiguous(&shape(n, num_heads, dim_v)).unwrap();
                let mut alone = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                let params = attention::Params {
                    causal: true,
                    ..attention::Params::new(q.view(), k.view(), v.view(), alone.view_mut())
                };
                attend(&ctx, params);
                let expected = alone.download_output().values();
                let width = num_heads * dim_v;
                for (a, b) in out[start * width..].iter().zip(&expected) {
                    assert!((a - b).abs() <= 1e-5, "{a} {b}");
                }
                start += n;
            }
        }
    }
}

fn attend(ctx: &Context, params: attention::Params<'_>) {
    let size = attention::workspace_size(ctx, &params).unwrap();
    let mut workspace = Buffer::new(ctx, size).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
}

#[test]
fn the_batch_ends_with_its_sequences() {
    for ctx in contexts() {
        let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F32)).unwrap();
        assert!(cache.batch().is_err());
        type Change = fn(&mut KvCache, SequenceId);
        let changes: [Change; 5] = [
            |c, id| c.truncate_sequence(id, 1).unwrap(),
            |c, id| assert_eq!(c.evict_sequence(id, 0, 0).unwrap(), 8),
            |c, id| c.reserve_sequence(id, 20, Stream::DEFAULT).unwrap(),
            |c, id| {
                let fork = c.fork_sequence(id).unwrap();
                c.free_sequence(fork).unwrap();
            },
            |c, id| c.free_sequence(id).unwrap(),
        ];
        for change in changes {
            let (id, other) = (
                cache.create_sequence().unwrap(),
                cache.create_sequence().unwrap(),
            );
            cache.extend(&[(id, 9)], Stream::DEFAULT).unwrap();
            cache.reserve_sequence(other, 4, Stream::DEFAULT).unwrap();
            cache.free_sequence(other).unwrap();
            assert_eq!(cache.batch().unwrap().num_tokens, 9, "others do not matter");
            change(&mut cache, id);
            assert_eq!(
                cache.batch().unwrap_err().to_string(),
                "kv_cache_batch: cache has no current batch: it must be extended first, and again after its sequences changed"
            );
            let _ = cache.free_sequence(id);
        }
    }
}

#[test]
fn an_empty_batch_is_a_batch() {
    for ctx in contexts() {
        let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F16)).unwrap();
        cache.extend(&[], Stream::DEFAULT).unwrap();
        assert_eq!(cache.batch().unwrap().num_sequences, 0);
        append_all(&ctx, &mut cache, &[], DType::F32);
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 0)], Stream::DEFAULT).unwrap();
        assert_eq!(cache.batch().unwrap().host_seq_lens, [0]);
        append_all(&ctx, &mut cache, &[], DType::F32);
        assert_eq!(cache.stats().unwrap().peak_used_pages, 0);
    }
}

#[test]
fn it_allocates_what_its_size_says() {
    for ctx in contexts() {
        let configs = [
            small(PageLayout::TokenMajor, 4, DType::F32),
            small(PageLayout::HeadMajor, 16, DType::Bf16),
            Config::new(3, 1, 7, 5, DType::F16),
        ];
        for config in configs {
            let before = ctx.memory_stats();
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let size = config.size().unwrap();
            assert_eq!(ctx.memory_stats().in_use - before.in_use, size.total());
            assert_eq!(cache.stats().unwrap().size, size);
            let id = cache.create_sequence().unwrap();
            cache.extend(&[(id, 5)], Stream::DEFAULT).unwrap();
            append_all(&ctx, &mut cache, &[1, 2, 3, 4, 5], DType::F32);
            assert_eq!(ctx.memory_stats().in_use - before.in_use, size.total());
            drop(cache);
            assert_eq!(ctx.memory_stats().in_use, before.in_use);
        }
    }
}

#[test]
fn the_limit_of_the_context_holds() {
    let config = Config::new(1, 1, 8, 4, DType::F32);
    let total = config.size().unwrap().total();
    for (limit, fits) in [(total, true), (total - 1, false)] {
        let ctx = Context::new(&ContextOptions {
            memory_limit: Some(limit),
            ..ContextOptions::default()
        })
        .unwrap();
        let made = KvCache::new(&ctx, &config);
        assert_eq!(made.is_ok(), fits);
        assert!(fits || matches!(made, Err(Error::OutOfMemory { .. })));
        drop(made);
        assert_eq!(ctx.memory_stats().in_use, 0);
    }
}

#[test]
fn bad_calls_say_why() {
    let ctx = Context::cpu().unwrap();
    let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F32)).unwrap();
    let ids: Vec<_> = (0..4).map(|_| cache.create_sequence().unwrap()).collect();
    let fails = |cache: &mut KvCache, batch: &[(SequenceId, usize)], message: &str| {
        let error = cache.extend(batch, Stream::DEFAULT).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    let all: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
    fails(
        &mut cache,
        &all,
        "kv_cache_extend: num_sequences is 4, above max_batch_size 3",
    );
    fails(
        &mut cache,
        &[(ids[0], 20), (ids[1], 5)],
        "kv_cache_extend: num_tokens sum to 25, above max_batch_tokens 24",
    );
    fails(
        &mut cache,
        &[(ids[0], usize::MAX), (ids[1], 5)],
        "kv_cache_extend: num_tokens sum to more than an integer holds, above max_batch_tokens 24",
    );
    fails(
        &mut cache,
        &[(ids[0], 1), (ids[0], 1)],
        "kv_cache_extend: sequences contains 0x100000000 twice",
    );
    for _ in 0..2 {
        cache.extend(&[(ids[0], 24)], Stream::DEFAULT).unwrap();
    }
    fails(
        &mut cache,
        &[(ids[1], 1), (ids[0], 1)],
        "kv_cache_extend: num_tokens is 1, 48 of max_sequence_length 48 are in use",
    );
    assert_eq!(cache.sequence(ids[1]).unwrap().num_pages, 0);
    let error = cache.truncate_sequence(ids[0], 49).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kv_cache_sequence_truncate: num_tokens is 49, the sequence ends at 48"
    );
    assert_eq!(cache.evict_sequence(ids[0], 3, 20).unwrap(), 24);
    let error = cache.truncate_sequence(ids[0], 20).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kv_cache_sequence_truncate: num_tokens is 20, positions 4 to 27 were evicted"
    );
    assert_eq!(
        cache.layer(2).unwrap_err().to_string(),
        "kv_cache_layer: layer is 2, the cache has 2 layers"
    );

    cache.extend(&[(ids[1], 2)], Stream::DEFAULT).unwrap();
    let data = [0.0f32; 64];
    let tensor = |shape: &[usize]| TensorRef::from_slice(&data, shape).unwrap();
    let bad: [(usize, TensorRef<'_>, TensorRef<'_>, &str); 5] = [
        (
            2,
            tensor(&[2, 2, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: layer is 2, the cache has 2 layers",
        ),
        (
            0,
            tensor(&[4, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has rank 2, allowed: 3",
        ),
        (
            0,
            tensor(&[3, 2, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has shape [3, 2, 3], expected [2, 2, 3]",
        ),
        (
            0,
            tensor(&[2, 2, 3]),
            tensor(&[2, 2, 3]),
            "kv_cache_append: v has shape [2, 2, 3], expected [2, 2, 2]",
        ),
        (
            0,
            TensorRef::from_slice_with_layout(
                &data,
                Layout::strided(&[2, 2, 3], &[12, 6, 2]).unwrap(),
            )
            .unwrap(),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has stride 2 along its last dimension, allowed: 1",
        ),
    ];
    for (layer, k, v, message) in bad {
        let error = cache
            .append(
                &Append {
                    layer,
                    k,
                    v,
                    q: None,
                    rotation: None,
                },
                Stream::DEFAULT,
            )
            .unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let (k, v) = cache.layer(0).unwrap();
    let (k, v) = (download(&ctx, &k), download(&ctx, &v));
    assert!(k.iter().chain(&v).all(|&x| x == 0.0), "nothing was written");
}
