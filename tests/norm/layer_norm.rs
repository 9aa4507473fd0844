//! LayerNorm against its definition: shapes, layouts, dtypes, features, misuse.

use crate::common::abi::{self, Misuse, absent, assert_fails, c_tensor};
use crate::common::contiguous;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, contexts, reference, rng};
use unsloth::ffi::layer_norm::*;
use unsloth::ffi::status::*;
use unsloth::ops::layer_norm::{self, Params};
use unsloth::{Context, DType, InOut, Layout, Stream};

struct Case {
    layout: Layout,
    weight: Option<DType>,
    bias: Option<DType>,
    in_place: bool,
    skew: usize,
    /// Added to every element.
    offset: f64,
}

fn cases(dtype: DType) -> Vec<Case> {
    let plain = |layout| Case {
        layout,
        weight: None,
        bias: None,
        in_place: false,
        skew: 0,
        offset: 0.0,
    };
    let mut cases: Vec<Case> = [
        contiguous(&[2]),
        contiguous(&[3, 7]),
        contiguous(&[2, 2, 3, 80]),
        contiguous(&[1, 5000]),
        contiguous(&[0, 64]),
        contiguous(&[4, 0]),
        strided_rows(&[6, 33], 5),
        transposed(&[2, 3, 4, 16], 1, 2),
    ]
    .map(plain)
    .into();
    // Hidden sizes for which a GPU takes more threads each, and one vector more and less.
    for power in 6..16 {
        for dim in [(1 << power) - 8, 1 << power, (1 << power) + 8] {
            cases.push(plain(contiguous(&[5, dim])));
        }
    }
    let third = if dtype == DType::F16 {
        DType::Bf16
    } else {
        DType::F16
    };
    for weight in [None, Some(DType::F32), Some(dtype), Some(third)] {
        for bias in [None, Some(DType::F32), Some(dtype), Some(third)] {
            // A GPU moves the first of these in vectors, of which a thread has one or four.
            for (layout, in_place, skew) in [
                (contiguous(&[4, 96]), true, 0),
                (contiguous(&[700, 768]), false, 0),
                (contiguous(&[3, 4096]), false, 0),
                (contiguous(&[4, 96]), true, 1),
                (strided_rows(&[3, 2, 31], 1), false, 0),
            ] {
                cases.push(Case {
                    weight,
                    bias,
                    in_place,
                    skew,
                    ..plain(layout)
                });
            }
        }
    }
    if dtype == DType::F32 {
        // The variance of a row far from zero keeps its digits.
        cases.push(Case {
            offset: 1000.0,
            ..plain(contiguous(&[3, 1024]))
        });
    }
    cases
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let epsilon = 1e-5f32;
    let dim = *case.layout.shape().last().unwrap();
    let mut x = TestTensor::poisoned_at(dtype, case.layout, case.skew);
    let normal = TestTensor::normal(rng, dtype, case.layout).values();
    x.set_values(&normal.iter().map(|x| x + case.offset).collect::<Vec<_>>());
    let mut vector = |d: Option<DType>| d.map(|d| TestTensor::normal(rng, d, contiguous(&[dim])));
    let (weight, bias) = (vector(case.weight), vector(case.bias));
    let values = |t: &Option<TestTensor>| t.as_ref().map(TestTensor::values);
    let (expected, terms) = reference::layer_norm::layer_norm(
        &x.values(),
        values(&weight).as_deref(),
        values(&bias).as_deref(),
        epsilon.into(),
        dim,
    );
    let mut dx = x.upload(ctx);
    let mut dout = TestTensor::poisoned_at(dtype, case.layout, case.skew).upload(ctx);
    let (dw, db) = (weight.map(|w| w.upload(ctx)), bias.map(|b| b.upload(ctx)));
    let params = Params {
        x: match case.in_place {
            true => InOut::InPlace(dx.view_mut()),
            false => InOut::Apart {
                input: dx.view(),
                output: dout.view_mut(),
            },
        },
        weight: dw.as_ref().map(|w| w.view()),
        bias: db.as_ref().map(|b| b.view()),
        epsilon,
    };
    layer_norm::supported(ctx, &params).unwrap();
    layer_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let out = if case.in_place { dx } else { dout }.download_output();
    // Two means of `dim` terms, whose roundings cancel for the most part; a root, products, a sum.
    let ulps = 8.0 + (dim as f64).sqrt() / 16.0;
    assert_close_of_sums("out", dtype, &out.values(), &expected, &terms, ulps);
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for case in cases(dtype) {
                check(&ctx, dtype, &case);
            }
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_layer_norm_params>] = &[
    (
        |p| p.x = absent(),
        INVALID,
        "layer_norm: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "layer_norm: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "layer_norm: out has dtype f16, x has f32",
    ),
    (
        |p| p.weight.shape[0] = 7,
        INVALID,
        "layer_norm: weight has shape [7], expected [8]",
    ),
    (
        |p| p.bias.dtype = DType::Bool as u32,
        INVALID,
        "layer_norm: bias has dtype bool, allowed: f32, f16, bf16",
    ),
    (
        |p| p.bias.data = p.out.data,
        INVALID,
        "layer_norm: out overlaps bias",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "layer_norm: data of x is NULL",
    ),
    (
        |p| p.epsilon = 0.0,
        INVALID,
        "layer_norm: epsilon is 0, a number above 0 is needed",
    ),
    (
        |p| p.epsilon = f32::NAN,
        INVALID,
        "layer_norm: epsilon is NaN, a finite number is needed",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let layout = contiguous(&[2, 8]);
        let x = TestTensor::normal(&mut rng(), DType::F32, layout).upload(&memory);
        let out = TestTensor::poisoned(DType::F32, layout).upload(&memory);
        let vector = || TestTensor::of(DType::F32, &[8], &[1.0; 8]).upload(&memory);
        let (weight, bias) = (vector(), vector());
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_layer_norm_params = unsafe { abi::zeroed_params() };
        good.epsilon = 1e-5;
        (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
        (good.weight, good.bias) = (c_tensor(&weight), c_tensor(&bias));
        for (spoil, status, message) in MISUSE {
            let mut bad = good;
            spoil(&mut bad);
            // SAFETY: every tensor that passes validation lies in memory made above.
            let got = unsafe { unsloth_layer_norm_forward(ctx.0, &bad, std::ptr::null_mut()) };
            assert_fails(got, *status, message);
        }
        abi::assert_untouched(&out);
    }
}
