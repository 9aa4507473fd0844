//! Sums of all ranks that are normalised, against the definition: by slots where ranks have them, and without.

use unsloth::ops::all_reduce_rms_norm::{self, Params};
use unsloth::{DType, InOut, Layout, Stream};

use crate::common::reference::rms_norm::rms_norm;
use crate::common::rules::epsilon;
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, rng};
use crate::group::{is_emulated, pair, ranks, sizes};

const EPSILON: f32 = 1e-5;
/// Calls one behind the other, so that slots are used again.
const CALLS: usize = 3;

#[derive(Clone, Copy, Debug)]
struct Case {
    shape: &'static [usize],
    residual: bool,
    weight: Option<DType>,
    weight_offset: f32,
    in_place: bool,
    /// Elements that tensors begin behind an aligned address.
    skew: usize,
}

const PLAIN: Case = Case {
    shape: &[1, 64],
    residual: false,
    weight: None,
    weight_offset: 0.0,
    in_place: false,
    skew: 0,
};

fn cases(dtype: DType) -> Vec<Case> {
    let other = match dtype {
        DType::F16 => DType::Bf16,
        _ => DType::F16,
    };
    let shapes: &[&[usize]] = &[
        &[1, 8],
        &[1, 576],
        &[1, 4096],
        // The most that slots take in f32, and in 16 bits.
        &[8, 4096],
        &[2, 8192],
        &[2, 3, 1000],
        // What they do not take: rows that do not divide, too many rows, too long ones.
        &[3, 129],
        &[9, 64],
        &[1, 16400],
        &[0, 64],
        &[2, 0],
    ];
    let mut cases: Vec<Case> = Vec::new();
    for shape in shapes {
        cases.push(Case { shape, ..PLAIN });
        cases.push(Case {
            shape,
            residual: true,
            weight: Some(DType::F32),
            in_place: true,
            ..PLAIN
        });
    }
    for skew in [0, 1] {
        for weight in [dtype, other] {
            cases.push(Case {
                shape: &[3, 576],
                residual: true,
                weight: Some(weight),
                weight_offset: 1.0,
                in_place: skew == 0,
                skew,
            });
        }
    }
    if is_emulated() {
        cases.retain(|case| case.shape.iter().product::<usize>() <= 8192);
    }
    cases
}

#[test]
fn sums_are_normalised_on_every_rank() {
    for size in sizes() {
        for dtype in FLOATS {
            for case in cases(dtype) {
                check(size, dtype, &case);
            }
        }
    }
}

fn check(size: usize, dtype: DType, case: &Case) {
    let what = format!("{size} ranks, {dtype}, {case:?}");
    let rng = &mut rng();
    let layout = Layout::contiguous(case.shape).unwrap();
    let dim = *case.shape.last().unwrap();
    let mut random = || {
        let mut tensor = TestTensor::poisoned_at(dtype, layout, case.skew);
        tensor.set_values(&TestTensor::normal(rng, dtype, layout).values());
        tensor
    };
    let x: Vec<Vec<TestTensor>> = (0..CALLS)
        .map(|_| (0..size).map(|_| random()).collect())
        .collect();
    let residual = case.residual.then(random);
    let gains = Layout::contiguous(&[dim]).unwrap();
    let weight = case.weight.map(|d| TestTensor::normal(rng, d, gains));
    let outs = ranks(size, |ctx, comm| {
        comm.warm_up(Stream::DEFAULT).unwrap();
        let poisoned = || TestTensor::poisoned_at(dtype, layout, case.skew).upload(ctx);
        let weight = weight.as_ref().map(|w| w.upload(ctx));
        let mut made = Vec::new();
        for of_call in &x {
            let mut given = of_call[comm.rank()].upload(ctx);
            let mut added = residual.as_ref().map(|r| r.upload(ctx));
            let (mut out, mut sum) = (poisoned(), poisoned());
            let params = Params {
                comm,
                x: match case.in_place {
                    true => InOut::InPlace(given.view_mut()),
                    false => pair(&given, &mut out),
                },
                residual: added.as_mut().map(|added| match case.in_place {
                    true => InOut::InPlace(added.view_mut()),
                    false => pair(added, &mut sum),
                }),
                weight: weight.as_ref().map(|w| w.view()),
                weight_offset: case.weight_offset,
                epsilon: EPSILON,
            };
            all_reduce_rms_norm::supported(ctx, &params).unwrap();
            assert_eq!(all_reduce_rms_norm::workspace_size(ctx, &params), Ok(0));
            all_reduce_rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
            let (out, sum) = match case.in_place {
                true => (given, added),
                false => (out, added.map(|_| sum)),
            };
            made.push((out.download_output(), sum.map(|s| s.download_output())));
        }
        made
    });
    let of = |values: &dyn Fn(&TestTensor) -> Vec<f64>, call: usize| {
        let given = x[call].iter().chain(&residual);
        let mut sums = vec![0.0; layout.num_elements()];
        for tensor in given {
            for (sum, value) in sums.iter_mut().zip(values(tensor)) {
                *sum += value;
            }
        }
        sums
    };
    let weight = weight.as_ref().map(TestTensor::values);
    for call in 0..CALLS {
        let sums = of(&TestTensor::values, call);
        let terms = of(&|t| t.values().iter().map(|v| v.abs()).collect(), call);
        let (expected, _) = rms_norm(
            &sums,
            None,
            weight.as_deref(),
            case.weight_offset.into(),
            EPSILON.into(),
            dim,
        );
        // As large as the output would be of what was added.
        let scaled: Vec<f64> = (0..sums.len())
            .map(|i| match sums[i] {
                0.0 => terms[i],
                sum => (expected[i] * terms[i] / sum).abs(),
            })
            .collect();
        // Where there are no slots the sum is rounded on its way, by NCCL at each step.
        let rounded = match dtype {
            DType::F32 => size as f64,
            _ => size as f64 * epsilon(dtype) / epsilon(DType::F32),
        };
        let (out, sum) = &outs[0][call];
        // And the mean of the squares of a row, in partial sums.
        let ulps = rounded + 8.0 + dim as f64 / 16.0;
        assert_close_of_sums(&what, dtype, &out.values(), &expected, &scaled, ulps);
        if let Some(sum) = sum {
            assert_close_of_sums(&what, dtype, &sum.values(), &sums, &terms, rounded + 1.0);
        }
        for of_rank in &outs {
            assert!(of_rank[call].0.bits() == out.bits(), "{what}");
            let bits = |t: &Option<TestTensor>| t.as_ref().map(TestTensor::bits);
            assert!(bits(&of_rank[call].1) == bits(sum), "{what}");
        }
    }
}
