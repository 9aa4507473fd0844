//! RoPE against its definition: styles, positions, angles, layouts, dtypes; its properties.

mod properties;

use crate::common::contiguous;
use crate::common::reference::rope::{Shape, rope as exact, rope_f32 as plain};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule, contexts, in_out, rng, rounded,
};
use unsloth::ops::rope::{
    self, Angles, Params, Positions, Rotation, Scaling, Style, inverse_frequencies,
};
use unsloth::{Context, DType, InOut, Layout, Stream};

#[derive(Clone, Debug)]
enum Where {
    From(i64),
    /// Given per token, in a tensor of this dtype and layout.
    Tensor(DType, Layout),
}

#[derive(Clone, Debug)]
enum Source {
    Computed {
        theta: f32,
        scaling: Scaling,
        attention_factor: f32,
    },
    Factors,
    Table {
        gap: usize,
    },
}

#[derive(Clone, Debug)]
struct Case {
    q: Option<Layout>,
    k: Option<Layout>,
    style: Style,
    rotary_dim: usize,
    positions: Where,
    source: Source,
    inverse: bool,
    in_place: bool,
    skew: usize,
}

const PLAIN: Source = Source::Computed {
    theta: 0.0,
    scaling: Scaling::None,
    attention_factor: 0.0,
};

const SCALINGS: [Scaling; 6] = [
    Scaling::Linear { factor: 4.0 },
    Scaling::Ntk { factor: 8.0 },
    Scaling::Yarn {
        factor: 4.0,
        original_max_positions: 32768,
        beta_fast: 0.0,
        beta_slow: 0.0,
        extrapolation_factor: 0.0,
        fractional_ramp: false,
    },
    Scaling::Yarn {
        factor: 32.0,
        original_max_positions: 4096,
        beta_fast: 24.0,
        beta_slow: 2.0,
        extrapolation_factor: 0.5,
        fractional_ramp: true,
    },
    Scaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    },
    Scaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    },
];

fn cases() -> Vec<Case> {
    let base = Case {
        q: Some(contiguous(&[2, 3, 4, 16])),
        k: Some(contiguous(&[2, 3, 2, 16])),
        style: Style::HalfSplit,
        rotary_dim: 0,
        positions: Where::From(0),
        source: PLAIN,
        inverse: false,
        in_place: false,
        skew: 0,
    };
    let mut cases = Vec::new();
    let both = |case: Case, cases: &mut Vec<Case>| {
        for style in [Style::HalfSplit, Style::Interleaved] {
            cases.push(Case {
                style,
                ..case.clone()
            });
        }
    };
    both(base.clone(), &mut cases);
    for q in [
        contiguous(&[1, 1, 2]),
        contiguous(&[5, 3, 2]),
        contiguous(&[0, 3, 8]),
        contiguous(&[7, 0, 8]),
        contiguous(&[1, 1, 1, 512]),
        contiguous(&[2, 0, 1, 8]),
        contiguous(&[70, 9, 64]),
        strided_rows(&[3, 5, 18], 3),
        transposed(&[2, 5, 3, 20], 1, 2),
    ] {
        both(
            Case {
                q: Some(q),
                k: None,
                positions: Where::From(77),
                ..base.clone()
            },
            &mut cases,
        );
    }
    let swapped = Case {
        q: None,
        k: base.q,
        in_place: true,
        skew: 1,
        ..base.clone()
    };
    both(swapped, &mut cases);
    for rotary_dim in [2, 6, 14, 16] {
        for in_place in [false, true] {
            both(
                Case {
                    rotary_dim,
                    in_place,
                    ..base.clone()
                },
                &mut cases,
            );
        }
    }
    for positions in [
        Where::From(-5),
        Where::From(131_071),
        Where::From(1 << 40),
        Where::Tensor(DType::I32, contiguous(&[2, 3])),
        Where::Tensor(DType::I64, contiguous(&[2, 3])),
        Where::Tensor(DType::I64, Layout::strided(&[2, 3], &[0, 1]).unwrap()),
        Where::Tensor(DType::I32, Layout::strided(&[2, 3], &[1, 2]).unwrap()),
    ] {
        for source in [PLAIN, Source::Table { gap: 0 }] {
            let table = matches!(source, Source::Table { .. });
            let outside = matches!(positions, Where::From(n) if !(0..1 << 20).contains(&n));
            if table && outside {
                continue;
            }
            both(
                Case {
                    positions: positions.clone(),
                    source,
                    ..base.clone()
                },
                &mut cases,
            );
        }
    }
    for scaling in SCALINGS {
        let source = Source::Computed {
            theta: 500_000.0,
            scaling,
            attention_factor: 0.0,
        };
        both(
            Case {
                source,
                positions: Where::From(9000),
                ..base.clone()
            },
            &mut cases,
        );
    }
    let source = Source::Computed {
        theta: 1e6,
        scaling: SCALINGS[2],
        attention_factor: 1.25,
    };
    both(
        Case {
            source,
            ..base.clone()
        },
        &mut cases,
    );
    for source in [Source::Factors, Source::Table { gap: 3 }] {
        for inverse in [false, true] {
            both(
                Case {
                    source: source.clone(),
                    inverse,
                    rotary_dim: 10,
                    ..base.clone()
                },
                &mut cases,
            );
        }
    }
    cases
}

/// A tensor of the context that must outlive the call's parameters.
struct Inputs {
    x: [Option<TestTensor>; 2],
    device: [Option<(DeviceTensor, DeviceTensor)>; 2],
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let skewed = |rng: &mut _, layout| {
        let mut t = TestTensor::poisoned_at(dtype, layout, case.skew);
        t.set_values(&TestTensor::normal(rng, dtype, layout).values());
        t
    };
    let x = [case.q, case.k].map(|layout| layout.map(|l| skewed(rng, l)));
    let device = x.each_ref().map(|x| {
        let x = x.as_ref()?;
        let out = TestTensor::poisoned_at(dtype, x.layout, case.skew);
        Some((x.upload(ctx), out.upload(ctx)))
    });
    let mut inputs = Inputs { x, device };

    let layout = case.q.or(case.k).unwrap();
    let (tokens, head_dim) = (
        &layout.shape()[..layout.rank() - 2],
        layout.dim(layout.rank() - 1),
    );
    let count: usize = tokens.iter().product();
    let rotary_dim = if case.rotary_dim == 0 {
        head_dim
    } else {
        case.rotary_dim
    };
    let half = rotary_dim / 2;
    let (position_tensor, positions) = match &case.positions {
        Where::From(offset) => {
            let seq = *tokens.last().unwrap();
            (
                None,
                (0..count)
                    .map(|i| offset + (i % seq) as i64)
                    .collect::<Vec<_>>(),
            )
        }
        Where::Tensor(dtype, layout) => {
            let tensor = TestTensor::integers(rng, *dtype, *layout, 5000);
            let values = tensor.values().iter().map(|v| *v as i64).collect();
            (Some(tensor.upload(ctx)), values)
        }
    };

    // Angles as the operation defines them: f32 products of f32 frequencies, or the table's.
    let mut factors = None;
    let mut tables = None;
    let mut scale = 1.0;
    let angles: Vec<f64> = match &case.source {
        Source::Table { gap } => {
            let rows = positions.iter().max().map_or(1, |p| p + 1) as usize;
            let layout = strided_rows(&[rows, half], *gap);
            let angles = TestTensor::normal(rng, DType::F32, layout).values();
            let table = |f: fn(f64) -> f64| {
                let values: Vec<f64> = angles.iter().map(|a| f(*a)).collect();
                TestTensor::from_values(DType::F32, layout, &values).upload(ctx)
            };
            tables = Some((table(f64::cos), table(f64::sin)));
            let row = |p: &i64| angles[*p as usize * half..][..half].to_vec();
            positions.iter().flat_map(row).collect()
        }
        Source::Factors => {
            let values: Vec<f64> = (0..half).map(|i| 1.0 + i as f64).collect();
            let tensor = TestTensor::of(DType::F32, &[half], &values);
            let (frequencies, _) = inverse_frequencies(0.0, Scaling::None, rotary_dim).unwrap();
            let frequencies = frequencies.iter().zip(&values).map(|(f, v)| f / *v as f32);
            factors = Some(tensor.upload(ctx));
            products(&positions, &frequencies.collect::<Vec<_>>())
        }
        Source::Computed {
            theta,
            scaling,
            attention_factor,
        } => {
            let (frequencies, own) = inverse_frequencies(*theta, *scaling, rotary_dim).unwrap();
            scale = f64::from(if *attention_factor == 0.0 {
                own
            } else {
                *attention_factor
            });
            products(&positions, &frequencies)
        }
    };
    let angles: Vec<f64> = match case.inverse {
        true => angles.iter().map(|a| -a).collect(),
        false => angles,
    };

    let [q, k] = inputs.device.each_mut().map(|pair| {
        let (x, out) = pair.as_mut()?;
        Some(in_out(case.in_place, x, out))
    });
    let params = Params {
        q,
        k,
        positions: match (&case.positions, &position_tensor) {
            (Where::From(offset), _) => Positions::From(*offset),
            (_, Some(tensor)) => Positions::PerToken(tensor.view()),
            _ => unreachable!(),
        },
        rotation: Rotation {
            style: case.style,
            rotary_dim: case.rotary_dim,
            angles: match (&case.source, &tables) {
                (_, Some((cos, sin))) => Angles::Table {
                    cos: cos.view(),
                    sin: sin.view(),
                },
                (
                    Source::Computed {
                        theta,
                        scaling,
                        attention_factor,
                    },
                    _,
                ) => Angles::Computed {
                    theta: *theta,
                    scaling: *scaling,
                    freq_factors: None,
                    attention_factor: *attention_factor,
                },
                _ => Angles::Computed {
                    theta: 0.0,
                    scaling: Scaling::None,
                    freq_factors: factors.as_ref().map(|f| f.view()),
                    attention_factor: 0.0,
                },
            },
        },
        inverse: case.inverse,
    };
    rope::supported(ctx, &params).unwrap();
    rope::forward(ctx, &params, Stream::DEFAULT).unwrap();

    for ((name, x), device) in ["q", "k"].iter().zip(&inputs.x).zip(&inputs.device) {
        let (Some(x), Some((device_x, device_out))) = (x, device) else {
            continue;
        };
        let out = if case.in_place { device_x } else { device_out };
        let shape = Shape {
            heads: x.layout.dim(x.layout.rank() - 2),
            head_dim,
            rotary_dim,
            interleaved: case.style == Style::Interleaved,
        };
        let values = x.values();
        let expected = exact(&values, shape, &angles, scale);
        let plain = rounded(dtype, &plain(&values, shape, &angles, scale));
        assert_flash_rule(
            name,
            dtype,
            &out.download_output().values(),
            &expected,
            &plain,
        );
    }
}

fn products(positions: &[i64], frequencies: &[f32]) -> Vec<f64> {
    let product = |p: &i64| {
        let p = *p as f32;
        frequencies.iter().map(move |f| f64::from(p * f))
    };
    positions.iter().flat_map(product).collect()
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

#[test]
fn frequencies_are_those_of_the_models() {
    for theta in [10_000.0f32, 500_000.0, 1e6] {
        for rotary_dim in [2, 32, 64, 128] {
            for scaling in [Scaling::None].into_iter().chain(SCALINGS) {
                if rotary_dim == 2 && matches!(scaling, Scaling::Ntk { .. }) {
                    continue; // its exponent is not defined there
                }
                let (actual, factor) = inverse_frequencies(theta, scaling, rotary_dim).unwrap();
                let (expected, expected_factor) =
                    crate::common::reference::rope::inverse_frequencies(
                        f64::from(theta),
                        scaling,
                        rotary_dim,
                    );
                assert_eq!(factor, expected_factor as f32);
                assert_eq!(actual.len(), expected.len());
                for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
                    // The exponent -2i/d is rounded to f32 before the power, so the error grows
                    // with ln(theta); where a scaling blends a frequency with its fraction, the
                    // blend's weights are rounded too.
                    let unscaled = f64::from(theta).powf(-2.0 * i as f64 / rotary_dim as f64);
                    let bound = 1e-6 * e + f64::from(f32::EPSILON) * unscaled;
                    assert!(
                        (f64::from(*a) - e).abs() < bound,
                        "{scaling:?} {theta} {rotary_dim} [{i}]: {a} and {e}"
                    );
                }
            }
        }
    }
}

/// gpt-oss's: what a ramp with fractional ends gives differs from the truth by roundings of f32 alone.
#[test]
fn a_fractional_ramp_is_exact() {
    let scaling = Scaling::Yarn {
        factor: 32.0,
        original_max_positions: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        extrapolation_factor: 0.0,
        fractional_ramp: true,
    };
    let (actual, _) = inverse_frequencies(150_000.0, scaling, 64).unwrap();
    let (expected, _) = crate::common::reference::rope::inverse_frequencies(150_000.0, scaling, 64);
    for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
        let error = (f64::from(*a) - e).abs() / e;
        assert!(error < 3e-7, "[{i}]: {a} and {e} differ by {error:e}");
    }
}

/// The ramp is placed by the logarithm of the base: there is none for 1, and below 1 it runs backwards.
#[test]
fn yarn_needs_a_base_above_one() {
    for theta in [1.0, 0.5] {
        let error = inverse_frequencies(theta, SCALINGS[2], 64).unwrap_err();
        let message = format!("rope: theta is {theta}, YaRN needs a base above 1");
        assert_eq!(error.to_string(), message);
        assert!(inverse_frequencies(theta, SCALINGS[0], 64).is_ok());
    }
}

#[test]
fn parts_of_a_packed_projection_rotate_in_place() {
    let (tokens, heads, kv_heads, dim) = (5, 4, 2, 8);
    let width = (heads + 2 * kv_heads) * dim;
    for ctx in contexts() {
        let qkv = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[tokens, width]));
        let device = qkv.upload(&ctx);
        let part = |start: usize, n: usize| {
            let layout = Layout::strided(&[tokens, n, dim], &[width, dim, 1]).unwrap();
            let ptr = device.data().cast::<f32>().wrapping_add(start * dim);
            // SAFETY: the part lies inside the tensor uploaded above; parts do not share elements.
            unsafe { unsloth::TensorMut::from_raw(ptr.cast(), DType::F32, layout) }
        };
        let params = Params {
            q: Some(InOut::InPlace(part(0, heads))),
            k: Some(InOut::InPlace(part(heads, kv_heads))),
            ..Params::default()
        };
        rope::forward(&ctx, &params, Stream::DEFAULT).unwrap();
        let shape = Shape {
            heads: heads + 2 * kv_heads,
            head_dim: dim,
            rotary_dim: dim,
            interleaved: false,
        };
        let (frequencies, _) = inverse_frequencies(0.0, Scaling::None, dim).unwrap();
        let positions: Vec<i64> = (0..tokens as i64).collect();
        let values = qkv.values();
        let angles = products(&positions, &frequencies);
        let mut expected = exact(&values, shape, &angles, 1.0);
        let mut plain = plain(&values, shape, &angles, 1.0);
        let v = (heads + kv_heads) * dim;
        for token in 0..tokens {
            let part = token * width + v..(token + 1) * width;
            expected[part.clone()].copy_from_slice(&values[part.clone()]);
            plain[part.clone()].copy_from_slice(&values[part]);
        }
        let out = device.download_output().values();
        assert_flash_rule("qkv", DType::F32, &out, &expected, &plain);
    }
}
