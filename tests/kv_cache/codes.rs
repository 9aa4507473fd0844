//! A KV cache of 8-bit floats: what is stored, the scales of its layers, and attention over both.

use crate::common::abi::{Handle, assert_fails, last_message, zeroed_params};
use crate::common::kv_cache::download;
use crate::common::tensor::{e4m3_nearest, e4m3_value, normal, transposed};
use crate::common::{FLOATS, TestTensor, contexts, rng};
use rand::Rng;
use unsloth::ffi::attention::unsloth_attention_params;
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_quantization;
use unsloth::kv_cache::{Append, Config, KvCache, PageLayout};
use unsloth::memory::{self, CopyKind};
use unsloth::ops::attention;
use unsloth::ops::rope::{self, Positions, Rotation};
use unsloth::{Buffer, Context, DType, InOut, Layout, Stream, TensorRef};

fn codes(ctx: &Context, pages: &TensorRef<'_>) -> Vec<u8> {
    let mut bytes = vec![0u8; pages.layout().num_elements()];
    // SAFETY: both ranges have this many bytes.
    unsafe {
        memory::copy(
            ctx,
            bytes.as_mut_ptr(),
            pages.as_ptr(),
            bytes.len(),
            CopyKind::DeviceToHost,
            Stream::DEFAULT,
        )
        .unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
    bytes
}

/// Normal numbers, and among them what is special: the greatest, what lies beyond, ties, subnormal codes, NaN.
fn values(dtype: DType, layout: Layout) -> TestTensor {
    const SPECIAL: [f64; 16] = [
        f64::NAN,
        448.0,
        -448.0,
        464.0,
        470.0,
        -1e30,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        1.0625,
        1.1875,
        0.000976,
        -0.00293,
        0.0009765625,
        0.0146484375,
    ];
    let mut rng = rng();
    let values: Vec<f64> = (0..layout.num_elements())
        .map(|_| match rng.random_range(0..6) {
            0 => SPECIAL[rng.random_range(0..16)],
            1 => normal(&mut rng) * 100.0,
            _ => normal(&mut rng),
        })
        .collect();
    TestTensor::from_values(dtype, layout, &values)
}

/// Every element is the code nearest to it times the reciprocal of its head's scale, to the bit, from
/// every dtype and any strides.
#[test]
fn append_stores_the_nearest_codes() {
    for ctx in contexts() {
        for given in FLOATS {
            for (num_heads, dim, scales) in [
                (1, 1, &[][..]),
                (3, 64, &[0.01, 1.7, 2.0][..]),
                (2, 600, &[0.37][..]),
                (4, 128, &[3e-5, 1.0, 40.0, 0.9][..]),
            ] {
                let config = Config {
                    v_head_dim: 8,
                    ..Config::new(2, num_heads, dim, 4, DType::F8E4M3)
                };
                let mut cache = KvCache::new(&ctx, &config).unwrap();
                let reversed: Vec<f32> = scales.iter().rev().copied().collect();
                if !scales.is_empty() {
                    cache
                        .set_scales(1, scales, &reversed, Stream::DEFAULT)
                        .unwrap();
                }
                let id = cache.create_sequence().unwrap();
                cache.extend(&[(id, 20)], Stream::DEFAULT).unwrap();
                let layout = |dim| transposed(&[20, num_heads, dim], 0, 1);
                let (k, v) = (values(given, layout(dim)), values(given, layout(8)));
                let (dk, dv) = (k.upload(&ctx), v.upload(&ctx));
                for layer in [0, 1] {
                    let params = Append {
                        layer,
                        k: dk.view(),
                        v: dv.view(),
                        q: None,
                        rotation: None,
                    };
                    cache.append(&params, Stream::DEFAULT).unwrap();
                    let (keys, of_values) = cache.layer(layer).unwrap();
                    for (pages, given, dim, scales) in
                        [(keys, &k, dim, scales), (of_values, &v, 8, &reversed[..])]
                    {
                        let written = codes(&ctx, &pages);
                        let scale = |head: usize| match scales.len() {
                            _ if layer == 0 => 1.0,
                            0 => 1.0,
                            1 => scales[0],
                            _ => scales[head],
                        };
                        let expected = given.values().into_iter().enumerate().map(|(i, x)| {
                            let factor = scale(i / dim % num_heads).recip();
                            e4m3_nearest((x as f32 * factor).into())
                        });
                        for (i, expected) in expected.enumerate() {
                            let nan = e4m3_value(expected).is_nan();
                            let found = written[i];
                            assert!(
                                found == expected || nan && found & 0x7f == 0x7f,
                                "{given:?} {i}: {found:#x}, not {expected:#x}",
                                given = given.values()[i]
                            );
                        }
                        let used = 20 * num_heads * dim;
                        assert!(written[used..].iter().all(|&code| code == 0));
                    }
                }
            }
        }
    }
}

/// Keys are rotated, then multiplied, then rounded once: what is rotated first, in f32, gives the same.
#[test]
fn rotated_keys_are_scaled_by_their_heads() {
    for ctx in contexts() {
        for (dim, rotary_dim) in [(64, 0), (16, 8), (12, 6), (130, 0)] {
            let config = Config::new(1, 2, dim, 4, DType::F8E4M3);
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            cache
                .set_scales(0, &[0.013, 0.2], &[1.0; 2], Stream::DEFAULT)
                .unwrap();
            let id = cache.create_sequence().unwrap();
            cache.extend(&[(id, 33)], Stream::DEFAULT).unwrap();
            let layout = Layout::contiguous(&[33, 2, dim]).unwrap();
            let k = TestTensor::normal(&mut rng(), DType::F32, layout).upload(&ctx);
            let mut rotated = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let rotation = Rotation {
                rotary_dim,
                ..Rotation::default()
            };
            let params = rope::Params {
                k: Some(InOut::Apart {
                    input: k.view(),
                    output: rotated.view_mut(),
                }),
                positions: Positions::PerToken(cache.batch().unwrap().positions),
                rotation,
                ..rope::Params::default()
            };
            rope::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            let mut stored = |k, rotation| {
                let params = Append {
                    layer: 0,
                    k,
                    v: k,
                    q: None,
                    rotation,
                };
                cache.append(&params, Stream::DEFAULT).unwrap();
                codes(&ctx, &cache.layer(0).unwrap().0)
            };
            let expected = stored(rotated.view(), None);
            assert!(
                stored(k.view(), Some(rotation)) == expected,
                "{dim} {rotary_dim}"
            );
        }
    }
}

/// Attention over a cache of codes is attention over what they stand for.
#[test]
fn attention_multiplies_by_the_scales() {
    for ctx in contexts() {
        for (dtype, dim, page_layout) in [
            (DType::F32, 64, PageLayout::TokenMajor),
            (DType::Bf16, 128, PageLayout::HeadMajor),
            (DType::F16, 64, PageLayout::TokenMajor),
        ] {
            let config = Config {
                page_layout,
                ..Config::new(2, 2, dim, 20, DType::F8E4M3)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let scales: [&[f32]; 2] = [&[0.02, 0.013], &[0.3, 0.01]];
            cache
                .set_scales(1, scales[0], scales[1], Stream::DEFAULT)
                .unwrap();
            let id = cache.create_sequence().unwrap();
            let mut results = Vec::new();
            for tokens in [130, 1] {
                cache.extend(&[(id, tokens)], Stream::DEFAULT).unwrap();
                let tensor = |heads: usize| {
                    let layout = Layout::contiguous(&[tokens, heads, dim]).unwrap();
                    TestTensor::normal(&mut rng(), dtype, layout).upload(&ctx)
                };
                let (q, k, v) = (tensor(8), tensor(2), tensor(2));
                let append = Append {
                    layer: 1,
                    k: k.view(),
                    v: v.view(),
                    q: None,
                    rotation: None,
                };
                cache.append(&append, Stream::DEFAULT).unwrap();
                let layout = *q.view().layout();
                let mut of_codes = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                let params = cache.attention(1, q.view(), of_codes.view_mut()).unwrap();
                forward(&ctx, params);
                // The same pages in f32.
                let (keys, of_values) = cache.layer(1).unwrap();
                let wide = [(keys, scales[0]), (of_values, scales[1])].map(|(pages, scales)| {
                    let mut numbers = download(&ctx, &pages);
                    let heads = |i: usize| match page_layout {
                        PageLayout::TokenMajor => i / dim % 2,
                        PageLayout::HeadMajor => i / (dim * 16) % 2,
                    };
                    for (i, x) in numbers.iter_mut().enumerate() {
                        *x *= f64::from(scales[heads(i)]);
                    }
                    TestTensor::of(DType::F32, pages.shape(), &numbers).upload(&ctx)
                });
                let wide_q = TestTensor::of(DType::F32, q.layout.shape(), &q.download().values());
                let wide_q = wide_q.upload(&ctx);
                let mut of_floats = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                let mut params = cache
                    .attention(1, wide_q.view(), of_floats.view_mut())
                    .unwrap();
                (params.k, params.v) = (wide[0].view(), wide[1].view());
                forward(&ctx, params);
                results.push((of_codes.download().values(), of_floats.download().values()));
            }
            for (of_codes, of_floats) in results {
                for (a, b) in of_codes.iter().zip(&of_floats) {
                    // Weights of 11 bits at least, and values up to 1 or so.
                    assert!((a - b).abs() < 2e-3, "{dtype} {dim}: {a}, not {b}");
                }
            }
        }
    }
}

fn forward(ctx: &Context, params: attention::Params<'_>) {
    let size = attention::workspace_size(ctx, &params).unwrap();
    let mut workspace = Buffer::new(ctx, size).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
}

/// What scales are refused, with the message; the layer keeps those that it has.
#[test]
fn misuse_of_scales() {
    for ctx in contexts() {
        let mut floats = KvCache::new(&ctx, &Config::new(1, 2, 8, 2, DType::F16)).unwrap();
        let mut cache = KvCache::new(&ctx, &Config::new(1, 2, 8, 2, DType::F8E4M3)).unwrap();
        let id = cache.create_sequence().unwrap();
        let one: &[f32] = &[1.0];
        let numbers = "allowed: positive numbers with a reciprocal in f32";
        for (layer, k, v, message) in [
            (1, one, one, "layer is 1, the cache has 1 layers".into()),
            (
                0,
                &[][..],
                one,
                "k_scale has 0 entries, allowed: 1, or one for each of 2 heads".into(),
            ),
            (
                0,
                one,
                &[1.0; 3],
                "v_scale has 3 entries, allowed: 1, or one for each of 2 heads".into(),
            ),
            (
                0,
                &[1.0, 0.0],
                one,
                format!("k_scale has 0 at 1, {numbers}"),
            ),
            (0, one, &[-1.0], format!("v_scale has -1 at 0, {numbers}")),
            (
                0,
                &[f32::NAN],
                one,
                format!("k_scale has NaN at 0, {numbers}"),
            ),
            (
                0,
                &[f32::INFINITY],
                one,
                format!("k_scale has inf at 0, {numbers}"),
            ),
            (
                0,
                one,
                &[f32::MAX],
                format!("v_scale has {} at 0, {numbers}", f32::MAX),
            ),
            (
                0,
                one,
                &[1e-40],
                format!("v_scale has {} at 0, {numbers}", 1e-40f32),
            ),
        ] {
            let error = cache.set_scales(layer, k, v, Stream::DEFAULT).unwrap_err();
            assert_eq!(error.to_string(), format!("kv_cache_scales_set: {message}"));
        }
        let error = floats.set_scales(0, one, one, Stream::DEFAULT).unwrap_err();
        let message = "kv_cache_scales_set: cache stores f16, scales are of f8e4m3";
        assert_eq!(error.to_string(), message);
        cache.extend(&[(id, 1)], Stream::DEFAULT).unwrap();
        let error = cache.set_scales(0, one, one, Stream::DEFAULT).unwrap_err();
        let message = "kv_cache_scales_set: cache holds tokens: their scales are those that they were \
                       stored with";
        assert_eq!(error.to_string(), message);
        cache.truncate_sequence(id, 0).unwrap();
        cache.set_scales(0, one, one, Stream::DEFAULT).unwrap();
    }
}

/// Through the C ABI the layer's tensors lead to its scales.
#[test]
fn tensors_of_c_have_the_scales() {
    let ctx = Handle::cpu();
    // SAFETY: structs of integers, floats and pointers; the cache is live until it is destroyed.
    unsafe {
        let mut p: unsloth_kv_cache_params = zeroed_params();
        (p.dtype, p.num_layers, p.num_kv_heads, p.head_dim) = (DType::F8E4M3 as u32, 2, 2, 4);
        p.num_pages = 3;
        let mut cache = std::ptr::null_mut();
        let got = unsloth_kv_cache_create(ctx.0, &p, &mut cache);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        let set = |layer, k: *const f32, v: *const f32, n| {
            unsloth_kv_cache_scales_set(cache, layer, k, v, n, std::ptr::null_mut())
        };
        let (k, v) = ([0.5f32, 0.25], [2.0f32, 4.0]);
        assert_eq!(set(1, k.as_ptr(), v.as_ptr(), 2), UNSLOTH_STATUS_SUCCESS);
        let null = std::ptr::null();
        let op = "kv_cache_scales_set";
        for (got, status, message) in [
            (
                set(1, null, v.as_ptr(), 2),
                UNSLOTH_STATUS_NULL_POINTER,
                "k_scale is NULL",
            ),
            (
                set(1, k.as_ptr(), null, 2),
                UNSLOTH_STATUS_NULL_POINTER,
                "v_scale is NULL",
            ),
        ] {
            assert_eq!(got, status, "{message}");
        }
        let got = set(1, k.as_ptr(), v.as_ptr(), 3);
        let message = format!("{op}: num_scales is 3, allowed: 1, or one for each of 2 heads");
        assert_fails(got, UNSLOTH_STATUS_INVALID_ARGUMENT, &message);
        let mut params: unsloth_attention_params = zeroed_params();
        let (mut a, mut b) = (params.k, params.v);
        let got = unsloth_kv_cache_layer_get(cache, 1, &mut a, &mut b);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        assert_eq!(
            unsloth_kv_cache_extend(cache, null.cast(), null.cast(), 0, std::ptr::null_mut()),
            0
        );
        let got = unsloth_kv_cache_attention_prepare(cache, 1, &mut params);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        for (tensor, again, scales) in [(a, params.k, k), (b, params.v, v)] {
            assert_eq!(tensor.quantization, again.quantization);
            let quantization: unsloth_quantization = *tensor.quantization;
            assert_eq!(
                (quantization.scale.rank, quantization.scale.shape[0]),
                (1, 2)
            );
            let found = std::slice::from_raw_parts(quantization.scale.data.cast::<f32>(), 2);
            assert_eq!(found, scales);
        }
        assert_eq!(unsloth_kv_cache_destroy(cache), UNSLOTH_STATUS_SUCCESS);
    }
}
