//! Quantisation: codes, scales and sums by definition, what has no scale, threads, arguments that
//! must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::reference::quantize as reference;
use crate::common::tensor::{e4m3_nearest, e4m3_value, strided_rows};
use crate::common::{DeviceTensor, FLOATS, TestTensor, contexts, contiguous, for_each_case, rng};
use unsloth::ffi::quantize::{
    unsloth_quantize_forward, unsloth_quantize_params, unsloth_quantize_supported,
};
use unsloth::ffi::status::*;
use unsloth::ops::quantize::{self, Params, Rule};
use unsloth::{Backend, Context, ContextOptions, DType, Layout, Stream, TensorMut, Workspace};

/// Codes of the ternary dtype that lie in a block, and its bytes.
const BLOCK: usize = 128;
const BYTES: usize = 32;

/// An output of codes: ternary ones lie in the bytes of a tensor of bytes.
struct Codes {
    memory: DeviceTensor,
    dtype: DType,
    layout: Layout,
}

impl Codes {
    fn new(ctx: &Context, dtype: DType, shape: &[usize], gap: usize) -> Codes {
        let layout = strided_rows(shape, gap);
        let bytes = match dtype {
            DType::Ternary => {
                let mut of_bytes = shape.to_vec();
                *of_bytes.last_mut().unwrap() /= 4;
                strided_rows(&of_bytes, gap / 4)
            }
            _ => layout,
        };
        let memory = TestTensor::poisoned(DType::I8, bytes).upload(ctx);
        Codes {
            memory,
            dtype,
            layout,
        }
    }

    fn view(&mut self) -> TensorMut<'_> {
        // SAFETY: the elements' memory, which is borrowed.
        unsafe { TensorMut::from_raw(self.memory.data().cast(), self.dtype, self.layout) }
    }

    fn values(&self) -> Vec<f64> {
        let bytes = self.memory.download_output();
        match self.dtype {
            DType::Ternary => {}
            DType::F8E4M3 => {
                let codes = bytes.values().into_iter();
                return codes.map(|code| e4m3_value(code as i8 as u8)).collect();
            }
            _ => return bytes.values(),
        }
        (bytes.bits().chunks(BYTES))
            .flat_map(|block| {
                (0..BLOCK).map(|i| f64::from(block[i % BYTES] >> (2 * (i / BYTES)) & 3) - 1.0)
            })
            .collect()
    }
}

/// Outputs of a call: codes, scales, and sums of what has some.
fn run(
    ctx: &Context,
    x: &TestTensor,
    (dtype, rule): (DType, Rule),
    scales: &[usize],
    sums: &[usize],
    gap: usize,
) -> [Vec<f64>; 3] {
    let device = x.upload(ctx);
    let mut out = Codes::new(ctx, dtype, x.layout.shape(), gap);
    let mut scale = TestTensor::poisoned(DType::F32, contiguous(scales)).upload(ctx);
    let mut sum = TestTensor::poisoned(DType::I32, contiguous(sums)).upload(ctx);
    let mut params = Params {
        x: device.view(),
        out: out.view(),
        scale: scale.view_mut(),
        sum: dtype.is_of_integers().then(|| sum.view_mut()),
        rule,
        workspace: Workspace::none(),
    };
    quantize::supported(ctx, &params).unwrap();
    // Two numbers of each row, and of all, where all share a scale on a GPU.
    let size = quantize::workspace_size(ctx, &params).unwrap();
    let shares = scales == [1] && x.layout.rank() > 1;
    let found = if shares && ctx.backend() != Backend::Cpu {
        8 * (x.layout.num_rows() + 1)
    } else {
        0
    };
    assert_eq!(size, found);
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size / 4])).upload(ctx);
    if size > 0 {
        // SAFETY: the tensor's elements, which nothing else uses.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    }
    quantize::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let sums = match dtype.is_of_integers() {
        true => sum.download_output().values(),
        false => Vec::new(),
    };
    [out.values(), scale.download_output().values(), sums]
}

const METHODS: [(DType, Rule); 5] = [
    (DType::I8, Rule::AbsMax),
    (DType::F8E4M3, Rule::AbsMax),
    (DType::Ternary, Rule::AbsMax),
    (DType::Ternary, Rule::AbsMean),
    (DType::Ternary, Rule::Threshold),
];

/// The greatest number that has a code.
fn greatest(dtype: DType) -> f64 {
    match dtype {
        DType::I8 => 127.0,
        DType::F8E4M3 => 448.0,
        _ => 1.0,
    }
}

#[derive(Debug)]
struct Case {
    shape: &'static [usize],
    /// Of scales and of sums.
    scales: &'static [usize],
    sums: &'static [usize],
    gap: usize,
}

const fn case(
    shape: &'static [usize],
    scales: &'static [usize],
    sums: &'static [usize],
    gap: usize,
) -> Case {
    Case {
        shape,
        scales,
        sums,
        gap,
    }
}

/// Rows, groups, one scale for all; no rows, long ones, more than a part of the scratch has.
const CASES: &[Case] = &[
    case(&[256], &[1], &[1], 0),
    case(&[3, 128], &[3], &[3], 0),
    case(&[3, 128], &[1], &[3], 128),
    case(&[2, 3, 384], &[2, 3], &[2, 3], 128),
    case(&[2, 3, 384], &[2, 3, 3], &[2, 3, 3], 0),
    case(&[5, 768], &[5, 2], &[5, 2], 256),
    case(&[200, 128], &[1], &[200], 0),
    case(&[2, 4096 + 640], &[2], &[2], 0),
    // More pieces than a block of a GPU has warps.
    case(&[2, 9 * 4096 + 128], &[2], &[2], 0),
    case(&[3, 4096 + 128], &[1], &[3], 128),
    case(&[0, 128], &[0], &[0], 0),
    case(&[0, 128], &[1], &[0], 0),
];

/// What only 8 bits have: rows of any length.
const UNEVEN: &[Case] = &[
    case(&[1], &[1], &[1], 0),
    case(&[7, 33], &[7], &[7], 5),
    case(&[7, 33], &[7, 11], &[7, 11], 3),
    case(&[3, 5, 600], &[1], &[3, 5], 1),
    case(&[2, 0], &[2], &[2], 0),
    case(&[2, 4097], &[2, 1], &[2, 1], 0),
    // A thread of a GPU holds two, three, seven and eight vectors; more than it can.
    case(&[2, 4096], &[2], &[2], 8),
    case(&[2, 6912], &[2], &[2], 0),
    case(&[2, 13_824], &[2, 2], &[2, 2], 0),
    case(&[2, 16_384], &[2], &[2], 0),
    case(&[2, 16_392], &[2], &[2], 0),
];

#[test]
fn codes_are_the_nearest() {
    for ctx in contexts() {
        for (dtype, rule) in METHODS {
            let uneven = match dtype {
                DType::Ternary => &[],
                _ => UNEVEN,
            };
            for cases in [CASES, uneven] {
                for_each_case(cases, |case| {
                    for from in FLOATS {
                        check(&ctx, (dtype, rule), from, case);
                    }
                });
            }
        }
    }
}

fn check(ctx: &Context, (dtype, rule): (DType, Rule), from: DType, case: &Case) {
    let most = greatest(dtype);
    let layout = strided_rows(case.shape, case.gap);
    let x = TestTensor::normal(&mut rng(), from, layout);
    let method = (dtype, rule);
    let results = run(ctx, &x, method, case.scales, case.sums, case.gap);
    if ctx.backend() != Backend::Cpu {
        let cpu = Context::cpu().unwrap();
        let of_cpu = run(&cpu, &x, method, case.scales, case.sums, case.gap);
        assert!(results == of_cpu, "{method:?}: not the CPU's bits");
    }
    let [codes, scales, sums] = results;
    let x = x.values();
    let shared = x.len() / scales.len().max(1);
    for (i, scale) in scales.iter().enumerate() {
        let all = &x[i * shared..][..shared];
        let (expected, off) = reference::scale(all, rule, most);
        assert!((scale - expected).abs() <= off, "{scale}, not {expected}");
        let mean = reference::mean(all);
        for (x, code) in all.iter().zip(&codes[i * shared..]) {
            let right = match dtype {
                DType::F8E4M3 => {
                    let nearest = e4m3_nearest(f64::from(*x as f32 / *scale as f32));
                    *code == e4m3_value(nearest)
                }
                _ => reference::is_code(*code, *x, mean, *scale, rule, most),
            };
            assert!(right, "{dtype} {rule:?}: {x} by {scale} is {code}");
        }
    }
    let summed = x.len() / sums.len().max(1);
    for (i, sum) in sums.iter().enumerate() {
        let expected: f64 = codes[i * summed..][..summed].iter().sum();
        assert_eq!(*sum, expected);
    }
}

/// More rows than a GPU has threads for at once: by one warp, by two, four, and eight of an H200.
#[test]
fn bits_of_many_rows_are_the_cpus() {
    let cpu = Context::cpu().unwrap();
    for ctx in contexts() {
        for (rows, length) in [(13_000, 40), (3_200, 652), (1_600, 1_284), (1_000, 3_072)] {
            let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, length]));
            let run = |ctx| run(ctx, &x, (DType::I8, Rule::AbsMax), &[rows], &[rows], 0);
            let (results, expected) = (run(&ctx), run(&cpu));
            assert!(results == expected, "{rows} of {length}");
        }
    }
}

/// Rows of zeros, of what is not finite, and of the least numbers.
#[test]
fn what_has_no_scale_has_no_codes() {
    for ctx in contexts() {
        check_what_has_no_scale(&ctx);
    }
}

fn check_what_has_no_scale(ctx: &Context) {
    let least = f64::from(f32::from_bits(1));
    for (dtype, rule) in METHODS {
        let most = greatest(dtype);
        // As many of the least numbers as are a whole scale.
        let small = most.max(127.0) * least;
        let mut values = vec![0.0; 7 * 256];
        values[256..512].fill(1.0);
        for (row, odd) in [(2, f64::NAN), (3, f64::INFINITY), (4, f64::NEG_INFINITY)] {
            values[row * 256] = 2.0;
            values[row * 256 + 133] = odd;
        }
        values[5 * 256..6 * 256].fill(small);
        values[6 * 256..].fill(-0.0);
        let x = TestTensor::of(DType::F32, &[7, 256], &values);
        let [codes, scales, sums] = run(ctx, &x, (dtype, rule), &[7], &[7], 0);
        let is_finite = scales.iter().map(|s| s.is_finite()).collect::<Vec<_>>();
        assert_eq!(is_finite, [true, true, false, false, false, true, true]);
        let expected = [0.0, most, 0.0, 0.0, 0.0, most, 0.0];
        for (row, code) in expected.iter().enumerate() {
            let codes = &codes[row * 256..][..256];
            assert!(codes.iter().all(|c| c == code), "{dtype} {rule:?} {row}");
            if dtype.is_of_integers() {
                assert_eq!(sums[row], 256.0 * code, "{dtype} {rule:?} {row}");
            }
        }
        assert_eq!([scales[0], scales[6]], [0.0; 2]);
        assert_eq!(scales[5], small / most);
        // One for all is of all.
        let [codes, scales, _] = run(ctx, &x, (dtype, rule), &[1], &[7], 0);
        assert!(!scales[0].is_finite() && codes.iter().all(|c| *c == 0.0));
    }
}

#[test]
fn ties_go_to_even_codes() {
    let x = TestTensor::of(DType::F32, &[6], &[254.0, 1.0, 3.0, -1.0, -3.0, -254.0]);
    for ctx in contexts() {
        let [codes, scales, sums] = run(&ctx, &x, (DType::I8, Rule::AbsMax), &[1], &[1], 0);
        assert_eq!(codes, [127.0, 0.0, 2.0, 0.0, -2.0, -127.0]);
        assert_eq!((scales[0], sums[0]), (2.0, 0.0));
    }
    // Between 16 and 18, 18 and 20, 0 and the least code, that and the next.
    let values = [448.0, 17.0, -19.0, 2f64.powi(-10), -3.0 * 2f64.powi(-10)];
    let nearest = [448.0, 16.0, -20.0, 0.0, -(2f64.powi(-8))];
    let x = TestTensor::of(DType::F32, &[5], &values);
    for ctx in contexts() {
        let [codes, scales, _] = run(&ctx, &x, (DType::F8E4M3, Rule::AbsMax), &[1], &[1], 0);
        assert_eq!((codes, scales), (nearest.to_vec(), vec![1.0]));
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let contexts = [1, 2, 5].map(|num_threads| {
        let options = ContextOptions {
            num_threads,
            ..ContextOptions::default()
        };
        Context::new(&options).unwrap()
    });
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[300, 640]));
    for method in METHODS {
        for (scales, sums) in [
            (&[1][..], &[300][..]),
            (&[300], &[300]),
            (&[300, 5], &[300, 5]),
        ] {
            let run = |ctx| run(ctx, &x, method, scales, sums, 0);
            let [one, two, five] = contexts.each_ref().map(run);
            assert!(one == two && one == five, "{method:?} {scales:?}");
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

const MISUSE: &[Misuse<unsloth_quantize_params>] = &[
    (
        |p| p.rule = 3,
        INVALID,
        "quantize: rule is 3, allowed: 0 (absmax), 1 (absmean), 2 (threshold)",
    ),
    (
        |p| p.rule = 1,
        INVALID,
        "quantize: rule is 1, allowed for i8: 0",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "quantize: x is absent (rank 0), it is required",
    ),
    (
        |p| p.scale = absent(),
        INVALID,
        "quantize: scale is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I8 as u32,
        UNSUPPORTED,
        "quantize: x has dtype i8, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::F32 as u32,
        INVALID,
        "quantize: out has dtype f32, allowed: i8, ternary, f8e4m3",
    ),
    (
        |p| p.out.dtype = DType::Q4_0 as u32,
        UNSUPPORTED,
        "quantize: out has dtype q4_0, allowed: i8, ternary, f8e4m3",
    ),
    (
        |p| (p.x.shape[1], p.out.shape[1], p.out.dtype) = (64, 64, DType::Ternary as u32),
        INVALID,
        "quantize: out has rows of 64 elements, allowed for ternary: multiples of 128",
    ),
    (
        |p| p.out.shape[1] = 255,
        INVALID,
        "quantize: out has shape [2, 255], x has [2, 256]",
    ),
    (
        |p| p.out.strides = [0, 1, 0, 0, 0, 0],
        INVALID,
        "quantize: out has shape [2, 256] with strides [0, 1]: elements of an output may not overlap",
    ),
    (
        |p| (p.x.strides, p.x.flags) = ([1, 2, 0, 0, 0, 0], 1),
        INVALID,
        "quantize: x has stride 2 along its last dimension, allowed: 1",
    ),
    (
        |p| {
            (p.x.shape[1], p.out.shape[1]) = (16_909_321, 16_909_321);
            (p.x.strides, p.out.strides) = ([0; 6], [0; 6]);
        },
        INVALID,
        "quantize: x has rows of 16909321 elements, above the maximum 16909320",
    ),
    (
        |p| p.scale.dtype = DType::F16 as u32,
        INVALID,
        "quantize: scale has dtype f16, allowed: f32",
    ),
    (
        |p| p.scale.shape[0] = 3,
        INVALID,
        "quantize: scale has shape [3], expected [1], [2], or [2] and a divisor of 256",
    ),
    (
        |p| (p.scale.rank, p.scale.shape[1], p.scale.strides) = (2, 3, [0; 6]),
        INVALID,
        "quantize: scale has shape [2, 3], expected [1], [2], or [2] and a divisor of 256",
    ),
    (
        |p| {
            (p.scale.rank, p.scale.shape[1], p.scale.strides) = (2, 4, [0; 6]);
            p.out.dtype = DType::Ternary as u32;
        },
        INVALID,
        "quantize: scale is of groups of 64, allowed for ternary: multiples of 128",
    ),
    (
        |p| p.sum.shape[0] = 1,
        INVALID,
        "quantize: sum has shape [1], expected [2]",
    ),
    (
        |p| p.sum.dtype = DType::I64 as u32,
        INVALID,
        "quantize: sum has dtype i64, allowed: i32",
    ),
    (
        |p| p.out.dtype = DType::F8E4M3 as u32,
        UNSUPPORTED,
        "quantize: sum is there, codes of f8e4m3 are no integers to be summed",
    ),
    (
        |p| (p.out.dtype, p.rule) = (DType::F8E4M3 as u32, 2),
        INVALID,
        "quantize: rule is 2, allowed for f8e4m3: 0",
    ),
    (
        |p| p.out.data = p.x.data,
        INVALID,
        "quantize: out overlaps x",
    ),
    (
        |p| p.sum.data = p.scale.data,
        INVALID,
        "quantize: sum overlaps scale",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "quantize: data of out is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[2, 256])).upload(&memory);
        let poisoned =
            |dtype, shape: &[usize]| TestTensor::poisoned(dtype, contiguous(shape)).upload(&memory);
        let (out, scale) = (poisoned(DType::I8, &[2, 256]), poisoned(DType::F32, &[2]));
        let sum = poisoned(DType::I32, &[2]);
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_quantize_params = unsafe { abi::zeroed_params() };
        (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
        (good.scale, good.sum) = (c_tensor(&scale), c_tensor(&sum));
        let operation = Operation {
            name: "quantize",
            supported: unsloth_quantize_supported,
            forward: unsloth_quantize_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&out, &scale, &sum]);
    }
}
