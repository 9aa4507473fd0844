//! Attention of keys and values that are codes of 8-bit floats with scales, against its definition on what the codes stand for.

use crate::common::attention::{Case, KeyForm, QueryForm, Strides, check, check_results, run};
use crate::common::{FLOATS, TestTensor, contexts, for_each_case, rng};
use unsloth::ops::attention::{self, PageLayout};
use unsloth::{DType, Layout, Stream};

const TOKEN: PageLayout = PageLayout::TokenMajor;
const HEAD: PageLayout = PageLayout::HeadMajor;
const E4M3: Option<DType> = Some(DType::F8E4M3);

fn run_table(cases: &[Case]) {
    for ctx in contexts() {
        for dtype in FLOATS {
            for_each_case(cases, |case| check(&ctx, &mut rng(), dtype, case));
        }
    }
}

fn plain() -> Case {
    Case {
        kv_dtype: E4M3,
        kv_scales: Some(true),
        causal: true,
        ..Case::default()
    }
}

/// Head dimensions that have kernels of their own and others, heads that share key heads, no scales, one and one for each.
#[test]
fn heads_and_head_dims() {
    let mut cases = Vec::new();
    let dims = [
        (64, 64),
        (128, 128),
        (256, 256),
        (24, 40),
        (192, 128),
        (96, 256),
        (5, 3),
        (300, 7),
    ];
    for (i, (dim, dim_v)) in dims.into_iter().enumerate() {
        let (heads, kv_heads) = [(8, 2), (4, 4), (16, 1), (7, 1)][i % 4];
        for (lens, scales) in [
            ((1, 333), Some(true)),
            ((3, 70), Some(false)),
            ((20, 41), None),
            ((1, 1), Some(true)),
        ] {
            cases.push(Case {
                lens: vec![lens; 2],
                heads,
                kv_heads,
                dim,
                dim_v,
                kv_scales: scales,
                ..plain()
            });
        }
    }
    run_table(&cases);
}

/// Batched, padded, packed and paged keys of all lengths, in every order of memory.
#[test]
fn forms_and_strides() {
    let ragged = vec![(7, 20), (1, 33), (0, 4), (5, 0), (21, 40)];
    let decode = vec![(1, 20), (1, 1), (1, 33), (1, 0), (1, 270)];
    let mut cases = Vec::new();
    for (i, strides) in [Strides::Contiguous, Strides::Gaps, Strides::HeadsFirst]
        .into_iter()
        .enumerate()
    {
        for (j, keys) in [
            KeyForm::Padded,
            KeyForm::Packed,
            KeyForm::Paged(1, TOKEN),
            KeyForm::Paged(16, TOKEN),
            KeyForm::Paged(4, HEAD),
            KeyForm::Paged(64, HEAD),
            KeyForm::Paged(256, TOKEN),
        ]
        .into_iter()
        .enumerate()
        {
            let dim = [64, 128, 24][(i + j) % 3];
            for lens in [&ragged, &decode] {
                cases.push(Case {
                    lens: lens.clone(),
                    queries: QueryForm::Packed,
                    keys,
                    strides,
                    dim,
                    dim_v: dim,
                    ..plain()
                });
            }
        }
        cases.push(Case {
            lens: vec![(9, 30); 3],
            strides,
            kv_scales: Some(false),
            ..plain()
        });
    }
    run_table(&cases);
}

/// Windows, caps, sinks, biases, masks, slopes, scales of either sign, f32 results.
#[test]
fn scores() {
    let all = [false; 4];
    let mut cases = Vec::new();
    for (dim, lens) in [
        (64, (1, 300)),
        (128, (2, 150)),
        (256, (1, 90)),
        (40, (17, 40)),
    ] {
        let base = Case {
            lens: vec![lens; 2],
            dim,
            dim_v: dim,
            ..plain()
        };
        let with = |change: &dyn Fn(&mut Case)| {
            let mut case = base.clone();
            change(&mut case);
            case
        };
        cases.extend([
            with(&|c| c.window_left = Some(21)),
            with(&|c| (c.causal, c.window_right) = (false, Some(3))),
            with(&|c| c.softcap = Some(1.5)),
            with(&|c| c.sinks = true),
            with(&|c| c.bias = Some((DType::F32, all))),
            with(&|c| c.mask = Some(all)),
            with(&|c| c.alibi = Some(true)),
            with(&|c| c.scale = Some(-0.2)),
            with(&|c| c.out_f32 = true),
            with(&|c| (c.softcap, c.bias) = (Some(4.0), Some((DType::F16, all)))),
        ]);
    }
    run_table(&cases);
}

/// Queries near both ends of what 16 bits hold beside keys that share it out: f16's range is not left.
#[test]
fn large_and_small_queries() {
    let mut cases = Vec::new();
    for magnitude in [1e-15, 1e-4, 30.0, 2e4] {
        for dim in [64, 128, 256] {
            cases.push(Case {
                lens: vec![(1, 200)],
                magnitude,
                scale: Some((0.1 / magnitude) as f32),
                dim,
                dim_v: dim,
                ..plain()
            });
        }
    }
    for ctx in contexts() {
        for_each_case(&cases, |case| {
            check(&ctx, &mut rng(), DType::Bf16, case);
        });
    }
}

/// Codes at the ends: the greatest, the least, zero of either sign; scales that are powers of two apart.
#[test]
fn extreme_codes() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for (dim, lens) in [(64, (1, 40)), (128, (1, 40)), (24, (3, 9))] {
                let case = Case {
                    lens: vec![lens],
                    dim,
                    dim_v: dim,
                    kv_scales: None,
                    scale: Some(1e-4),
                    ..plain()
                };
                let mut inputs = case.inputs(&mut rng(), dtype);
                let codes = [0x7e, 0xfe, 0x01, 0x81, 0x00, 0x80, 0x08, 0x88, 0x07, 0x38];
                let sequence = &mut inputs.sequences[0];
                for (t, values) in [
                    (&mut inputs.k, &mut sequence.k),
                    (&mut inputs.v, &mut sequence.v),
                ] {
                    let count = t.layout.num_elements();
                    let bits: Vec<u8> = (0..count).map(|i| codes[i * 7 % 10]).collect();
                    t.set_bits(&bits);
                    *values = t.values();
                }
                let (out, lse) = run(&ctx, &case, &inputs);
                check_results(&ctx, dtype, &case, &inputs, &out, &lse);
            }
        }
    }
}

/// A NaN among the keys makes NaN of every row that sees it; one among the values of its component.
#[test]
fn nan_codes_come_through() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for (dim, negative) in [
                (64, false),
                (128, true),
                (256, false),
                (24, true),
                (5, false),
            ] {
                for of_keys in [true, false] {
                    let case = Case {
                        lens: vec![(1, 100)],
                        heads: 4,
                        kv_heads: 2,
                        dim,
                        dim_v: dim,
                        ..plain()
                    };
                    let mut inputs = case.inputs(&mut rng(), dtype);
                    let t = if of_keys {
                        &mut inputs.k
                    } else {
                        &mut inputs.v
                    };
                    let mut bits = t.bits();
                    // Key 37 of the second head, component 3.
                    bits[(37 * 2 + 1) * dim + 3] = if negative { 0xff } else { 0x7f };
                    t.set_bits(&bits);
                    let (out, lse) = run(&ctx, &case, &inputs);
                    for (i, x) in out.values().into_iter().enumerate() {
                        let (head, component) = (i / dim, i % dim);
                        let expected = head >= 2 && (of_keys || component == 3);
                        assert_eq!(x.is_nan(), expected, "{dtype} {dim} {of_keys}: {i} is {x}");
                    }
                    for (head, x) in lse.values().into_iter().enumerate() {
                        assert_eq!(x.is_nan(), of_keys && head >= 2, "{dtype} {dim}: {x}");
                    }
                }
            }
        }
    }
}

/// Scales of 1 are those that are absent, and one is that of every head, to the bit.
#[test]
fn scales_say_the_same_in_every_form() {
    for ctx in contexts() {
        let case = Case {
            lens: vec![(1, 150); 2],
            dim: 128,
            dim_v: 128,
            kv_scales: None,
            ..plain()
        };
        let mut inputs = case.inputs(&mut rng(), DType::Bf16);
        let mut bits = |scales: Option<[TestTensor; 2]>| {
            inputs.kv_scales = scales;
            let (out, lse) = run(&ctx, &case, &inputs);
            (out.bits(), lse.bits())
        };
        let all = |values: &[f64]| TestTensor::of(DType::F32, &[values.len()], values);
        let absent = bits(None);
        assert!(absent == bits(Some([all(&[1.0]), all(&[1.0, 1.0])])));
        let one = bits(Some([all(&[0.5]), all(&[0.75])]));
        assert!(one == bits(Some([all(&[0.5; 2]), all(&[0.75; 2])])));
        assert!(absent != one);
    }
}

/// What is refused, with its message; nothing is written.
#[test]
fn misuse() {
    for ctx in contexts() {
        let upload = |dtype, shape: &[usize]| {
            let layout = Layout::contiguous(shape).unwrap();
            TestTensor::normal(&mut rng(), dtype, layout).upload(&ctx)
        };
        let queries = [DType::Bf16, DType::F8E4M3].map(|dtype| upload(dtype, &[1, 2, 4, 24]));
        let keys = [DType::Bf16, DType::F8E4M3].map(|dtype| upload(dtype, &[1, 9, 2, 24]));
        let scales = [2, 3].map(|count| upload(DType::F32, &[count]));
        let [q, codes_of_q] = queries.each_ref().map(|t| t.view());
        let [floats, codes] = keys.each_ref().map(|t| t.view());
        let [two, three] = scales.each_ref().map(|t| t.view());
        for (q, k, v, message) in [
            (
                codes_of_q,
                codes,
                codes,
                "q has dtype f8e4m3, allowed: f32, f16, bf16",
            ),
            (
                q,
                codes,
                floats,
                "v has dtype bf16, k has f8e4m3: both are f8e4m3, or neither",
            ),
            (
                q,
                floats,
                codes,
                "v has dtype f8e4m3, k has bf16: both are f8e4m3, or neither",
            ),
            (
                q,
                codes.with_scales(three).unwrap(),
                codes,
                "k has 3 scales, allowed: 1, or one for each of its 2 heads",
            ),
            (
                q,
                codes.with_scales(two).unwrap(),
                codes.with_scales(three).unwrap(),
                "v has 3 scales, allowed: 1, or one for each of its 2 heads",
            ),
            (
                q,
                floats,
                floats.with_scales(two).unwrap(),
                "v has scales, which bf16 has not",
            ),
        ] {
            let layout = Layout::contiguous(&[1, 2, 4, 24]).unwrap();
            let mut out = TestTensor::poisoned(DType::Bf16, layout).upload(&ctx);
            let before = out.download().bits();
            let params = attention::Params::new(q, k, v, out.view_mut());
            let error = attention::supported(&ctx, &params).unwrap_err();
            assert_eq!(error.to_string(), format!("attention: {message}"));
            let got = attention::forward(&ctx, &params, Stream::DEFAULT);
            assert_eq!(got, Err(error));
            assert!(out.download().bits() == before);
        }
        let error = codes.with_scales(codes).unwrap_err();
        let message = "tensor: scales has dtype f8e4m3, allowed: f32";
        assert_eq!(error.to_string(), message);
    }
}
