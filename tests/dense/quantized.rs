//! Weights that are integers of 8 or 2 bits whose scales lie apart: integers are summed exactly, so results are known
//! to the bit; arguments that must be refused. All of a weight's last row ends where memory does.

use super::blocks::{added, product};
use crate::common::abi::{self, Misuse, Operation, c_tensor, described};
use crate::common::guarded::AtEnd;
use crate::common::{DeviceTensor, FLOATS, TestTensor, contexts, contiguous, for_each_case, rng};
use rand::Rng;
use unsloth::ffi::linear::{
    unsloth_linear_forward, unsloth_linear_params, unsloth_linear_supported,
};
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::{unsloth_quantization, unsloth_tensor};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::quantize::{self, Rule};
use unsloth::ops::swiglu::{self, Activation, GateOrder};
use unsloth::{Backend, Context, ContextOptions, DType, InOut, Layout, Stream, Workspace};

/// Codes of a matrix, and scales.
struct Matrix {
    memory: AtEnd,
    scales: Vec<f32>,
    of_device: DeviceTensor,
    dtype: DType,
    layout: Layout,
    codes: Vec<i64>,
}

impl Matrix {
    /// Rows `gap` blocks apart.
    fn random(
        ctx: &Context,
        dtype: DType,
        [rows, columns]: [usize; 2],
        num_scales: usize,
        gap: usize,
    ) -> Matrix {
        let (len, bytes) = dtype.block();
        let stride = columns + gap * len;
        let elements = (rows - 1) * stride + columns;
        let rng = &mut rng();
        let all: Vec<u8> = (0..elements / len * bytes).map(|_| rng.random()).collect();
        let code = |i: usize| match dtype {
            DType::Ternary => {
                let byte = all[i / 128 * 32 + i % 32];
                i64::from(byte >> (2 * (i % 128 / 32)) & 3) - 1
            }
            _ => i64::from(all[i].cast_signed()),
        };
        let codes = (0..rows)
            .flat_map(|row| (0..columns).map(move |column| row * stride + column))
            .map(code)
            .collect();
        let scales: Vec<f32> = (0..num_scales)
            .map(|_| rng.random_range(-0.02..0.02f32))
            .collect();
        let values: Vec<f64> = scales.iter().map(|s| f64::from(*s)).collect();
        Matrix {
            memory: AtEnd::new(ctx, &all),
            of_device: TestTensor::of(DType::F32, &[num_scales], &values).upload(ctx),
            scales,
            dtype,
            layout: Layout::strided(&[rows, columns], &[stride, 1]).unwrap(),
            codes,
        }
    }

    fn weights(&self) -> Weights<'_> {
        let mut weight = self.memory.view(self.dtype, self.layout);
        if !self.scales.is_empty() {
            weight = weight.with_scales(self.of_device.view()).unwrap();
        }
        Weights { weight, bias: None }
    }

    fn scale(&self, row: usize) -> f32 {
        match self.scales.len() {
            0 => 1.0,
            len => self.scales[row / (self.layout.dim(0) / len)],
        }
    }
}

/// Codes and scales of rows, by the operation that makes them.
fn rounded(ctx: &Context, x: &TestTensor) -> (Vec<i64>, Vec<f32>) {
    let device = x.upload(ctx);
    let mut out = TestTensor::poisoned(DType::I8, x.layout).upload(ctx);
    let rows = x.layout.dim(0);
    let mut scale = TestTensor::poisoned(DType::F32, contiguous(&[rows])).upload(ctx);
    let params = quantize::Params {
        x: device.view(),
        out: out.view_mut(),
        scale: scale.view_mut(),
        sum: None,
        rule: Rule::AbsMax,
        workspace: Workspace::none(),
    };
    quantize::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let codes = out.download().values().into_iter().map(|c| c as i64);
    let scales = scale.download().values().into_iter().map(|s| s as f32);
    (codes.collect(), scales.collect())
}

/// The same by definition: integers, then one product of scales and one with them.
fn expected(ctx: &Context, x: &TestTensor, matrix: &Matrix) -> Vec<f64> {
    let (codes, scales) = rounded(ctx, x);
    let k = x.layout.dim(1);
    let mut out = Vec::new();
    for (x, scale) in codes.chunks(k).zip(scales) {
        for (row, w) in matrix.codes.chunks(k).enumerate() {
            let sum: i64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            out.push(f64::from((matrix.scale(row) * scale) * sum as f32));
        }
    }
    out
}

fn threads(num_threads: usize) -> Context {
    let options = ContextOptions {
        num_threads,
        ..ContextOptions::default()
    };
    Context::new(&options).unwrap()
}

#[test]
fn products_are_exact() {
    let all = [1, 5].map(threads).into_iter().chain(contexts());
    // Rows of x, sizes of the weight, its scales, blocks between its rows.
    let cases = [
        (1, [1, 128], 1, 0),
        (2, [33, 384], 33, 1),
        (3, [18, 256], 3, 0),
        (5, [17, 2560], 0, 2),
        (33, [40, 384], 4, 0),
        (70, [16, 128], 16, 1),
        // Of few rows more tiles than a GPU has multiprocessors; rows that end within what is read at a time.
        (4, [4300, 256], 1, 0),
        // Rows of which a thread has one part, two, or more than it holds at once.
        (1, [40, 3968], 1, 0),
        (2, [24, 3072], 1, 0),
        (1, [40, 6912], 1, 0),
        (1, [24, 14336], 1, 0),
        (1, [24, 20480], 1, 1),
        (8, [40, 1152], 40, 0),
        // Of more: tiles of all sizes, whole ones, parted ones and shares of all.
        (9, [1000, 640], 1000, 0),
        (16, [136, 8192], 1, 0),
        (13, [2600, 1408], 2600, 0),
        (10, [17000, 256], 1, 0),
        (50, [300, 2944], 2, 0),
        (130, [264, 1280], 8, 0),
        (257, [144, 768], 1, 0),
        (520, [264, 128], 0, 0),
    ];
    let cpu = Context::cpu().unwrap();
    for ctx in all {
        for dtype in DType::INTEGERS {
            for_each_case(&cases, |&(rows, shape, num_scales, gap)| {
                // Codes of 8 bits are in rows of any length.
                let odd = usize::from(dtype == DType::I8) * (rows % 3) * 5;
                let [n, k] = [shape[0], shape[1] - odd];
                let matrix = Matrix::random(&ctx, dtype, [n, k], num_scales, gap);
                for of_x in FLOATS {
                    let x = TestTensor::normal(&mut rng(), of_x, contiguous(&[rows, k]));
                    let expected = expected(&cpu, &x, &matrix);
                    let expected = TestTensor::of(of_x, &[rows, n], &expected);
                    let y = product(&ctx, &x, matrix.weights());
                    assert!(y.bits() == expected.bits(), "{dtype} by {of_x}");
                }
            });
        }
    }
}

/// A GPU may part many rows in two launches, and the last tiles among all blocks, of which two may copy rows for each
/// other: all have the bits that they have by themselves.
#[test]
fn many_rows_are_exact() {
    for ctx in contexts() {
        if ctx.backend() == Backend::Cpu {
            continue;
        }
        let k = 33 * 256;
        let sizes = [
            (33 * 128, &[144, 535, 1100][..]),
            (36 * 128, &[512, 535, 1024]),
        ];
        for (dtype, (n, all)) in DType::INTEGERS
            .into_iter()
            .flat_map(|dtype| sizes.map(|of| (dtype, of)))
        {
            let matrix = Matrix::random(&ctx, dtype, [n, k], n, 0);
            for &rows in all {
                let x = TestTensor::normal(&mut rng(), DType::Bf16, contiguous(&[rows, k]));
                let residual = TestTensor::normal(&mut rng(), DType::Bf16, contiguous(&[rows, n]));
                let y = product(&ctx, &x, matrix.weights()).values();
                let sum = added(&ctx, &x, matrix.weights(), &residual).values();
                for first in (0..rows).step_by(64) {
                    let len = 64.min(rows - first);
                    let part = |of: &TestTensor, columns: usize| {
                        let of = &of.values()[first * columns..][..len * columns];
                        TestTensor::of(DType::Bf16, &[len, columns], of)
                    };
                    let (x, residual) = (part(&x, k), part(&residual, n));
                    let some = product(&ctx, &x, matrix.weights()).values();
                    let range = first * n..(first + len) * n;
                    assert!(some == y[range.clone()], "{dtype} {rows}: from {first}");
                    let some = added(&ctx, &x, matrix.weights(), &residual).values();
                    assert!(some == sum[range], "{dtype} {rows}: added from {first}");
                }
            }
        }
    }
}

/// Elements that are no numbers give none, in their rows alone.
#[test]
fn what_is_no_number_shows() {
    for ctx in contexts() {
        let matrix = Matrix::random(&ctx, DType::Ternary, [20, 128], 20, 0);
        for odd in [f64::NAN, f64::INFINITY] {
            let mut values = vec![1.0; 3 * 128];
            values[128 + 77] = odd;
            let x = TestTensor::of(DType::F32, &[3, 128], &values);
            let y = product(&ctx, &x, matrix.weights()).values();
            for (i, y) in y.iter().enumerate() {
                assert_eq!(y.is_finite(), i / 20 != 1, "{i}");
            }
        }
    }
}

/// A block is its products and activation, whether gate and up are one matrix or two: to the bit on
/// the CPU. On a GPU products activate with instructions of their own, and what they round otherwise
/// may become another code.
#[test]
fn mlps_are_made_of_exact_products() {
    for ctx in contexts() {
        check_mlp(&ctx);
    }
}

fn check_mlp(ctx: &Context) {
    let both = Matrix::random(ctx, DType::Ternary, [512, 128], 2, 0);
    let down = Matrix::random(ctx, DType::I8, [128, 256], 128, 0);
    let whole = both.weights();
    let half = |start| Weights {
        weight: whole.weight.narrowed(0, start, 256).unwrap(),
        bias: None,
    };
    for rows in [1, 40] {
        let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, 128]));
        let [gate, up] = [0, 256].map(|start| product(ctx, &x, half(start)).upload(ctx));
        let mut activated = TestTensor::poisoned(DType::F32, gate.layout).upload(ctx);
        let params = swiglu::Params {
            tensors: swiglu::Tensors::Apart {
                gate: InOut::Apart {
                    input: gate.view(),
                    output: activated.view_mut(),
                },
                up: up.view(),
            },
            activation: Activation::Silu,
        };
        swiglu::forward(ctx, &params, Stream::DEFAULT).unwrap();
        let expected = product(ctx, &activated.download(), down.weights());
        let apart = GateUp::Apart {
            gate: half(0),
            up: half(256),
        };
        let packed = GateUp::Packed {
            weights: whole,
            order: GateOrder::GateFirst,
        };
        for gate_up in [apart, packed] {
            let device = x.upload(ctx);
            let mut out = TestTensor::poisoned(DType::F32, x.layout).upload(ctx);
            let mut params = mlp::Params {
                x_norm: None,
                parallel: None,
                x: device.view(),
                gate_up,
                activation: Activation::Silu,
                intermediate_norm: None,
                down: down.weights(),
                output: Output::Write(out.view_mut()),
                workspace: Workspace::none(),
                gate_up_out: None,
            };
            let size = mlp::workspace_size(ctx, &params).unwrap();
            let memory = TestTensor::poisoned(DType::F32, contiguous(&[size / 4])).upload(ctx);
            // SAFETY: the tensor's elements, which nothing else uses.
            params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
            mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
            let out = out.download_output();
            if ctx.backend() == Backend::Cpu {
                assert!(out.bits() == expected.bits(), "{rows}");
                continue;
            }
            let expected = expected.values();
            let most = expected.iter().fold(0.0, |most: f64, y| most.max(y.abs()));
            for (y, expected) in out.values().iter().zip(&expected) {
                assert!(
                    (y - expected).abs() <= 0.02 * most,
                    "{rows}: {y}, not {expected}"
                );
            }
        }
    }
}

/// Rows are not taken from their scales; what is summed as integers is not mixed with what is not.
#[test]
fn scales_go_with_their_rows() {
    let ctx = Context::cpu().unwrap();
    let matrix = Matrix::random(&ctx, DType::Ternary, [12, 128], 3, 0);
    let error = matrix.weights().weight.narrowed(0, 2, 4).unwrap_err();
    let expected = "tensor: quantization has 3 scales, rows 2 to 6 have none of their own";
    assert_eq!(error.to_string(), expected);
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[1, 128])).upload(&ctx);
    let floats = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[12, 128])).upload(&ctx);
    let down = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[128, 12])).upload(&ctx);
    let mut out = TestTensor::poisoned(DType::F32, contiguous(&[1, 128])).upload(&ctx);
    let plain = |weight| Weights { weight, bias: None };
    let params = mlp::Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        gate_up: GateUp::Apart {
            gate: matrix.weights(),
            up: plain(floats.view()),
        },
        activation: Activation::Silu,
        intermediate_norm: None,
        down: plain(down.view()),
        output: Output::Add(InOut::InPlace(out.view_mut())),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    let error = mlp::supported(&ctx, &params).unwrap_err();
    let expected =
        "mlp: up_weight has dtype f32, gate_weight has ternary: both are i8 or ternary, or none";
    assert_eq!(error.to_string(), expected);
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

/// Another quantization, of changed scales, that lives as long as the test.
fn spoil(p: &mut unsloth_linear_params, change: impl Fn(&mut unsloth_quantization)) {
    // SAFETY: the good arguments point to one.
    let mut changed = unsafe { p.weight.quantization.read() };
    change(&mut changed);
    p.weight.quantization = Box::leak(Box::new(changed));
}

const MISUSE: &[Misuse<unsloth_linear_params>] = &[
    (
        |p| (p.x.shape[1], p.weight.shape[1]) = (64, 64),
        INVALID,
        "linear: weight has rows of 64 elements, allowed for ternary: multiples of 128",
    ),
    (
        |p| {
            (p.x.shape[1], p.weight.shape[1], p.weight.dtype) =
                (132_105, 132_105, DType::I8 as u32);
            (p.x.strides, p.weight.strides) = ([0; 6], [0; 6]);
        },
        INVALID,
        "linear: weight has rows of 132105 elements, above the maximum 132104 of i8",
    ),
    (
        |p| p.weight.flags = 2,
        UNSUPPORTED,
        "linear: weight has dtype ternary and float_activations, which it has no products of",
    ),
    (
        |p| p.weight.dtype = DType::Q4_0 as u32,
        UNSUPPORTED,
        "linear: weight.quantization is set: only weights that are i8, ternary or f8e4m3, and keys and values that are f8e4m3, take scales that lie apart",
    ),
    (
        |p| p.x.quantization = p.weight.quantization,
        UNSUPPORTED,
        "linear: x.quantization is set: only weights that are i8, ternary or f8e4m3, and keys and values that are f8e4m3, take scales that lie apart",
    ),
    (
        |p| spoil(p, |q| q.scale.shape[0] = 2),
        INVALID,
        "linear: weight has 2 scales, their number must divide its 3 rows",
    ),
    (
        |p| spoil(p, |q| q.scale.dtype = DType::Bf16 as u32),
        INVALID,
        "linear: weight.scales has dtype bf16, allowed: f32",
    ),
    (
        |p| {
            spoil(p, |q| {
                (q.scale.rank, q.scale.shape[1], q.scale.strides) = (2, 1, [0; 6])
            })
        },
        UNSUPPORTED,
        "linear: weight.scales has shape [3, 1] with strides [1, 1], allowed: one contiguous dimension",
    ),
    (
        |p| spoil(p, |q| q.zero = q.scale),
        UNSUPPORTED,
        "linear: weight.quantization.zero is there: codes of this version are 0 for zero",
    ),
    (
        |p| spoil(p, |q| q.struct_size = 8),
        INVALID,
        "linear: weight.quantization.struct_size is 8, at least 280 is needed",
    ),
    (
        |p| spoil(p, |q| q.reserved = 1),
        INVALID,
        "linear: weight.quantization.reserved is 1, allowed: 0",
    ),
    (
        |p| spoil(p, |q| q.scale.data = std::ptr::null_mut()),
        UNSLOTH_STATUS_NULL_POINTER,
        "linear: data of scales is NULL",
    ),
    (
        |p| {
            let data = p.out.data;
            spoil(p, |q| q.scale.data = data);
        },
        INVALID,
        "linear: out overlaps scales",
    ),
    (
        |p| p.weight.data = p.out.data,
        INVALID,
        "linear: out overlaps weight",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        check_misuse(&memory, &ctx);
    }
}

fn check_misuse(memory: &Context, ctx: &abi::Handle) {
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[2, 256])).upload(memory);
    let out = TestTensor::poisoned(DType::F32, contiguous(&[2, 3])).upload(memory);
    let scales = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[3])).upload(memory);
    let bytes = AtEnd::new(memory, &[0x1b; 3 * 64]);
    let weight = bytes.view(DType::Ternary, contiguous(&[3, 256]));
    let quantization = unsloth_quantization {
        struct_size: size_of::<unsloth_quantization>() as u32,
        reserved: 0,
        scale: c_tensor(&scales),
        zero: unsloth_tensor::default(),
    };
    // SAFETY: integers and pointers, size first.
    let mut good: unsloth_linear_params = unsafe { abi::zeroed_params() };
    (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
    let data = weight.as_ptr().cast_mut().cast();
    good.weight = described(data, DType::Ternary, weight.layout());
    good.weight.quantization = &quantization;
    // On a GPU x is rounded into the workspace.
    let workspace = TestTensor::poisoned(DType::F32, contiguous(&[4096])).upload(memory);
    good.workspace = c_tensor(&workspace).data;
    good.workspace_size = 4096 * size_of::<f32>();
    let operation = Operation {
        name: "linear",
        supported: unsloth_linear_supported,
        forward: unsloth_linear_forward,
    };
    operation.check_on(ctx, good, MISUSE, &[&out]);
}
