//! Sums of all ranks that are normalised, against the definition: by slots where ranks have them, and without; and by ranks that
//! divide the rows, in memory of the group and elsewhere.

use std::ptr::NonNull;

use unsloth::comm::Comm;
use unsloth::memory::{CopyKind, copy};
use unsloth::ops::all_reduce_rms_norm::{self, Params};
use unsloth::{Context, DType, InOut, Layout, Stream, TensorMut, TensorRef};

use crate::common::reference::rms_norm::rms_norm;
use crate::common::rules::epsilon;
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, rng};
use crate::group::{is_cuda, is_emulated, pair, ranks, sizes};

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
                sequence: false,
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

/// Ranks that divide rows.
#[derive(Clone, Copy, Debug)]
struct Divided {
    /// Of a rank's rows.
    shape: &'static [usize],
    weight: Option<DType>,
    /// Elements that the residual stream begins behind an aligned address, if there is one.
    residual: Option<usize>,
    place: Place,
}

/// Where input and output are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// The output overwrites the input.
    One,
    Apart,
    /// Apart, in memory that the group gives.
    Group,
}

#[test]
fn ranks_divide_the_rows_they_normalise() {
    // Of a rank. Rows that fill registers in each form, and what is not of whole vectors.
    let shapes: &[&[usize]] = &[
        &[3, 64],
        &[1, 2, 576],
        &[1, 4096],
        &[2, 8192],
        &[2, 129],
        &[1, 16400],
        &[0, 64],
        &[3, 0],
    ];
    for size in sizes() {
        for dtype in FLOATS {
            for shape in shapes {
                // How a row fills registers is the GPU's matter, and long rows take an emulated one long.
                let is_long = shape.iter().product::<usize>() > 4000;
                if is_long && (is_emulated() || !is_cuda()) {
                    continue;
                }
                for place in [Place::One, Place::Apart, Place::Group] {
                    for (residual, weight) in [
                        (None, None),
                        (Some(0), Some(DType::F32)),
                        (Some(1), Some(dtype)),
                    ] {
                        let case = Divided {
                            shape,
                            weight,
                            residual,
                            place,
                        };
                        check_divided(size, dtype, &case);
                    }
                }
            }
        }
    }
}

/// Bytes of a tensor in memory of the group.
fn put(ctx: &Context, to: NonNull<u8>, bits: &[u8]) {
    // SAFETY: the memory has room for so many bytes, which stay until the copy has run.
    unsafe {
        let (from, kind) = (bits.as_ptr(), CopyKind::HostToDevice);
        copy(ctx, to.as_ptr(), from, bits.len(), kind, Stream::DEFAULT).unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
}

fn got(ctx: &Context, from: NonNull<u8>, like: &TestTensor) -> TestTensor {
    let mut bits = like.bits();
    let to = bits.as_mut_ptr();
    // SAFETY: as above, the other way.
    unsafe {
        let kind = CopyKind::DeviceToHost;
        copy(ctx, to, from.as_ptr(), bits.len(), kind, Stream::DEFAULT).unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
    let mut tensor = TestTensor::poisoned_like(like);
    tensor.set_bits(&bits);
    tensor
}

fn check_divided(size: usize, dtype: DType, case: &Divided) {
    let what = format!("{size} ranks, {dtype}, {case:?}");
    let rng = &mut rng();
    let own_layout = Layout::contiguous(case.shape).unwrap();
    let dim = *case.shape.last().unwrap();
    let mut shape = case.shape.to_vec();
    shape[0] *= size;
    let layout = Layout::contiguous(&shape).unwrap();
    let own = own_layout.num_elements();
    let x: Vec<TestTensor> = (0..size)
        .map(|_| TestTensor::normal(rng, dtype, layout))
        .collect();
    let residual = case
        .residual
        .map(|_| TestTensor::normal(rng, dtype, layout).values());
    let gains = Layout::contiguous(&[dim]).unwrap();
    let weight = case.weight.map(|d| TestTensor::normal(rng, d, gains));
    let outs = ranks(size, |ctx, comm| {
        let rank = comm.rank();
        let weight = weight.as_ref().map(|w| w.upload(ctx));
        let mut added = residual.as_ref().map(|values| {
            let skew = case.residual.unwrap_or(0);
            let mut part = TestTensor::poisoned_at(dtype, own_layout, skew);
            part.set_values(&values[rank * own..(rank + 1) * own]);
            part.upload(ctx)
        });
        let run = |x: InOut<'_>, added: Option<InOut<'_>>| {
            let params = Params {
                comm,
                x,
                residual: added,
                weight: weight.as_ref().map(|w| w.view()),
                weight_offset: 0.0,
                epsilon: EPSILON,
                sequence: true,
            };
            all_reduce_rms_norm::supported(ctx, &params).unwrap();
            all_reduce_rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
        };
        let residual = added.as_mut().map(|r| InOut::InPlace(r.view_mut()));
        let out = match case.place {
            Place::Group => in_group(ctx, comm, &x[rank], |x| run(x, residual)),
            Place::One => {
                let mut given = x[rank].upload(ctx);
                run(InOut::InPlace(given.view_mut()), residual);
                given.download_output()
            }
            Place::Apart => {
                let given = x[rank].upload(ctx);
                let mut out = TestTensor::poisoned_like(&x[rank]).upload(ctx);
                run(pair(&given, &mut out), residual);
                out.download_output()
            }
        };
        (out, added.map(|sum| sum.download_output()))
    });
    let added = |of: &dyn Fn(f64) -> f64| {
        let mut sums = residual.clone().unwrap_or(vec![0.0; layout.num_elements()]);
        sums.iter_mut().for_each(|sum| *sum = of(*sum));
        for tensor in &x {
            let values = tensor.values();
            sums.iter_mut().zip(values).for_each(|(s, v)| *s += of(v));
        }
        sums
    };
    let (sums, terms) = (added(&|v| v), added(&f64::abs));
    let weight = weight.as_ref().map(TestTensor::values);
    let (expected, _) = rms_norm(&sums, None, weight.as_deref(), 0.0, EPSILON.into(), dim);
    let scaled: Vec<f64> = (0..sums.len())
        .map(|i| match sums[i] {
            0.0 => terms[i],
            sum => (expected[i] * terms[i] / sum).abs(),
        })
        .collect();
    let rounded = match dtype {
        DType::F32 => size as f64,
        _ => size as f64 * epsilon(dtype) / epsilon(DType::F32),
    };
    let ulps = rounded + 8.0 + dim as f64 / 16.0;
    for (rank, (out, sum)) in outs.iter().enumerate() {
        assert_close_of_sums(&what, dtype, &out.values(), &expected, &scaled, ulps);
        assert!(out.bits() == outs[0].0.bits(), "{what}");
        if let Some(sum) = sum {
            let range = rank * own..(rank + 1) * own;
            let (expected, terms) = (&sums[range.clone()], &terms[range]);
            assert_close_of_sums(&what, dtype, &sum.values(), expected, terms, rounded + 1.0);
        }
    }
}

/// Runs with a copy of a tensor and an output in memory of the group, and gives the output.
fn in_group(ctx: &Context, comm: &Comm, x: &TestTensor, run: impl FnOnce(InOut<'_>)) -> TestTensor {
    let bits = x.bits();
    let layout = x.layout;
    let (from, to) = (comm.alloc(bits.len()), comm.alloc(bits.len()));
    let (from, to) = (from.unwrap(), to.unwrap());
    put(ctx, from, &bits);
    put(ctx, to, &vec![0xff; bits.len()]);
    // SAFETY: the memory has the tensors' bytes, which nothing else uses.
    let (input, output) = unsafe {
        (
            TensorRef::from_raw(from.as_ptr(), x.dtype, layout),
            TensorMut::from_raw(to.as_ptr(), x.dtype, layout),
        )
    };
    run(InOut::Apart { input, output });
    let out = got(ctx, to, x);
    // SAFETY: nothing uses it any more.
    unsafe {
        comm.free(from).unwrap();
        comm.free(to).unwrap();
    }
    out
}
