//! Argmax against its definition: shapes, layouts, dtypes, equal elements, NaN.

use crate::common::contiguous;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, contexts, rng};
use proptest::prelude::*;
use rand::Rng;
use unsloth::ops::argmax::{self, Params};
use unsloth::{Context, DType, Layout, Stream};

#[derive(Clone, Debug)]
struct Case {
    x: Layout,
    out: Layout,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [
        &[1][..],
        &[33],
        &[4, 1],
        &[3, 7],
        &[0, 8],
        &[5, 1024],
        &[2, 5000],
        &[2, 3, 2, 2, 2, 50],
        &[300, 40],
        &[2, 70_001],
        &[1, 128_256],
        &[3, 32_000],
    ] {
        let leading = match shape {
            [_] => &[1],
            [leading @ .., _] => leading,
            [] => unreachable!(),
        };
        for skew in [0, 1] {
            cases.push(Case {
                x: contiguous(shape),
                out: contiguous(leading),
                skew,
            });
        }
    }
    for (x, out) in [
        (strided_rows(&[5, 600], 3), contiguous(&[5])),
        (
            strided_rows(&[5, 600], 8),
            Layout::strided(&[5], &[3]).unwrap(),
        ),
        (transposed(&[3, 4, 40], 0, 1), contiguous(&[3, 4])),
        (
            contiguous(&[3, 4, 40]),
            transposed(&[3, 4, 1], 0, 1).narrowed(2, 0, 1).unwrap().0,
        ),
    ] {
        let out = match out.rank() {
            3 => Layout::strided(&[3, 4], &out.strides()[..2]).unwrap(),
            _ => out,
        };
        cases.push(Case { x, out, skew: 0 });
    }
    cases
}

fn run(ctx: &Context, x: &TestTensor, to: DType, out: Layout) -> Vec<f64> {
    let device = x.upload(ctx);
    let mut out = TestTensor::poisoned(to, out).upload(ctx);
    let params = Params {
        x: device.view(),
        out: out.view_mut(),
    };
    argmax::supported(ctx, &params).unwrap();
    argmax::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output().values()
}

/// The first element that none is greater than, NaN being greater than all others.
fn reference(row: &[f64]) -> f64 {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] || (x.is_nan() && !row[best].is_nan()) {
            best = i;
        }
    }
    best as f64
}

fn references(x: &TestTensor) -> Vec<f64> {
    let shape = x.layout.shape();
    x.values()
        .chunks(shape[shape.len() - 1])
        .map(reference)
        .collect()
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for to in [DType::I32, DType::I64] {
                crate::common::for_each_case(&cases(), |case| {
                    let rng = &mut rng();
                    let mut x = TestTensor::poisoned_at(dtype, case.x, case.skew);
                    x.set_values(&TestTensor::normal(rng, dtype, case.x).values());
                    assert_eq!(run(&ctx, &x, to, case.out), references(&x));
                });
            }
        }
    }
}

/// Few distinct values, so that the greatest is there many times; infinities, zeros of both signs
/// and NaN.
#[test]
fn the_first_of_equals_counts() {
    const VALUES: [f64; 10] = [
        f64::NEG_INFINITY,
        -2.0,
        -1e-7,
        -0.0,
        0.0,
        1e-7,
        3.0,
        f64::INFINITY,
        f64::NAN,
        -f64::NAN,
    ];
    let rng = &mut rng();
    for ctx in contexts() {
        for dtype in FLOATS {
            for n in [1, 2, 5, 31, 300, 3000] {
                // The rows differ in the greatest value they have.
                let values: Vec<f64> = (1..=VALUES.len())
                    .flat_map(|kinds| {
                        (0..n)
                            .map(|_| VALUES[rng.random_range(0..kinds)])
                            .collect::<Vec<_>>()
                    })
                    .collect();
                let x = TestTensor::of(dtype, &[VALUES.len(), n], &values);
                let found = run(&ctx, &x, DType::I64, contiguous(&[VALUES.len()]));
                assert_eq!(found, references(&x), "{dtype} {n}");
            }
        }
    }
}

/// Blocks that share a row settle it in the output, whatever it held: the right index, another one
/// of the row, or none.
#[test]
fn what_the_output_held_does_not_matter() {
    const N: usize = 100_000;
    let rng = &mut rng();
    for ctx in contexts() {
        for dtype in FLOATS {
            let x = TestTensor::normal(rng, dtype, contiguous(&[2, N]));
            let expected = references(&x);
            for to in [DType::I32, DType::I64] {
                let mut held = vec![
                    0.0,
                    (N - 1) as f64,
                    N as f64,
                    -1.0,
                    -2_147_483_648.0,
                    2_147_483_647.0,
                    expected[0],
                    expected[1],
                ];
                if to == DType::I64 {
                    // The right index in the lower half.
                    held.push(expected[0] + 7.0 * 4_294_967_296.0);
                }
                let device = x.upload(&ctx);
                for value in held {
                    let mut out = TestTensor::of(to, &[2], &[value; 2]).upload(&ctx);
                    let params = Params {
                        x: device.view(),
                        out: out.view_mut(),
                    };
                    argmax::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                    assert_eq!(out.download_output().values(), expected, "{dtype} {value}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Wherever a single greatest element is put, it is found.
    #[test]
    fn a_peak_is_found(n in 1usize..6000, at in any::<prop::sample::Index>(), seed in any::<u64>()) {
        use rand::SeedableRng;
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        let mut values: Vec<f64> = (0..n).map(|_| rng.random_range(-4.0..4.0)).collect();
        let at = at.index(n);
        values[at] = 5.0;
        for ctx in contexts() {
            for dtype in FLOATS {
                let x = TestTensor::of(dtype, &[1, n], &values);
                prop_assert_eq!(run(&ctx, &x, DType::I32, contiguous(&[1])), [at as f64]);
            }
        }
    }
}
