//! Every collective with every dtype, on groups of 1 to 8, against what it is by definition.

use unsloth::ops::all_reduce::{self, ReduceOp};
use unsloth::ops::{all_gather, reduce_scatter};
use unsloth::{DType, InOut, Layout, Stream};

use crate::common::tensor::round_to;
use crate::common::{TestTensor, assert_close_of_sums};
use crate::group::{MOVED, devices, divisions, inputs, pair, random, ranks, rows, sizes};

const NUMBERS: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I32,
    DType::I64,
    DType::I8,
];

/// Elements reduced over ranks in f64, and the magnitudes of what was added.
fn reduced(op: ReduceOp, inputs: &[Vec<f64>]) -> (Vec<f64>, Vec<f64>) {
    let of = |i: usize| {
        let values = || inputs.iter().map(|x| x[i]);
        let terms: f64 = values().map(f64::abs).sum();
        match op {
            ReduceOp::Sum => (values().sum(), terms),
            ReduceOp::Avg => {
                let n = inputs.len() as f64;
                (values().sum::<f64>() / n, terms / n)
            }
            ReduceOp::Max => (values().fold(f64::NEG_INFINITY, f64::max), 0.0),
            ReduceOp::Min => (values().fold(f64::INFINITY, f64::min), 0.0),
            ReduceOp::Prod => (values().product(), values().product::<f64>().abs()),
            other => panic!("{other} has no reference"),
        }
    };
    (0..inputs[0].len()).map(of).unzip()
}

#[track_caller]
fn assert_reduced(what: &str, op: ReduceOp, inputs: &[Vec<f64>], out: &TestTensor) {
    let (mut expected, terms) = reduced(op, inputs);
    if !out.dtype.is_float() {
        // Which wrap around.
        let bits = 8 * out.dtype.size() as i32;
        if op == ReduceOp::Prod {
            let wrapped = |i: usize| inputs.iter().fold(1i64, |p, x| p.wrapping_mul(x[i] as i64));
            expected = (0..expected.len()).map(|i| wrapped(i) as f64).collect();
        }
        let wrap = |v: f64| {
            let v = v as i64;
            (v << (64 - bits) >> (64 - bits)) as f64
        };
        expected = expected.into_iter().map(wrap).collect();
        assert_eq!(out.values(), expected, "{what}");
        return;
    }
    let ulps = inputs.len() as f64;
    assert_close_of_sums(what, out.dtype, &out.values(), &expected, &terms, ulps);
}

fn is_defined(op: ReduceOp, dtype: DType) -> bool {
    op != ReduceOp::Avg || dtype.is_float()
}

#[test]
fn all_reduce_is_the_reduction_on_every_rank() {
    for size in sizes() {
        for dtype in NUMBERS {
            for op in ReduceOp::ALL {
                if !is_defined(op, dtype) {
                    continue;
                }
                for shape in [&[1][..], &[0, 3], &[7], &[3, 129], &[5, 3, 700]] {
                    for in_place in [false, true] {
                        let what = format!("{size} ranks, {dtype}, {op}, {shape:?}, {in_place}");
                        let x = inputs(dtype, &vec![shape.to_vec(); size]);
                        let outs = ranks(size, |ctx, comm| {
                            let mut given = x[comm.rank()].upload(ctx);
                            let mut out = TestTensor::poisoned(dtype, given.layout).upload(ctx);
                            let params = all_reduce::Params {
                                comm,
                                x: match in_place {
                                    true => InOut::InPlace(given.view_mut()),
                                    false => pair(&given, &mut out),
                                },
                                op,
                            };
                            all_reduce::supported(ctx, &params).unwrap();
                            assert_eq!(all_reduce::workspace_size(ctx, &params), Ok(0));
                            all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
                            match in_place {
                                true => given.download_output(),
                                false => {
                                    assert!(given.download().bits() == x[comm.rank()].bits());
                                    out.download_output()
                                }
                            }
                        });
                        let values: Vec<_> = x.iter().map(TestTensor::values).collect();
                        assert_reduced(&what, op, &values, &outs[0]);
                        assert!(outs.iter().all(|o| o.bits() == outs[0].bits()), "{what}");
                    }
                }
            }
        }
    }
}

/// Sums are in the order of ranks, in f32, and rounded once: to the bit, and so again.
#[test]
fn sums_are_in_the_order_of_ranks() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let x = inputs(dtype, &vec![vec![4001]; 3]);
        let run = || {
            let outs = ranks(3, |ctx, comm| {
                let mut given = x[comm.rank()].upload(ctx);
                let params = all_reduce::Params {
                    comm,
                    x: InOut::InPlace(given.view_mut()),
                    op: ReduceOp::Sum,
                };
                all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
                given.download_output()
            });
            outs[0].bits()
        };
        let of = |rank: usize, i: usize| x[rank].values()[i] as f32;
        let first = run();
        let mut expected = TestTensor::poisoned_like(&x[0]);
        let [a, b, c] = [0, 1, 2].map(|rank| x[rank].values());
        let sums: Vec<f64> = (0..a.len())
            .map(|i| f64::from((a[i] as f32 + b[i] as f32) + c[i] as f32))
            .collect();
        assert_eq!(sums[7], f64::from((of(0, 7) + of(1, 7)) + of(2, 7)));
        expected.set_values(&sums);
        assert!(first == expected.bits() && first == run(), "{dtype}");
    }
}

#[test]
fn special_values_are_reduced_by_rule() {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    let x = [
        [NAN, NAN, 1.0, 0.0, INF, -INF, 65504.0, 1.0],
        [2.0, NAN, NAN, -0.0, 1.0, INF, 65504.0, 2.0],
    ];
    for (op, expected) in [
        (ReduceOp::Sum, [NAN, NAN, NAN, 0.0, INF, NAN, INF, 3.0]),
        (ReduceOp::Max, [2.0, NAN, 1.0, 0.0, INF, INF, 65504.0, 2.0]),
        (ReduceOp::Min, [2.0, NAN, 1.0, 0.0, 1.0, -INF, 65504.0, 1.0]),
    ] {
        let outs = ranks(2, |ctx, comm| {
            let x = TestTensor::of(DType::F16, &[8], &x[comm.rank()]);
            let mut given = x.upload(ctx);
            let params = all_reduce::Params {
                comm,
                x: InOut::InPlace(given.view_mut()),
                op,
            };
            all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
            given.download_output().values()
        });
        for (out, expected) in outs[0].iter().zip(expected) {
            // Signs of zeros count, but for the lesser of two zeros by NCCL itself.
            let signs = devices().is_none() || op != ReduceOp::Min;
            let same = match signs {
                true => out.to_bits() == expected.to_bits(),
                false => *out == expected,
            };
            assert!(same || out.is_nan() && expected.is_nan(), "{op}: {outs:?}");
        }
    }
}

#[test]
fn all_gather_puts_rows_behind_each_other() {
    for size in sizes() {
        for dtype in MOVED {
            for (counts, even) in divisions(size) {
                for row in [&[][..], &[5], &[3, 67]] {
                    for in_place in [false, true] {
                        let what =
                            format!("{size} ranks, {dtype}, {counts:?}, {row:?}, {in_place}");
                        let shapes: Vec<_> = counts.iter().map(|n| rows(*n, row)).collect();
                        let x = inputs(dtype, &shapes);
                        let all = rows(counts.iter().sum(), row);
                        let outs = ranks(size, |ctx, comm| {
                            let given = x[comm.rank()].upload(ctx);
                            let layout = Layout::contiguous(&all).unwrap();
                            let mut out = TestTensor::poisoned_at(dtype, layout, 1);
                            if in_place {
                                place(&mut out, &counts, comm.rank(), &x[comm.rank()]);
                            }
                            let mut out = out.upload(ctx);
                            let params = all_gather::Params {
                                comm,
                                x: match in_place {
                                    true => InOut::InPlace(out.view_mut()),
                                    false => pair(&given, &mut out),
                                },
                                counts: (!even).then_some(&counts[..]),
                            };
                            all_gather::supported(ctx, &params).unwrap();
                            all_gather::forward(ctx, &params, Stream::DEFAULT).unwrap();
                            out.download_output().bits()
                        });
                        let expected: Vec<u8> = x.iter().flat_map(TestTensor::bits).collect();
                        assert!(outs.iter().all(|out| *out == expected), "{what}");
                    }
                }
            }
        }
    }
}

/// Puts a rank's rows where they are to be.
fn place(out: &mut TestTensor, counts: &[i64], rank: usize, x: &TestTensor) {
    let rows: i64 = counts.iter().sum();
    let row = out.bits().len() / (rows as usize).max(1);
    let before: i64 = counts[..rank].iter().sum();
    let start = before as usize * row;
    let mut bits = out.bits();
    bits[start..start + x.bits().len()].copy_from_slice(&x.bits());
    out.set_bits(&bits);
}

#[test]
fn reduce_scatter_is_a_part_of_the_reduction() {
    for size in sizes() {
        for dtype in NUMBERS {
            for op in ReduceOp::ALL {
                if !is_defined(op, dtype) {
                    continue;
                }
                for (counts, even) in divisions(size) {
                    for in_place in [false, true] {
                        scattered(size, dtype, op, (&counts, even), &[5, 131], in_place);
                    }
                }
            }
        }
    }
}

fn scattered(
    size: usize,
    dtype: DType,
    op: ReduceOp,
    (counts, even): (&[i64], bool),
    row: &[usize],
    in_place: bool,
) {
    let what = format!("{size} ranks, {dtype}, {op}, {counts:?}, {in_place}");
    let all = rows(counts.iter().sum(), row);
    let x = inputs(dtype, &vec![all; size]);
    let outs = ranks(size, |ctx, comm| {
        let mut given = x[comm.rank()].upload(ctx);
        let own = rows(counts[comm.rank()], row);
        let layout = Layout::contiguous(&own).unwrap();
        let mut out = TestTensor::poisoned_at(dtype, layout, 1).upload(ctx);
        let mut sums = TestTensor::poisoned(dtype, given.layout).upload(ctx);
        let whole = all_reduce::Params {
            comm,
            x: pair(&given, &mut sums),
            op,
        };
        all_reduce::forward(ctx, &whole, Stream::DEFAULT).unwrap();
        let params = reduce_scatter::Params {
            comm,
            x: match in_place {
                true => InOut::InPlace(given.view_mut()),
                false => pair(&given, &mut out),
            },
            op,
            counts: (!even).then_some(counts),
        };
        reduce_scatter::supported(ctx, &params).unwrap();
        reduce_scatter::forward(ctx, &params, Stream::DEFAULT).unwrap();
        let mut expected = match in_place {
            true => x[comm.rank()].clone(),
            false => TestTensor::poisoned_at(dtype, layout, 1),
        };
        // Its rows of the whole reduction, to the bit; in place the others stay.
        let sums = sums.download_output().bits();
        let row = row.iter().product::<usize>() * dtype.size();
        let before = counts[..comm.rank()].iter().sum::<i64>() as usize * row;
        let range = before..before + counts[comm.rank()] as usize * row;
        let mut bits = expected.bits();
        match in_place {
            true => bits[range.clone()].copy_from_slice(&sums[range]),
            false => bits.copy_from_slice(&sums[range]),
        }
        expected.set_bits(&bits);
        match in_place {
            true => assert!(given.download_output().bits() == expected.bits()),
            false => assert!(out.download_output().bits() == expected.bits()),
        }
        sums
    });
    assert!(outs.iter().all(|sums| *sums == outs[0]), "{what}");
}

/// Averages are rounded once, where a sum of halves would be twice.
#[test]
fn averages_are_rounded_once() {
    let rng = &mut crate::common::rng();
    let x: Vec<_> = (0..4).map(|_| random(rng, DType::F16, &[999])).collect();
    let values: Vec<_> = x.iter().map(TestTensor::values).collect();
    let outs = ranks(4, |ctx, comm| {
        let mut given = x[comm.rank()].upload(ctx);
        let params = all_reduce::Params {
            comm,
            x: InOut::InPlace(given.view_mut()),
            op: ReduceOp::Avg,
        };
        all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
        given.download_output().values()
    });
    for (i, out) in outs[0].iter().enumerate() {
        let sum = (1..4).fold(values[0][i] as f32, |sum, rank| {
            sum + values[rank][i] as f32
        });
        assert_eq!(*out, round_to(DType::F16, f64::from(sum / 4.0)));
    }
}
