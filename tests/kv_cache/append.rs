//! What is written to a KV cache: every dtype, strides, rotations.

use crate::common::kv_cache::download;
use crate::common::{FLOATS, TestTensor, contexts, rng};
use unsloth::kv_cache::{Append, Config, KvCache};
use unsloth::ops::rope::{self, Angles, Positions, Rotation, Style};
use unsloth::{Context, DType, InOut, Layout, Stream, TensorMut, TensorRef};

/// `half` rounds an f32 to the nearest; from an f64 it looks at the upper half only and may take a
/// number beside a tie for one.
fn round_from_f32(dtype: DType, value: f32) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f32(value).to_f64(),
        DType::Bf16 => half::bf16::from_f32(value).to_f64(),
        _ => value.into(),
    }
}

/// What is appended is rounded once, to the cache's dtype, from every dtype and any strides.
#[test]
fn append_converts_between_dtypes() {
    for ctx in contexts() {
        for stored in FLOATS {
            for given in FLOATS {
                for (num_heads, dim) in [(1, 1), (3, 64), (2, 600)] {
                    let config = Config {
                        v_head_dim: 8,
                        ..Config::new(1, num_heads, dim, 4, stored)
                    };
                    let mut cache = KvCache::new(&ctx, &config).unwrap();
                    let id = cache.create_sequence().unwrap();
                    cache.extend(&[(id, 20)], Stream::DEFAULT).unwrap();
                    let layout =
                        |dim| crate::common::tensor::transposed(&[20, num_heads, dim], 0, 1);
                    let k = TestTensor::normal(&mut rng(), given, layout(dim));
                    let v = TestTensor::normal(&mut rng(), given, layout(8));
                    let (dk, dv) = (k.upload(&ctx), v.upload(&ctx));
                    let params = Append {
                        layer: 0,
                        k: dk.view(),
                        v: dv.view(),
                        q: None,
                        rotation: None,
                    };
                    cache.append(&params, Stream::DEFAULT).unwrap();
                    let (keys, values) = cache.layer(0).unwrap();
                    // A fresh sequence of a fresh cache has pages 0 and 1, so its tokens lie in
                    // order.
                    for (pages, given) in [(keys, &k), (values, &v)] {
                        let written = download(&ctx, &pages);
                        let expected: Vec<f64> = given
                            .values()
                            .iter()
                            .map(|&x| round_from_f32(stored, x as f32))
                            .collect();
                        assert_eq!(written[..expected.len()], expected);
                        assert!(written[expected.len()..].iter().all(|&x| x == 0.0));
                    }
                }
            }
        }
    }
}

/// Rotating keys on their way to the cache is rotating them first, to the bit, at the positions of
/// the tokens.
#[test]
fn append_rotates_keys() {
    for ctx in contexts() {
        for &stored in DType::CACHED {
            for (style, rotary_dim, table) in [
                (Style::HalfSplit, 0, false),
                (Style::Interleaved, 8, false),
                (Style::HalfSplit, 6, true),
            ] {
                let (num_heads, dim, num_tokens) = (3, 16, 21);
                let config = Config::new(1, num_heads, dim, 6, stored);
                let half = if rotary_dim == 0 {
                    dim / 2
                } else {
                    rotary_dim / 2
                };
                let uniform = |n: usize| {
                    let layout = Layout::contiguous(&[n, half]).unwrap();
                    TestTensor::normal(&mut rng(), DType::F32, layout).upload(&ctx)
                };
                let (cos, sin) = (uniform(60), uniform(60));
                let rotation = Rotation {
                    style,
                    rotary_dim,
                    angles: match table {
                        false => Angles::default(),
                        true => Angles::Table {
                            cos: cos.view(),
                            sin: sin.view(),
                        },
                    },
                };
                let mut cache = KvCache::new(&ctx, &config).unwrap();
                let (first, second) = (
                    cache.create_sequence().unwrap(),
                    cache.create_sequence().unwrap(),
                );
                // The second starts later, after an eviction, in the middle of a page.
                cache.extend(&[(second, 37)], Stream::DEFAULT).unwrap();
                assert_eq!(cache.evict_sequence(second, 0, 5).unwrap(), 32);
                cache
                    .extend(&[(first, 9), (second, num_tokens - 9)], Stream::DEFAULT)
                    .unwrap();
                let layout = Layout::contiguous(&[num_tokens, num_heads, dim]).unwrap();
                let k = TestTensor::normal(&mut rng(), DType::F32, layout).upload(&ctx);
                let mut rotated = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                rope::forward(
                    &ctx,
                    &rope::Params {
                        k: Some(InOut::Apart {
                            input: k.view(),
                            output: rotated.view_mut(),
                        }),
                        positions: Positions::PerToken(cache.batch().unwrap().positions),
                        rotation,
                        ..rope::Params::default()
                    },
                    Stream::DEFAULT,
                )
                .unwrap();
                let params = |k, rotation| Append {
                    layer: 0,
                    k,
                    v: rotated.view(),
                    q: None,
                    rotation,
                };
                let before = params(rotated.view(), None);
                cache.append(&before, Stream::DEFAULT).unwrap();
                let expected = download(&ctx, &cache.layer(0).unwrap().0);
                let fused = params(k.view(), Some(rotation));
                cache.append(&fused, Stream::DEFAULT).unwrap();
                assert_eq!(download(&ctx, &cache.layer(0).unwrap().0), expected);
            }
        }
    }
}

/// Queries that turn with the keys get the bits that RoPE gives them: apart, in place beside keys and values of one packed tensor,
/// in vectors and by element, in more parts than a row of threads has.
#[test]
fn append_rotates_queries() {
    for ctx in contexts() {
        for (given, stored) in [
            (DType::F32, DType::F32),
            (DType::Bf16, DType::Bf16),
            (DType::F16, DType::F32),
            (DType::F32, DType::Bf16),
            (DType::F32, DType::F8E4M3),
            (DType::Bf16, DType::F8E4M3),
        ] {
            for (style, dim, rotary_dim) in [
                (Style::HalfSplit, 128, 0),
                (Style::HalfSplit, 16, 6),
                (Style::Interleaved, 40, 24),
                (Style::HalfSplit, 512, 320),
                (Style::Interleaved, 34, 0),
            ] {
                let (kv_heads, q_heads, num_tokens) = (2, 5, 7);
                let rotation = Rotation {
                    style,
                    rotary_dim,
                    ..Rotation::default()
                };
                let mut cache =
                    KvCache::new(&ctx, &Config::new(1, kv_heads, dim, 6, stored)).unwrap();
                let ids = [(); 2].map(|()| cache.create_sequence().unwrap());
                cache.extend(&[(ids[0], 19)], Stream::DEFAULT).unwrap();
                let batch = [(ids[1], 3), (ids[0], num_tokens - 3)];
                cache.extend(&batch, Stream::DEFAULT).unwrap();
                let columns = q_heads + 2 * kv_heads;
                let layout = Layout::contiguous(&[num_tokens, columns, dim]).unwrap();
                let all = TestTensor::normal(&mut rng(), given, layout).upload(&ctx);
                let heads = |start, len| all.view().narrowed(1, start, len).unwrap();
                let [q, k, v] = [
                    (0, q_heads),
                    (q_heads, kv_heads),
                    (q_heads + kv_heads, kv_heads),
                ]
                .map(|(start, len)| heads(start, len));
                let layout = Layout::contiguous(&[num_tokens, q_heads, dim]).unwrap();
                let mut expected = TestTensor::poisoned(given, layout).upload(&ctx);
                rope::forward(
                    &ctx,
                    &rope::Params {
                        q: Some(InOut::Apart {
                            input: q,
                            output: expected.view_mut(),
                        }),
                        positions: Positions::PerToken(cache.batch().unwrap().positions),
                        rotation,
                        ..rope::Params::default()
                    },
                    Stream::DEFAULT,
                )
                .unwrap();
                let expected = expected.download_output().values();
                let alone = Append {
                    layer: 0,
                    k,
                    v,
                    q: None,
                    rotation: Some(rotation),
                };
                cache.append(&alone, Stream::DEFAULT).unwrap();
                let keys = download(&ctx, &cache.layer(0).unwrap().0);

                let mut turned = TestTensor::poisoned(given, layout).upload(&ctx);
                let apart = Append {
                    q: Some(InOut::Apart {
                        input: q,
                        output: turned.view_mut(),
                    }),
                    ..alone
                };
                cache.append(&apart, Stream::DEFAULT).unwrap();
                let case = format!("{given} {stored} {style:?} {dim} {rotary_dim}");
                assert_eq!(turned.download_output().values(), expected, "{case}");
                assert_eq!(download(&ctx, &cache.layer(0).unwrap().0), keys, "{case}");

                let in_place = Append {
                    layer: 0,
                    k,
                    v,
                    // SAFETY: the heads of the queries, of memory that outlives the call; no other view of them is used by it.
                    q: Some(InOut::InPlace(unsafe {
                        TensorMut::from_raw(q.as_ptr().cast_mut(), given, *q.layout())
                    })),
                    rotation: Some(rotation),
                };
                cache.append(&in_place, Stream::DEFAULT).unwrap();
                let packed = download(&ctx, &all.view());
                let queries = packed
                    .chunks_exact(columns * dim)
                    .flat_map(|row| &row[..q_heads * dim]);
                assert!(queries.eq(&expected), "{case}");
                assert_eq!(download(&ctx, &cache.layer(0).unwrap().0), keys, "{case}");
            }
        }
    }
}

#[test]
fn a_table_must_reach_the_batch() {
    let ctx = Context::cpu().unwrap();
    let mut cache = KvCache::new(&ctx, &Config::new(1, 1, 4, 4, DType::F32)).unwrap();
    let id = cache.create_sequence().unwrap();
    let data = [0.5f32; 64];
    let tensor = |shape: &[usize]| TensorRef::from_slice(&data, shape).unwrap();
    let rotation = Some(Rotation {
        angles: Angles::Table {
            cos: tensor(&[9, 2]),
            sin: tensor(&[9, 2]),
        },
        ..Rotation::default()
    });
    for (num_tokens, fits) in [(9, true), (1, false)] {
        cache.extend(&[(id, num_tokens)], Stream::DEFAULT).unwrap();
        let (k, v) = (tensor(&[num_tokens, 1, 4]), tensor(&[num_tokens, 1, 4]));
        let params = Append {
            layer: 0,
            k,
            v,
            q: None,
            rotation,
        };
        match cache.append(&params, Stream::DEFAULT) {
            Ok(()) => assert!(fits),
            Err(error) => assert_eq!(
                (error.to_string().as_str(), fits),
                (
                    "kv_cache_append: cos has 9 positions, the batch reaches position 9",
                    false
                )
            ),
        }
    }
}
