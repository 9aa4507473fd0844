//! Linear layers against their definition: shapes, layouts, dtypes, bias and residual; their
//! properties.

use crate::common::contiguous;
use crate::common::reference::linear::{linear as exact, linear_f32 as plain};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{
    FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, in_out, rng, rounded,
};
use proptest::prelude::*;
use unsloth::ops::linear::{self, Output, Params, Weights};
use unsloth::{Context, ContextOptions, DType, Layout, Stream, Workspace};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Residual {
    None,
    Apart,
    Accumulate,
}

/// A workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lent {
    Nothing,
    LessThanUseful,
    Useful,
}

#[derive(Clone, Debug)]
struct Case {
    x: Layout,
    weight: Layout,
    out: Layout,
    bias: bool,
    residual: Residual,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let case = |leading: &[usize], (n, k): (usize, usize)| {
        let shape = |last| [leading, &[last]].concat();
        Case {
            x: contiguous(&shape(k)),
            weight: contiguous(&[n, k]),
            out: contiguous(&shape(n)),
            bias: false,
            residual: Residual::None,
            skew: 0,
        }
    };
    let mut cases = Vec::new();
    // On both sides of the switch from dot products to tiles, around vector widths, and beyond one
    // tile in each direction.
    for rows in [1, 2, 3, 4, 5, 8, 9, 32, 33, 64] {
        for size in [(1, 1), (3, 5), (33, 31), (64, 128), (130, 700)] {
            cases.push(case(&[rows], size));
        }
    }
    for (leading, size) in [
        (&[][..], (7, 12)),
        (&[2, 3, 2], (9, 40)),
        (&[2, 3, 1, 2, 5], (9, 40)),
        (&[600], (140, 33)),
        (&[10], (300, 1100)),
        (&[0], (5, 3)),
        (&[3], (0, 4)),
        (&[3], (4, 0)),
        (&[20], (4, 0)),
    ] {
        cases.push(case(leading, size));
    }
    // Tiles of nothing, after one to which bias has been added.
    cases.push(Case {
        bias: true,
        ..case(&[1100], (140, 0))
    });
    for rows in [1, 3, 20] {
        let base = case(&[rows], (50, 70));
        for residual in [Residual::None, Residual::Apart, Residual::Accumulate] {
            cases.push(Case {
                bias: true,
                residual,
                skew: 1,
                ..base.clone()
            });
            cases.push(Case {
                residual,
                x: strided_rows(&[rows, 70], 3),
                weight: strided_rows(&[50, 70], 5),
                out: strided_rows(&[rows, 50], 2),
                ..base.clone()
            });
        }
        cases.push(Case {
            x: transposed(&[rows, 4, 70], 0, 1),
            out: transposed(&[rows, 4, 50], 0, 1),
            bias: true,
            ..base
        });
    }
    cases
}

/// With dtypes of `x`, of the weight, and of output and residual.
fn check(ctx: &Context, [dtype, weight_dtype, out_dtype]: [DType; 3], case: &Case) {
    let rng = &mut rng();
    let skewed = |rng: &mut _, dtype, layout: Layout| {
        let mut t = TestTensor::poisoned_at(dtype, layout, case.skew);
        t.set_values(&TestTensor::normal(rng, dtype, layout).values());
        t
    };
    let (n, k) = (case.weight.dim(0), case.weight.dim(1));
    let x = skewed(rng, dtype, case.x);
    let weight = skewed(rng, weight_dtype, case.weight);
    let bias = case
        .bias
        .then(|| skewed(rng, weight_dtype, contiguous(&[n])));
    let residual = (case.residual != Residual::None).then(|| skewed(rng, out_dtype, case.out));

    let (dx, dw) = (x.upload(ctx), weight.upload(ctx));
    let db = bias.as_ref().map(|b| b.upload(ctx));
    let accumulate = case.residual == Residual::Accumulate;
    let run = |lent: Lent| {
        let mut dr = residual.as_ref().map(|r| r.upload(ctx));
        let mut out = TestTensor::poisoned_at(out_dtype, case.out, case.skew).upload(ctx);
        let mut params = Params {
            x_norm: None,
            parallel: None,
            x: dx.view(),
            weights: Weights {
                weight: dw.view(),
                bias: db.as_ref().map(|b| b.view()),
            },
            output: match &mut dr {
                None => Output::Write(out.view_mut()),
                Some(r) => Output::Add(in_out(accumulate, r, &mut out)),
            },
            workspace: Workspace::none(),
        };
        linear::supported(ctx, &params).unwrap();
        let size = linear::workspace_size(ctx, &params).unwrap();
        let size = match lent {
            Lent::Nothing => 0,
            Lent::LessThanUseful => size.saturating_sub(1),
            Lent::Useful => size,
        };
        // Up to three bytes too long.
        let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
        // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else
        // uses.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
        linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
        let touched = memory.download_output();
        if lent != Lent::Useful {
            let untouched = TestTensor::poisoned(DType::F32, touched.layout);
            assert!(touched.bits() == untouched.bits(), "{lent:?}");
        }
        let out = if accumulate { dr.unwrap_or(out) } else { out };
        (out.download_output().values(), size)
    };

    let (bias, residual) = (
        bias.as_ref().map(|b| b.values()),
        residual.as_ref().map(|r| r.values()),
    );
    let (x, weight) = (x.values(), weight.values());
    let sizes = (case.x.num_rows(), k, n);
    let (bias, residual) = (bias.as_deref(), residual.as_deref());
    let expected = exact(&x, &weight, sizes, bias, residual);
    let plain = rounded(out_dtype, &plain(&x, &weight, sizes, bias, residual));
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let terms = exact(
        &magnitudes(&x),
        &magnitudes(&weight),
        sizes,
        bias.map(magnitudes).as_deref(),
        residual.map(magnitudes).as_deref(),
    );
    let most = terms.into_iter().fold(0.0, f64::max);
    let (without, _) = run(Lent::Nothing);
    assert_flash_rule_of_sums("out", out_dtype, &without, &expected, &plain, most);
    let (with, size) = run(Lent::Useful);
    if size > 0 {
        assert_flash_rule_of_sums("out", out_dtype, &with, &expected, &plain, most);
        assert!(run(Lent::LessThanUseful).0 == without);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for weight_dtype in FLOATS {
                crate::common::for_each_case(&cases(), |case| {
                    check(&ctx, [dtype, weight_dtype, dtype], case)
                });
            }
        }
    }
}

/// Which a GPU's kernels for few rows part among blocks, the last of which has less.
#[test]
fn rows_may_be_longer_than_a_block_has_room_for() {
    for ctx in contexts() {
        for dtype in [DType::F16, DType::Bf16] {
            for (rows, n, k) in [(4, 72, 14600), (8, 80, 13112)] {
                let case = Case {
                    x: contiguous(&[rows, k]),
                    weight: contiguous(&[n, k]),
                    out: contiguous(&[rows, n]),
                    bias: true,
                    residual: Residual::None,
                    skew: 0,
                };
                check(&ctx, [dtype; 3], &case);
            }
        }
    }
}

#[test]
fn outputs_may_be_f32() {
    for ctx in contexts() {
        for dtypes in [
            [DType::F16, DType::F16, DType::F32],
            [DType::Bf16, DType::Bf16, DType::F32],
            [DType::Bf16, DType::F32, DType::F32],
            [DType::F16, DType::Bf16, DType::F32],
        ] {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtypes, case));
        }
    }
}

/// `x Wᵀ` through the operation.
fn product(ctx: &Context, x: &TestTensor, weight: &TestTensor) -> TestTensor {
    let rows = x.layout.dim(0);
    let layout = contiguous(&[rows, weight.layout.dim(0)]);
    let (dx, dw) = (x.upload(ctx), weight.upload(ctx));
    let mut out = TestTensor::poisoned(x.dtype, layout).upload(ctx);
    let params = Params {
        x_norm: None,
        parallel: None,
        x: dx.view(),
        weights: Weights {
            weight: dw.view(),
            bias: None,
        },
        output: Output::Write(out.view_mut()),
        workspace: Workspace::none(),
    };
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let contexts = [1, 2, 5].map(|num_threads| {
        Context::new(&ContextOptions {
            num_threads,
            ..ContextOptions::default()
        })
        .unwrap()
    });
    for dtype in FLOATS {
        for weight_dtype in FLOATS {
            for rows in [1, 4, 8, 150, 700] {
                let rng = &mut rng();
                let x = TestTensor::normal(rng, dtype, contiguous(&[rows, 600]));
                let weight = TestTensor::normal(rng, weight_dtype, contiguous(&[300, 600]));
                let [one, two, five] = contexts
                    .each_ref()
                    .map(|ctx| product(ctx, &x, &weight).bits());
                assert!(one == two && one == five, "{dtype} {weight_dtype} {rows}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// On small integers, where f32 is exact, the operation is linear to the bit.
    #[test]
    fn is_linear(
        (rows, n, k) in (1usize..40, 1usize..80, 1usize..200),
        factor in -4i32..5,
        seed in any::<u64>(),
    ) {
        use rand::{Rng, SeedableRng};
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        for ctx in contexts() {
            let mut integers = |shape: [usize; 2]| -> Vec<f64> {
                (0..shape[0] * shape[1]).map(|_| f64::from(rng.random_range(-8i32..9))).collect()
            };
            let (a, b) = (integers([rows, k]), integers([rows, k]));
            let weight = TestTensor::of(DType::Bf16, &[n, k], &integers([n, k]));
            let tensor = |values: &[f64]| TestTensor::of(DType::F32, &[rows, k], values);
            let sum: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + f64::from(factor) * b).collect();
            let whole = product(&ctx, &tensor(&sum), &weight).values();
            let parts = (product(&ctx, &tensor(&a), &weight), product(&ctx, &tensor(&b), &weight));
            let together: Vec<f64> = parts.0.values().iter().zip(parts.1.values())
                .map(|(a, b)| a + f64::from(factor) * b)
                .collect();
            prop_assert_eq!(whole, together);
        }
    }

    /// A row's result does not depend on how many rows stand beside it, on integers.
    #[test]
    fn rows_are_independent((rows, n, k) in (2usize..60, 1usize..150, 1usize..90)) {
        for ctx in contexts() {
            let rng = &mut rng();
            let x = TestTensor::integers(rng, DType::F32, contiguous(&[rows, k]), 9);
            let weight = TestTensor::integers(rng, DType::F32, contiguous(&[n, k]), 9);
            let all = product(&ctx, &x, &weight).values();
            let values = x.values();
            let one = TestTensor::of(DType::F32, &[1, k], &values[(rows - 1) * k..]);
            let last = product(&ctx, &one, &weight).values();
            prop_assert_eq!(&all[(rows - 1) * n..], &last[..]);
        }
    }
}
