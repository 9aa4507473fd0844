//! LayerNorm, one pass over memory, with the row machinery of [`norm`](crate::norm).
//!
//! Two kernels. `rows` moves 16 bytes per access, with gains and biases of the dtype of x or f32; `any` takes what is misaligned, of
//! odd length, longer, or has gains or biases of a third dtype: it reads rows element by element, three times. Both subtract the mean
//! before they square: the variance of a row far from zero keeps its digits.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::norm::*;
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    sizes: Sizes,
    x: Strides,
    out: Strides,
    /// A `contract::Float` each, or 0 for none.
    weight_dtype: u32,
    bias_dtype: u32,
    epsilon: f32,
    /// 1 / elements of a row.
    inverse_length: f32,
}

/// Without gains, or without biases, `weight` or `bias` is any memory of a row's size. Grid: rows, in groups of as many as a block
/// has threads for.
#[cube]
fn layer_norm_rows<F: Float, N: Size>(
    x: &Array<Words>,
    weight: &Array<Words>,
    bias: &Array<Words>,
    out: &mut Array<Vector<F, N>>,
    args: Args,
    #[comptime] own: Dtype,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) {
    let parts = comptime!(N::value() as u32 / 4);
    let lane = UNIT_POS_X % threads;
    let mut row = CUBE_POS_X;
    let mut stored = args.length;
    take_share(&mut row, &mut stored, args.rows, threads);
    let index = row_index(row, args.sizes);
    let codes = comptime!(Codes {
        like_x: own.code(),
        f32: Dtype::F32.code(),
    });

    // Everything is on its way before anything is waited for; of many vectors, or threads, gains and biases
    // come later: registers for them would be missing.
    let from = row_start(index, args.x);
    let mut xs = Sequence::<Words>::new();
    load_row(x, from, lane, args.length, &mut xs, threads, vectors);
    let early = comptime!(vectors <= 2 && threads < 1024);
    let mut weights = Sequence::<Words>::new();
    let mut biases = Sequence::<Words>::new();
    if early {
        #[unroll]
        for k in 0..vectors {
            let i = min(lane + k * threads, args.length - 1u32);
            weights.push(load_gains(weight, args.weight_dtype, i, parts, codes));
            biases.push(load_gains(bias, args.bias_dtype, i, parts, codes));
        }
    }

    let mut values = Sequence::<Vector<f32, N>>::new();
    let mut sums = Array::<f32>::new(vectors as usize);
    #[unroll]
    for k in 0..vectors {
        let value = unpack::<F, N>(*xs.index(k as usize));
        let mut sum = value[0];
        #[unroll]
        for j in 1..N::value() {
            sum += value[j];
        }
        if lane + k * threads >= args.length {
            sum = 0.0f32;
        }
        sums[k as usize] = sum;
        values.push(value);
    }
    let mean = row_sum(&mut sums, threads, vectors) * args.inverse_length;

    let mut deviations = Sequence::<Vector<f32, N>>::new();
    let mut squares = Array::<f32>::new(vectors as usize);
    #[unroll]
    for k in 0..vectors {
        let d = *values.index(k as usize) - Vector::new(mean);
        let mut sum = d[0] * d[0];
        #[unroll]
        for j in 1..N::value() {
            sum = fma(d[j], d[j], sum);
        }
        if lane + k * threads >= args.length {
            sum = 0.0f32;
        }
        squares[k as usize] = sum;
        deviations.push(d);
    }
    let variance = row_sum(&mut squares, threads, vectors) * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();

    let to = row_start(index, args.out) + lane as usize;
    #[unroll]
    for k in 0..vectors {
        let i = lane + k * threads;
        if i < stored {
            let first = if early {
                *weights.index(k as usize)
            } else {
                load_gains(weight, args.weight_dtype, i, parts, codes)
            };
            let gains_here = gains::<F, N>(first, weight, args.weight_dtype, 0.0f32, i, codes);
            let mut y = *deviations.index(k as usize) * (gains_here * Vector::new(scale));
            if args.bias_dtype != 0u32 {
                let first = if early {
                    *biases.index(k as usize)
                } else {
                    load_gains(bias, args.bias_dtype, i, parts, codes)
                };
                y += gains::<F, N>(first, bias, args.bias_dtype, 0.0f32, i, codes);
            }
            out[to + comptime!((k * threads) as usize)] = Vector::cast_from(y);
        }
    }
}

/// Element `i` of a parameter of any dtype, in halves of words: f32 has two.
#[cube]
fn parameter(of: &Array<u16>, dtype: u32, i: u32) -> f32 {
    let i = i as usize;
    if dtype == comptime!(Dtype::F32.code()) {
        let low = u32::cast_from(of[2 * i]);
        let high = u32::cast_from(of[2 * i + 1]);
        f32::reinterpret(low | (high << 16u32))
    } else if dtype == comptime!(Dtype::F16.code()) {
        f32::cast_from(half::f16::reinterpret(of[i]))
    } else {
        f32::cast_from(half::bf16::reinterpret(of[i]))
    }
}

/// Grid: as of [`layer_norm_rows`].
#[cube]
fn layer_norm_any<F: Float>(
    x: &Array<F>,
    weight: &Array<u16>,
    bias: &Array<u16>,
    out: &mut Array<F>,
    args: Args,
    #[comptime] threads: u32,
) {
    let row = CUBE_POS_X * comptime!(rows_per_block(threads)) + UNIT_POS_X / threads;
    let mut length = args.length;
    if row >= args.rows {
        length = 0u32;
    }
    let index = row_index(row, args.sizes);
    let from = row_start(index, args.x);
    let to = row_start(index, args.out);
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = 0.0f32;
    let mut i = UNIT_POS_X % threads;
    while i < length {
        sums[0] += f32::cast_from(x[from + i as usize]);
        i += threads;
    }
    let mean = row_sum(&mut sums, threads, 1u32) * args.inverse_length;
    let mut squares = Array::<f32>::new(1usize);
    squares[0] = 0.0f32;
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let d = f32::cast_from(x[from + i as usize]) - mean;
        squares[0] = fma(d, d, squares[0]);
        i += threads;
    }
    let variance = row_sum(&mut squares, threads, 1u32) * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();
    // Each thread overwrites only elements that it alone reads, so the tensors may be the same.
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let mut y = (f32::cast_from(x[from + i as usize]) - mean) * scale;
        if args.weight_dtype != 0u32 {
            y *= parameter(weight, args.weight_dtype, i);
        }
        if args.bias_dtype != 0u32 {
            y += parameter(bias, args.bias_dtype, i);
        }
        out[to + i as usize] = F::cast_from(y);
        i += threads;
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, U32};
    ArgsExpand {
        rows: b.scalar("rows", U32).into(),
        length: b.scalar("length", U32).into(),
        sizes: rows::sizes(b),
        x: rows::strides(b, ["x_0", "x_1", "x_2"]),
        out: rows::strides(b, ["out_0", "out_1", "out_2"]),
        weight_dtype: b.scalar("weight_dtype", U32).into(),
        bias_dtype: b.scalar("bias_dtype", U32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

/// `vectors` 0: the kernel that takes anything.
fn kernel(dtype: Dtype, threads: u32, vectors: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => {
        let any = vectors == 0;
        let (of_x, of_out, of_parameters) = match any {
            true => (b.type_of::<F>(), b.type_of::<F>(), b.type_of::<u16>()),
            false => (b.type_of::<Words>(), b.type_of::<Vector<F, N>>(), b.type_of::<Words>()),
        };
        // x may be overwritten in place, hence not `read`.
        let x = b.write("x", of_x);
        let weight = b.read("weight", of_parameters);
        let bias = b.read("bias", of_parameters);
        let out = b.write("out", of_out);
        let args = args(&mut b);
        if any {
            layer_norm_any::expand::<F>(
                b.scope(), x.into(), weight.into(), bias.into(), out.into(), args, threads,
            );
        } else {
            layer_norm_rows::expand::<F, N>(
                b.scope(), x.into(), weight.into(), bias.into(), out.into(), args, dtype, threads, vectors,
            );
        }
    });
    let name = match vectors {
        0 => format!("layer_norm_any_{}_{threads}", dtype.name()),
        _ => format!("layer_norm_{}_{threads}x{vectors}", dtype.name()),
    };
    let choices = vec![
        ("dtype", dtype.code()),
        ("threads", threads),
        ("vectors", vectors),
    ];
    let kernel = b.finish(name, choices, block(threads))?;
    Ok(bounded(kernel, threads, vectors))
}

/// Every form: dtype by shape, and the general one for short and long rows.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for (threads, vectors) in SHAPES.into_iter().chain([(32, 0), (256, 0)]) {
            kernels.push(kernel(dtype, threads, vectors)?);
        }
    }
    Ok(kernels)
}
