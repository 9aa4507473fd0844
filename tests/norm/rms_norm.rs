//! RMSNorm against its definition: shapes, layouts, dtypes, features, misuse.

use crate::common::contiguous;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close, contexts, reference, rng};
use proptest::prelude::*;
use unsloth::ops::rms_norm::{self, Params};
use unsloth::{Context, DType, InOut, Layout, Stream};

#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    weight: Option<DType>,
    weight_offset: f32,
    residual: bool,
    in_place: bool,
    skew: usize,
}

fn plain(layout: Layout) -> Case {
    Case {
        layout,
        weight: None,
        weight_offset: 0.0,
        residual: false,
        in_place: false,
        skew: 0,
    }
}

fn cases(dtype: DType) -> Vec<Case> {
    let mut cases: Vec<Case> = [
        contiguous(&[1]),
        contiguous(&[1, 1]),
        contiguous(&[3, 7]),
        contiguous(&[5, 64]),
        contiguous(&[2, 3, 129]),
        contiguous(&[2, 2, 3, 80]),
        contiguous(&[1, 5000]),
        contiguous(&[0, 64]),
        contiguous(&[4, 0]),
        strided_rows(&[6, 33], 5),
        transposed(&[2, 3, 4, 16], 1, 2),
    ]
    .into_iter()
    .map(plain)
    .collect();
    // Rows for which a GPU takes more threads each: those of hidden sizes from 64 to 32768, and one
    // vector more and less. An odd number, since several may share a block.
    for power in 6..16 {
        for dim in [(1 << power) - 8, 1 << power, (1 << power) + 8] {
            cases.push(plain(contiguous(&[5, dim])));
        }
    }
    for weight in [DType::F32, dtype] {
        for residual in [false, true] {
            for in_place in [false, true] {
                for layout in [
                    contiguous(&[4, 96]),
                    contiguous(&[3, 4096]),
                    strided_rows(&[3, 2, 31], 1),
                ] {
                    cases.push(Case {
                        layout,
                        weight: Some(weight),
                        weight_offset: if residual { 1.0 } else { 0.0 },
                        residual,
                        in_place,
                        skew: usize::from(in_place),
                    });
                }
            }
        }
    }
    cases
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let epsilon = 1e-5;
    let dim = *case.layout.shape().last().unwrap();
    let skewed = |rng: &mut _| {
        let mut t = TestTensor::poisoned_at(dtype, case.layout, case.skew);
        t.set_values(&TestTensor::normal(rng, dtype, case.layout).values());
        t
    };
    let x = skewed(rng);
    let residual = case.residual.then(|| skewed(rng));
    let gains = Layout::contiguous(&[dim]).unwrap();
    let weight = case.weight.map(|d| TestTensor::normal(rng, d, gains));
    let (expected, sum) = reference::rms_norm::rms_norm(
        &x.values(),
        residual.as_ref().map(TestTensor::values).as_deref(),
        weight.as_ref().map(TestTensor::values).as_deref(),
        case.weight_offset.into(),
        f64::from(epsilon as f32),
        dim,
    );

    let output = || TestTensor::poisoned_at(dtype, case.layout, case.skew).upload(ctx);
    let (mut dx, mut dout) = (x.upload(ctx), output());
    let (mut dr, mut dsum) = (residual.as_ref().map(|r| r.upload(ctx)), output());
    let dw = weight.as_ref().map(|w| w.upload(ctx));
    let params = Params {
        x: match case.in_place {
            true => InOut::InPlace(dx.view_mut()),
            false => InOut::Apart {
                input: dx.view(),
                output: dout.view_mut(),
            },
        },
        residual: dr.as_mut().map(|r| match case.in_place {
            true => InOut::InPlace(r.view_mut()),
            false => InOut::Apart {
                input: r.view(),
                output: dsum.view_mut(),
            },
        }),
        weight: dw.as_ref().map(|w| w.view()),
        weight_offset: case.weight_offset,
        epsilon: epsilon as f32,
    };
    rms_norm::supported(ctx, &params).unwrap();
    rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();

    let out = if case.in_place {
        dx.download_output()
    } else {
        dout.download_output()
    };
    // A mean of `dim` squares in 16 partial sums, a square root, a division and two products.
    let ulps = 8.0 + dim as f64 / 16.0;
    assert_close("out", dtype, &out.values(), &expected, ulps);
    if let Some(dr) = dr {
        let out = if case.in_place {
            dr.download_output()
        } else {
            dsum.download_output()
        };
        assert_close("residual_out", dtype, &out.values(), &sum, 1.0);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(dtype), |case| check(&ctx, dtype, case));
        }
    }
}

/// Few rows and many may be shared out differently; a row's bits do not depend on it.
#[test]
fn a_row_is_the_same_alone_as_among_many() {
    const FEW: usize = 13;
    let rng = &mut rng();
    // The fewer vectors a row has, the more rows it takes to fill a GPU.
    let shapes = [
        (40_001, 64),
        (3000, 1000),
        (1500, 2048),
        (800, 4096),
        (500, 8192),
    ];
    for ctx in contexts() {
        for (dtype, per_vector) in [(DType::Bf16, 1), (DType::F32, 2)] {
            for (num_rows, dim) in shapes.map(|(rows, dim)| (rows, dim / per_vector)) {
                for residual in [false, true] {
                    let few = TestTensor::normal(rng, dtype, contiguous(&[FEW, dim])).values();
                    let gains = TestTensor::normal(rng, dtype, contiguous(&[dim]));
                    let weight = gains.upload(&ctx);
                    let normalised = |rows: usize| {
                        let values: Vec<f64> =
                            few.iter().copied().cycle().take(rows * dim).collect();
                        let mut x = TestTensor::of(dtype, &[rows, dim], &values).upload(&ctx);
                        let mut added = TestTensor::of(dtype, &[rows, dim], &values).upload(&ctx);
                        let params = Params {
                            x: InOut::InPlace(x.view_mut()),
                            residual: residual.then(|| InOut::InPlace(added.view_mut())),
                            weight: Some(weight.view()),
                            weight_offset: 0.0,
                            epsilon: 1e-6,
                        };
                        rms_norm::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                        x.download_output().values()
                    };
                    let alone = normalised(FEW);
                    let among = normalised(num_rows);
                    for (i, row) in among.chunks(dim).enumerate() {
                        let at = i % FEW * dim;
                        assert!(
                            row == &alone[at..at + dim],
                            "{dtype}, row {i} of {num_rows} of {dim}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn zero_rows_stay_zero() {
    for ctx in contexts() {
        let x = TestTensor::of(DType::F32, &[1, 4], &[0.0; 4]).upload(&ctx);
        let mut out = TestTensor::poisoned(DType::F32, x.layout).upload(&ctx);
        let params = Params {
            x: InOut::Apart {
                input: x.view(),
                output: out.view_mut(),
            },
            residual: None,
            weight: None,
            weight_offset: 0.0,
            epsilon: 1e-6,
        };
        rms_norm::forward(&ctx, &params, Stream::DEFAULT).unwrap();
        assert_eq!(out.download_output().values(), [0.0; 4]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Without epsilon, scaling a row does not change its normalised form.
    #[test]
    fn scale_invariant(row in prop::collection::vec(0.5f32..2.0, 1..200), exponent in -8i32..8) {
        for ctx in contexts() {
            let norm = |factor: f32| {
                let values: Vec<f64> = row.iter().map(|x| f64::from(x * factor)).collect();
                let mut x = TestTensor::of(DType::F32, &[1, row.len()], &values).upload(&ctx);
                let params = Params {
                    x: InOut::InPlace(x.view_mut()),
                    residual: None,
                    weight: None,
                    weight_offset: 0.0,
                    epsilon: f32::MIN_POSITIVE,
                };
                rms_norm::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                x.download_output().bits()
            };
            // A power of two scales every intermediate exactly.
            prop_assert_eq!(norm(1.0), norm(f32::powi(4.0, exponent)));
        }
    }
}
