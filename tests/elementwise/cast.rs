//! Conversions against rounding by definition: shapes, layouts, dtypes, every special value.

use crate::common::rules::epsilon;
use crate::common::tensor::{round_to, strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, contexts, rng};
use proptest::prelude::*;
use unsloth::ops::cast::{self, Params};
use unsloth::{Context, DType, Layout, Stream, TensorMut, TensorRef};

#[derive(Clone, Debug)]
struct Case {
    x: Layout,
    out: Layout,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let mut cases = Vec::new();
    for shape in [
        &[1][..],
        &[17],
        &[3, 7],
        &[2, 1536],
        &[2, 3, 2, 2, 2, 5],
        &[0, 8],
        &[4, 0],
        &[40, 1030],
        &[3, 40_000],
    ] {
        let layout = contiguous(shape);
        for skew in [0, 1] {
            cases.push(Case {
                x: layout,
                out: layout,
                skew,
            });
        }
    }
    let gaps = |gap| strided_rows(&[5, 600], gap);
    for (x, out) in [
        (gaps(3), gaps(0)),
        (gaps(0), gaps(8)),
        (gaps(8), gaps(16)),
        (transposed(&[3, 4, 40], 0, 1), contiguous(&[3, 4, 40])),
        (contiguous(&[3, 4, 33]), transposed(&[3, 4, 33], 0, 1)),
        // Rows that are all the same.
        (
            Layout::strided(&[6, 40], &[0, 1]).unwrap(),
            contiguous(&[6, 40]),
        ),
    ] {
        cases.push(Case { x, out, skew: 0 });
    }
    cases
}

fn run(ctx: &Context, x: &TestTensor, to: DType, out: Layout, skew: usize) -> TestTensor {
    let device = x.upload(ctx);
    let mut out = TestTensor::poisoned_at(to, out, skew).upload(ctx);
    let params = Params {
        x: device.view(),
        out: out.view_mut(),
    };
    cast::supported(ctx, &params).unwrap();
    cast::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}

#[test]
fn rounds_once() {
    for ctx in contexts() {
        for from in FLOATS {
            for to in FLOATS {
                crate::common::for_each_case(&cases(), |case| {
                    let rng = &mut rng();
                    let mut x = TestTensor::poisoned_at(from, case.x, case.skew);
                    x.set_values(&TestTensor::normal(rng, from, case.x).values());
                    let expected: Vec<f64> = x.values().iter().map(|v| round_to(to, *v)).collect();
                    let out = run(&ctx, &x, to, case.out, case.skew);
                    assert!(out.values() == expected, "{from} to {to}");
                });
            }
        }
    }
}

/// Every f16 and bf16 there is, and the f32 around each of them and around the ties between them.
fn all_of(dtype: DType) -> TestTensor {
    let halves = (0..=u16::MAX).flat_map(u16::to_ne_bytes);
    match dtype {
        DType::F32 => {
            let wide = |narrow: DType| {
                let mut tensor =
                    TestTensor::poisoned(narrow, Layout::contiguous(&[1 << 16]).unwrap());
                tensor.set_bits(&halves.clone().collect::<Vec<_>>());
                tensor.values()
            };
            let values = [wide(DType::F16), wide(DType::Bf16)].concat();
            let bits: Vec<u8> = values
                .iter()
                .flat_map(|v| {
                    let bits = (*v as f32).to_bits();
                    let steps = [
                        0,
                        1,
                        u32::MAX,
                        1 << 12,
                        (1 << 12) + 1,
                        1 << 15,
                        (1 << 15) + 1,
                    ];
                    steps.map(|step| bits.wrapping_add(step))
                })
                .flat_map(u32::to_ne_bytes)
                .collect();
            let layout = Layout::contiguous(&[bits.len() / 4]).unwrap();
            let mut tensor = TestTensor::poisoned(dtype, layout);
            tensor.set_bits(&bits);
            tensor
        }
        _ => {
            let mut tensor = TestTensor::poisoned(dtype, Layout::contiguous(&[1 << 16]).unwrap());
            tensor.set_bits(&halves.collect::<Vec<_>>());
            tensor
        }
    }
}

#[test]
fn every_value_is_rounded_to_nearest_even() {
    for ctx in contexts() {
        for from in FLOATS {
            let x = all_of(from);
            let values = x.values();
            for to in FLOATS {
                let out = run(&ctx, &x, to, x.layout, 0);
                if from == to {
                    assert!(out.bits() == x.bits(), "a copy of {from} differs");
                }
                for (x, y) in values.iter().zip(out.values()) {
                    let expected = round_to(to, *x);
                    // Signs of zeros count; NaN stays NaN.
                    let same = expected.to_bits() == y.to_bits();
                    assert!(
                        same || (x.is_nan() && y.is_nan()),
                        "{from} {x:e} is {to} {y:e}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Widening loses nothing, and rounding what was rounded changes nothing.
    #[test]
    fn wide_and_back_is_the_same(rows in 1usize..9, dim in 1usize..200, gap in 0usize..9) {
        for ctx in contexts() {
            for narrow in [DType::F16, DType::Bf16] {
                let layout = strided_rows(&[rows, dim], gap);
                let x = TestTensor::normal(&mut rng(), narrow, layout);
                let wide = run(&ctx, &x, DType::F32, strided_rows(&[rows, dim], 2 * gap), 0);
                let back = run(&ctx, &wide, narrow, layout, 0);
                prop_assert_eq!(back.bits(), x.bits());
            }
        }
    }
}

/// The gradient of a cast is the cast of the output's: a loss that is linear in the output differs
/// between two inputs by the product of the gradient and their difference, exactly but for what the
/// two casts round.
#[test]
fn the_gradient_of_a_cast_is_a_cast() {
    let layout = Layout::contiguous(&[5, 33]).unwrap();
    for ctx in contexts() {
        for from in FLOATS {
            for to in FLOATS {
                let rng = &mut rng();
                let [x, along] = [0; 2].map(|_| TestTensor::normal(rng, from, layout).values());
                let dout = TestTensor::normal(rng, to, layout);
                let dx = run(&ctx, &dout, from, layout, 0).values();
                // Far from each other, so that casts round little of the difference.
                let [above, below] = [64.0, -64.0].map(|step| {
                    let moved: Vec<f64> = x.iter().zip(&along).map(|(x, a)| x + step * a).collect();
                    let x = TestTensor::from_values(from, layout, &moved);
                    let y = run(&ctx, &x, to, layout, 0).values();
                    x.values().into_iter().zip(y).collect::<Vec<_>>()
                });
                let (mut difference, mut product, mut bound) = (0.0, 0.0, 1e-9);
                for (i, dout) in dout.values().into_iter().enumerate() {
                    let ((x, y), (other, other_y)) = (above[i], below[i]);
                    difference += dout * (y - other_y);
                    product += dx[i] * (x - other);
                    // What widens is exact.
                    if to != DType::F32 && to != from {
                        bound += 0.5 * epsilon(to) * dout.abs() * (y.abs() + other_y.abs());
                    }
                    if from != DType::F32 && from != to {
                        bound += 0.5 * epsilon(from) * dout.abs() * (x - other).abs();
                    }
                }
                let error = (difference - product).abs();
                assert!(
                    error <= bound,
                    "{from} to {to}: {difference} and {product}, {bound}"
                );
            }
        }
    }
}

/// Kernels of a stream may be started while those before them still run: each waits for what it reads,
/// and for those who still read what it writes.
#[test]
fn a_chain_keeps_its_order() {
    const ROUNDS: usize = 24;
    fn queue(ctx: &Context, x: TensorRef<'_>, out: TensorMut<'_>) {
        cast::forward(ctx, &Params { x, out }, Stream::DEFAULT).unwrap();
    }
    let layout = Layout::contiguous(&[3 << 17]).unwrap();
    let rng = &mut rng();
    // What is exact in every dtype, so that only the order counts.
    let inputs = [0, 1].map(|i| {
        let mut x = TestTensor::integers(rng, DType::F32, layout, 100);
        let values: Vec<f64> = x.values().iter().map(|v| v + 128.0 * i as f64).collect();
        x.set_values(&values);
        x
    });
    for ctx in contexts() {
        let devices = inputs.each_ref().map(|x| x.upload(&ctx));
        let mut narrow = TestTensor::poisoned(DType::F16, layout).upload(&ctx);
        let mut other = TestTensor::poisoned(DType::Bf16, layout).upload(&ctx);
        let mut outs: Vec<_> = (0..ROUNDS)
            .map(|_| TestTensor::poisoned(DType::F32, layout).upload(&ctx))
            .collect();
        for (round, out) in outs.iter_mut().enumerate() {
            let x = devices[round % 2].view();
            queue(&ctx, x, narrow.view_mut());
            queue(&ctx, narrow.view(), other.view_mut());
            queue(&ctx, other.view(), out.view_mut());
        }
        for (round, out) in outs.iter().enumerate() {
            let same = out.download_output().values() == inputs[round % 2].values();
            assert!(same, "round {round} has another's numbers");
        }
    }
}
