//! Weights that are 8-bit floats whose scales lie apart: products with each dtype of `x`, in the
//! operations that take them, and arguments that must be refused. All of a weight's last row ends where
//! memory does, or some bytes before it.

use crate::common::abi::{self, Misuse, Operation, c_tensor, described};
use crate::common::guarded::AtEnd;
use crate::common::reference::linear::{linear as exact, linear_f32 as plain};
use crate::common::tensor::{e4m3_value as value, strided_rows};
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, contiguous,
    for_each_case, rng, rounded,
};
use rand::Rng;
use unsloth::ffi::linear::{
    unsloth_linear_forward, unsloth_linear_params, unsloth_linear_supported,
};
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::{unsloth_quantization, unsloth_tensor};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{self, Output, Params, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::Positions;
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::{Backend, Context, ContextOptions, DType, InOut, Layout, Stream, Workspace};

/// Rows of `x` up to which a GPU multiplies codes as they are.
const FEW_ROWS: usize = 64;

/// Codes of a matrix, and scales.
struct Matrix {
    memory: AtEnd,
    scales: Option<DeviceTensor>,
    layout: Layout,
    /// Scaled.
    values: Vec<f64>,
}

impl Matrix {
    /// Rows `gap` elements apart that end so many bytes before memory does. No scales are ones.
    fn random(
        ctx: &Context,
        [rows, columns]: [usize; 2],
        num_scales: usize,
        (gap, behind): (usize, usize),
    ) -> Matrix {
        let rng = &mut rng();
        let stride = columns + gap;
        // What lies between rows, and behind them, is no number.
        let mut all = vec![0x7f; (rows - 1) * stride + columns + behind];
        for row in all.chunks_mut(stride).take(rows) {
            for code in &mut row[..columns] {
                // Every code but those of NaN.
                *code = rng.random_range(0..0x7f) | rng.random::<u8>() & 0x80;
            }
        }
        let scales: Vec<f64> = (0..num_scales)
            .map(|_| f64::from(rng.random_range(-0.02..0.02f32)))
            .collect();
        Matrix::of(
            ctx,
            &all,
            Layout::strided(&[rows, columns], &[stride, 1]).unwrap(),
            &scales,
        )
    }

    fn of(ctx: &Context, codes: &[u8], layout: Layout, scales: &[f64]) -> Matrix {
        let [rows, columns] = [layout.dim(0), layout.dim(1)];
        let scale = |row: usize| match scales.len() {
            0 => 1.0,
            len => scales[row / (rows / len)],
        };
        let values = (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .map(|(row, column)| value(codes[row * layout.stride(0) + column]) * scale(row));
        Matrix {
            memory: AtEnd::new(ctx, codes),
            values: values.collect(),
            layout,
            scales: (!scales.is_empty())
                .then(|| TestTensor::of(DType::F32, &[scales.len()], scales).upload(ctx)),
        }
    }

    fn weights(&self) -> Weights<'_> {
        let mut weight = self.memory.view(DType::F8E4M3, self.layout);
        if let Some(scales) = &self.scales {
            weight = weight.with_scales(scales.view()).unwrap();
        }
        Weights { weight, bias: None }
    }

    /// The same matrix of f32.
    fn decoded(&self, ctx: &Context) -> DeviceTensor {
        TestTensor::of(DType::F32, self.layout.shape(), &self.values).upload(ctx)
    }
}

/// `x Wᵀ` in a dtype.
fn product(ctx: &Context, x: &TestTensor, weights: Weights<'_>, dtype: DType) -> TestTensor {
    let layout = contiguous(&[x.layout.dim(0), weights.weight.layout().dim(0)]);
    let x = x.upload(ctx);
    let mut out = TestTensor::poisoned(dtype, layout).upload(ctx);
    let mut params = Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        weights,
        output: Output::Write(out.view_mut()),
        workspace: Workspace::none(),
    };
    linear::supported(ctx, &params).unwrap();
    // The CPU takes what it lacks from its own.
    let size = match ctx.backend() {
        Backend::Cpu => 0,
        _ => linear::workspace_size(ctx, &params).unwrap(),
    };
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    if size > 0 {
        // SAFETY: the tensor's elements, which nothing else uses.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    }
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}

/// Rows of x, sizes of the weight, its scales, elements between its rows and bytes behind them.
type Case = (usize, [usize; 2], usize, (usize, usize));

/// Numbers of rows on both sides of each switch; lines of 16 bytes, parts of some, rows that begin
/// anywhere; more steps than a GPU's block has warps; tiles for each of its blocks.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 65] {
        cases.push((rows, [33, 96], 33, (0, 0)));
        cases.push((rows, [34, 77], 2, (0, rows % 3)));
    }
    for rows in [1, 8, 20] {
        cases.push((rows, [40, 4096], 1, (0, 0)));
        cases.push((rows, [2400, 512], 2400, (0, 0)));
        // Whole lines apart, but not whole themselves.
        cases.push((rows, [19, 200], 0, (24, 5)));
        cases.push((rows, [1, 130], 1, (0, 0)));
        cases.push((rows, [17, 1], 17, (3, 0)));
        // Wide tiles, of which the last is not whole.
        cases.push((rows, [100, 77], 4, (0, 2)));
        cases.push((rows, [99, 272], 99, (0, 0)));
    }
    cases.push((130, [67, 144], 67, (16, 0)));
    cases.push((600, [50, 200], 1, (0, 1)));
    // Tiles of many rows, more than a GPU's blocks, and of parts of a row that no step is left for.
    cases.push((600, [300, 272], 300, (0, 0)));
    cases.push((300, [129, 16], 129, (0, 0)));
    cases
}

#[test]
fn products_are_those_of_the_decoded_weight() {
    for ctx in contexts() {
        for_each_case(&cases(), |&(rows, shape, num_scales, place)| {
            let matrix = Matrix::random(&ctx, shape, num_scales, place);
            for dtype in FLOATS {
                let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, shape[1]]));
                assert_product_is_right(&ctx, &x, &matrix);
            }
        });
    }
}

/// Whole lines of 16 bytes apart, or anywhere.
#[test]
fn rows_of_x_may_lie_apart() {
    for ctx in contexts() {
        let matrix = Matrix::random(&ctx, [100, 272], 4, (0, 0));
        for gap in [8, 3] {
            for rows in [2, 8, 13, 33, 70] {
                for dtype in FLOATS {
                    let layout = strided_rows(&[rows, 272], gap);
                    let x = TestTensor::normal(&mut rng(), dtype, layout);
                    assert_product_is_right(&ctx, &x, &matrix);
                }
            }
        }
    }
}

fn assert_product_is_right(ctx: &Context, x: &TestTensor, matrix: &Matrix) {
    let (dtype, sizes) = (
        x.dtype,
        (x.layout.dim(0), x.layout.dim(1), matrix.layout.dim(0)),
    );
    let (x_values, w) = (x.values(), &matrix.values);
    let expected = exact(&x_values, w, sizes, None, None);
    // Of more rows a GPU's products are those of weights of the dtype of x.
    let of_dtype = match ctx.backend() != Backend::Cpu && sizes.0 > FEW_ROWS {
        true => rounded(dtype, w),
        false => w.clone(),
    };
    let plain = rounded(dtype, &plain(&x_values, &of_dtype, sizes, None, None));
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let terms = exact(&magnitudes(&x_values), &magnitudes(w), sizes, None, None);
    let most = terms.into_iter().fold(0.0, f64::max);
    let y = product(ctx, x, matrix.weights(), dtype).values();
    assert_flash_rule_of_sums("out", dtype, &y, &expected, &plain, most);
}

/// Each code by itself: the product with one is the number that it stands for, in every dtype.
#[test]
fn codes_are_widened_exactly() {
    let codes: Vec<u8> = (0..=255).collect();
    for ctx in contexts() {
        for k in [1, 16] {
            let of_rows: Vec<u8> = codes
                .iter()
                .flat_map(|code| (0..k).map(move |i| if i == k / 2 { *code } else { 0 }))
                .collect();
            let matrix = Matrix::of(&ctx, &of_rows, contiguous(&[256, k]), &[]);
            for dtype in FLOATS {
                for rows in [1, 9, 70] {
                    let x = TestTensor::of(dtype, &[rows, k], &vec![1.0; rows * k]);
                    let y = product(&ctx, &x, matrix.weights(), dtype).values();
                    for (i, y) in y.iter().enumerate() {
                        let expected = value(codes[i % 256]);
                        let both = y.is_nan() && expected.is_nan();
                        assert!(*y == expected || both, "{dtype} {rows} {k} {i}: {y}");
                    }
                }
            }
        }
    }
}

/// An x of f32 keeps all of its bits and its range.
#[test]
fn activations_are_not_rounded() {
    for ctx in contexts() {
        let codes = [0x38; 2 * 32]; // ones
        let matrix = Matrix::of(&ctx, &codes, contiguous(&[2, 32]), &[1.0, 0.5]);
        for odd in [f64::from(f32::MAX), f64::from(1.0f32.next_up()), 1e-30] {
            for rows in [1, 40] {
                let mut values = vec![0.0; rows * 32];
                values[5] = odd;
                let x = TestTensor::of(DType::F32, &[rows, 32], &values);
                let y = product(&ctx, &x, matrix.weights(), DType::F32).values();
                let odd = f64::from(odd as f32);
                assert_eq!(y[..2], [odd, odd / 2.0]);
                assert!(y[2..].iter().all(|y| *y == 0.0));
            }
        }
    }
}

/// f32 is what the dtype of `x` is rounded from.
#[test]
fn outputs_may_be_f32() {
    for ctx in contexts() {
        for rows in [1, 8, 9, 33, FEW_ROWS] {
            let matrix = Matrix::random(&ctx, [35, 96], 35, (0, 0));
            for dtype in [DType::F16, DType::Bf16] {
                let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 96]));
                let wide = product(&ctx, &x, matrix.weights(), DType::F32);
                let narrow = product(&ctx, &x, matrix.weights(), dtype);
                assert!(
                    rounded(dtype, &wide.values()) == narrow.values(),
                    "{dtype} {rows}"
                );
                assert!(wide.values() != narrow.values(), "{dtype} {rows}");
            }
        }
    }
}

#[test]
fn what_is_no_number_shows() {
    for ctx in contexts() {
        let mut codes = vec![0x38; 20 * 512];
        codes[3 * 512 + 100] = 0xff;
        let matrix = Matrix::of(&ctx, &codes, contiguous(&[20, 512]), &[0.5]);
        for odd in [f64::NAN, f64::INFINITY] {
            for rows in [3, 8, 40, 70] {
                let mut values = vec![1.0; rows * 512];
                values[512 + 77] = odd;
                for dtype in FLOATS {
                    let x = TestTensor::of(dtype, &[rows, 512], &values);
                    let y = product(&ctx, &x, matrix.weights(), dtype).values();
                    for (i, y) in y.iter().enumerate() {
                        let expected = i / 20 != 1 && i % 20 != 3;
                        assert_eq!(y.is_finite(), expected, "{dtype} {rows} {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn bits_depend_on_neither_threads_nor_neighbours() {
    let contexts = [1, 2, 5].map(|num_threads| {
        let options = ContextOptions {
            num_threads,
            ..ContextOptions::default()
        };
        Context::new(&options).unwrap()
    });
    let matrix = Matrix::random(&contexts[0], [300, 700], 300, (0, 0));
    for rows in [1, 7, 32, 100] {
        let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, 700]));
        let run = |ctx| product(ctx, &x, matrix.weights(), DType::F32).bits();
        let [one, two, five] = contexts.each_ref().map(run);
        assert!(one == two && one == five, "{rows}");
        if rows <= 32 {
            let last = &x.values()[(rows - 1) * 700..];
            let last = TestTensor::of(DType::F32, &[1, 700], last);
            let alone = product(&contexts[0], &last, matrix.weights(), DType::F32).bits();
            assert!(one.ends_with(&alone), "{rows}");
        }
    }
}

/// `|y - expected|² / |expected|²`.
fn nmse(y: &[f64], expected: &[f64]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    squares(&mut y.iter().zip(expected).map(|(y, e)| y - e))
        / squares(&mut expected.iter().copied())
}

/// A block added to a constant.
fn mlp_of(ctx: &Context, x: &TestTensor, gate_up: GateUp<'_>, down: Weights<'_>) -> Vec<f64> {
    let dtype = x.dtype;
    let x = x.upload(ctx);
    let constant = vec![0.5; x.layout.num_elements()];
    let mut out = TestTensor::of(dtype, x.layout.shape(), &constant).upload(ctx);
    let mut params = mlp::Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        gate_up,
        activation: Activation::Silu,
        intermediate_norm: None,
        down,
        output: Output::Add(InOut::InPlace(out.view_mut())),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    let size = mlp::workspace_size(ctx, &params).unwrap();
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: the tensor's elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output().values()
}

fn plain_weights(weight: &DeviceTensor) -> Weights<'_> {
    let weight = weight.view();
    Weights { weight, bias: None }
}

/// Gate and up may be one matrix, or one of them of another dtype.
#[test]
fn mlps_are_those_of_the_decoded_weights() {
    for ctx in contexts() {
        let both = Matrix::random(&ctx, [512, 128], 2, (0, 0));
        let down = Matrix::random(&ctx, [128, 256], 128, (0, 0));
        let (both_plain, down_plain) = (both.decoded(&ctx), down.decoded(&ctx));
        let half = |start| {
            let weight = both.weights().weight.narrowed(0, start, 256).unwrap();
            Weights { weight, bias: None }
        };
        let plain_half = |start| {
            let weight = both_plain.view().narrowed(0, start, 256).unwrap();
            Weights { weight, bias: None }
        };
        for (dtype, rows, most) in [
            (DType::F32, 1, 1e-11),
            (DType::F32, 40, 1e-11),
            (DType::F32, 70, 1e-11),
            (DType::F16, 3, 1e-6),
            (DType::Bf16, 40, 1e-4),
            (DType::F16, 70, 1e-6),
        ] {
            // No number is beyond f16.
            let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 128]));
            let scaled: Vec<f64> = x.values().iter().map(|x| x / 8.0).collect();
            let x = TestTensor::of(dtype, &[rows, 128], &scaled);
            let wide = TestTensor::of(DType::F32, x.layout.shape(), &x.values());
            let plain = GateUp::Packed {
                weights: plain_weights(&both_plain),
                order: GateOrder::GateFirst,
            };
            let expected = mlp_of(&ctx, &wide, plain, plain_weights(&down_plain));
            let packed = GateUp::Packed {
                weights: both.weights(),
                order: GateOrder::GateFirst,
            };
            let apart = |up| GateUp::Apart { gate: half(0), up };
            for gate_up in [packed, apart(half(256)), apart(plain_half(256))] {
                let y = mlp_of(&ctx, &x, gate_up, down.weights());
                let error = nmse(&y, &expected);
                assert!(error < most, "{rows} {dtype}: {error}");
            }
        }
    }
}

/// Four heads of 64 on two, 256 columns.
fn attention_of(ctx: &Context, x: &TestTensor, [qkv, out_weight]: [Weights<'_>; 2]) -> Vec<f64> {
    let x = x.upload(ctx);
    let mut out = TestTensor::poisoned(x.dtype, x.layout).upload(ctx);
    let mut params = attention_block::Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        v_head_dim: 64,
        projections: Projections::Packed(qkv),
        q_norm: None,
        k_norm: None,
        norm_weight_offset: 0.0,
        norm_epsilon: 0.0,
        rotation: None,
        positions: Positions::From(0),
        cache: None,
        cu_seqlens: None,
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        attended_norm: None,
        out_projection: out_weight,
        output: Output::Write(out.view_mut()),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: the tensor's elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output().values()
}

#[test]
fn attention_blocks_are_those_of_the_decoded_weights() {
    for ctx in contexts() {
        let qkv = Matrix::random(&ctx, [512, 256], 512, (0, 0));
        let out = Matrix::random(&ctx, [256, 256], 1, (0, 0));
        for (dtype, rows, most) in [
            (DType::F32, 3, 1e-9),
            (DType::F16, 3, 1e-5),
            (DType::F16, 70, 1e-5),
        ] {
            // Scores are not far from one another.
            let scaled = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 256]));
            let scaled: Vec<f64> = scaled.values().iter().map(|x| x / 256.0).collect();
            let x = TestTensor::of(dtype, &[rows, 256], &scaled);
            let wide = TestTensor::of(DType::F32, x.layout.shape(), &x.values());
            let decoded = [&qkv, &out].map(|matrix| matrix.decoded(&ctx));
            let expected = attention_of(&ctx, &wide, decoded.each_ref().map(plain_weights));
            let y = attention_of(&ctx, &x, [&qkv, &out].map(Matrix::weights));
            let error = nmse(&y, &expected);
            assert!(error < most, "{rows} {dtype}: {error}");
        }
    }
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
        |p| p.weight.dtype = DType::F8E5M2 as u32,
        UNSUPPORTED,
        "linear: weight.quantization is set: only weights that are i8, ternary or f8e4m3, and keys and values that are f8e4m3, take scales that lie apart",
    ),
    (
        |p| p.x.dtype = DType::F8E4M3 as u32,
        UNSUPPORTED,
        "linear: x has dtype f8e4m3, allowed: f32, f16, bf16",
    ),
    (
        |p| p.out.dtype = DType::F8E4M3 as u32,
        INVALID,
        "linear: out has dtype f8e4m3, x has f32",
    ),
    (
        |p| spoil(p, |q| q.scale.shape[0] = 2),
        INVALID,
        "linear: weight has 2 scales, their number must divide its 3 rows",
    ),
    (
        |p| spoil(p, |q| q.scale.dtype = DType::F16 as u32),
        INVALID,
        "linear: weight.scales has dtype f16, allowed: f32",
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
        let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[2, 40])).upload(&memory);
        let out = TestTensor::poisoned(DType::F32, contiguous(&[2, 3])).upload(&memory);
        let scales = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[3])).upload(&memory);
        let bytes = AtEnd::new(&memory, &[0x38; 3 * 40]);
        let weight = bytes.view(DType::F8E4M3, contiguous(&[3, 40]));
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
        good.weight = described(data, DType::F8E4M3, weight.layout());
        good.weight.quantization = &quantization;
        let operation = Operation {
            name: "linear",
            supported: unsloth_linear_supported,
            forward: unsloth_linear_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&out]);
    }
}
