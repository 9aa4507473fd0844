//! RMSNorm, one pass over memory: a row stays in the registers of the threads that share it.
//!
//! Two kernels. `rows` moves 16 bytes per access: a row of up to `threads * vectors` vectors belongs to `threads` threads, each with
//! `vectors` loads in flight. `any` takes what is misaligned, of odd length, longer, or has gains of a third dtype; it reads rows
//! element by element, twice.
//!
//! `rows` sums in one order whatever the threads: the elements of a vector, 32 vectors by halves, then the sums of these. So a row has
//! the same bits alone as among many, although few rows get more threads.

use contract::norm::Gains;
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::norm::*;
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// A [`Gains`] in `weight_kind`.
const CODES: Codes = Codes {
    like_x: Gains::LikeX.code(),
    f32: Gains::F32.code(),
};

/// Where a row of each tensor begins.
#[derive(CubeType, Clone, Copy)]
struct RowOffsets {
    x: usize,
    residual: usize,
    out: usize,
    residual_out: usize,
}

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Shape {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    sizes: Sizes,
    x: Strides,
    residual: Strides,
    out: Strides,
    residual_out: Strides,
}

#[cube]
fn row_offsets(row: u32, s: Shape, #[comptime] has_residual: bool) -> RowOffsets {
    let index = row_index(row, s.sizes);
    let x = row_start(index, s.x);
    let out = row_start(index, s.out);
    let mut residual = 0usize;
    let mut residual_out = 0usize;
    if has_residual {
        residual = row_start(index, s.residual);
        residual_out = row_start(index, s.residual_out);
    }
    RowOffsets {
        x,
        residual,
        out,
        residual_out,
    }
}

/// `weight_kind` is a [`Gains`]; without gains `weight` is any memory of a row's size.
///
/// Grid: rows, in groups of as many as a block has threads for.
#[cube]
fn rms_norm_rows<F: Float, N: Size>(
    x: &Array<Words>,
    residual: &Array<Words>,
    weight: &Array<Words>,
    out: &mut Array<Vector<F, N>>,
    residual_out: &mut Array<Vector<F, N>>,
    shape: Shape,
    weight_kind: u32,
    weight_offset: f32,
    epsilon: f32,
    inverse_length: f32,
    #[comptime] has_residual: bool,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) {
    let count = vectors as usize;
    let parts = comptime!(N::value() as u32 / 4);
    let lane = UNIT_POS_X % threads;
    let mut row = CUBE_POS_X;
    let mut length = shape.length;
    take_share(&mut row, &mut length, shape.rows, threads);
    let index = row_index(row, shape.sizes);

    // Everything is on its way before anything is waited for. Past a row's end its last vector is read again.
    let mut xs = Sequence::<Words>::new();
    let mut residuals = Sequence::<Words>::new();
    let mut weights = Sequence::<Words>::new();
    let from = row_start(index, shape.x);
    load_row(x, from, lane, shape.length, &mut xs, threads, vectors);
    if has_residual {
        let from = row_start(index, shape.residual);
        load_row(
            residual,
            from,
            lane,
            shape.length,
            &mut residuals,
            threads,
            vectors,
        );
    }
    // Of many vectors the gains come later: registers for them would be missing for rows at a time.
    let early = comptime!(vectors <= 2);
    if early {
        #[unroll]
        for k in 0..vectors {
            let i = min(lane + k * threads, shape.length - 1u32);
            weights.push(load_gains(weight, weight_kind, i, parts, CODES));
        }
    }

    let mut values = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..count {
        let mut value = unpack::<F, N>(*xs.index(k));
        if has_residual {
            value += unpack::<F, N>(*residuals.index(k));
        }
        values.push(value);
    }
    if has_residual {
        let to = row_start(index, shape.residual_out) + lane as usize;
        #[unroll]
        for k in 0..vectors {
            if lane + k * threads < length {
                residual_out[to + comptime!((k * threads) as usize)] =
                    Vector::cast_from(*values.index(k as usize));
            }
        }
    }
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for k in 0..vectors {
        let v = *values.index(k as usize);
        let mut sum = v[0] * v[0];
        #[unroll]
        for j in 1..N::value() {
            sum = fma(v[j], v[j], sum);
        }
        if lane + k * threads >= shape.length {
            sum = 0.0f32;
        }
        sums[k as usize] = sum;
    }
    let sum = row_sum(&mut sums, threads, vectors);
    let scale = (sum * inverse_length + epsilon).inverse_sqrt();
    let to = row_start(index, shape.out) + lane as usize;
    #[unroll]
    for k in 0..vectors {
        let i = lane + k * threads;
        if i < length {
            let first = if early {
                *weights.index(k as usize)
            } else {
                load_gains(weight, weight_kind, i, parts, CODES)
            };
            let gains = gains::<F, N>(first, weight, weight_kind, weight_offset, i, CODES);
            let v = *values.index(k as usize) * (gains * Vector::new(scale));
            out[to + comptime!((k * threads) as usize)] = Vector::cast_from(v);
        }
    }
}

/// `weight_kind` is a [`Gains`]; where there are any, they are of type `W`.
#[cube]
fn rms_norm_any<F: Float, W: Float>(
    x: &Array<F>,
    residual: &Array<F>,
    weight: &Array<W>,
    out: &mut Array<F>,
    residual_out: &mut Array<F>,
    shape: Shape,
    weight_kind: u32,
    weight_offset: f32,
    epsilon: f32,
    inverse_length: f32,
    #[comptime] has_residual: bool,
    #[comptime] threads: u32,
) {
    let row = CUBE_POS_X * comptime!(rows_per_block(threads)) + UNIT_POS_X / threads;
    let mut length = shape.length;
    if row >= shape.rows {
        length = 0u32;
    }
    let at = row_offsets(row, shape, has_residual);
    let mut sum = 0.0f32;
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let mut v = f32::cast_from(x[at.x + i as usize]);
        if has_residual {
            v += f32::cast_from(residual[at.residual + i as usize]);
        }
        sum += v * v;
        i += threads;
    }
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = sum;
    let sum = row_sum(&mut sums, threads, 1u32);
    let scale = (sum * inverse_length + epsilon).inverse_sqrt();
    // Each thread overwrites only elements that it alone reads, so the tensors may be the same.
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let mut v = f32::cast_from(x[at.x + i as usize]);
        if has_residual {
            v += f32::cast_from(residual[at.residual + i as usize]);
            residual_out[at.residual_out + i as usize] = F::cast_from(v);
        }
        let mut gain = 1.0f32;
        if weight_kind != comptime!(Gains::None.code()) {
            gain = f32::cast_from(weight[i as usize]) + weight_offset;
        }
        out[at.out + i as usize] = F::cast_from(v * (gain * scale));
        i += threads;
    }
}

/// The scalars of both kernels, in one order.
struct Scalars {
    shape: ShapeExpand,
    weight_kind: NativeExpand<u32>,
    weight_offset: NativeExpand<f32>,
    epsilon: NativeExpand<f32>,
    inverse_length: NativeExpand<f32>,
}

fn scalars(b: &mut Builder) -> Scalars {
    use ScalarType::{F32, U32};
    Scalars {
        shape: ShapeExpand {
            rows: b.scalar("rows", U32).into(),
            length: b.scalar("length", U32).into(),
            sizes: rows::sizes(b),
            x: rows::strides(b, ["x_0", "x_1", "x_2"]),
            residual: rows::strides(b, ["residual_0", "residual_1", "residual_2"]),
            out: rows::strides(b, ["out_0", "out_1", "out_2"]),
            residual_out: rows::strides(b, ["residual_out_0", "residual_out_1", "residual_out_2"]),
        },
        weight_kind: b.scalar("weight_kind", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

fn in_vectors(
    dtype: Dtype,
    has_residual: bool,
    (threads, vectors): (u32, u32),
) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => {
        let ty = b.type_of::<Vector<F, N>>();
        let words = b.type_of::<Words>();
        // x and residual may be overwritten in place, hence not `read`.
        let x = b.write("x", words);
        let residual = b.write("residual", words);
        let weight = b.read("weight", words);
        let out = b.write("out", ty);
        let residual_out = b.write("residual_out", ty);
        let s = scalars(&mut b);
        rms_norm_rows::expand::<F, N>(
            b.scope(),
            x.into(),
            residual.into(),
            weight.into(),
            out.into(),
            residual_out.into(),
            s.shape,
            s.weight_kind,
            s.weight_offset,
            s.epsilon,
            s.inverse_length,
            has_residual,
            threads,
            vectors,
        );
    });
    let name = format!(
        "rms_norm_{}{}_{threads}x{vectors}",
        dtype.name(),
        if has_residual { "_residual" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype.code()),
        // Gains are like x or f32, and known at run time.
        ("weight", 0),
        ("residual", u32::from(has_residual)),
        ("threads", threads),
        ("vectors", vectors),
    ];
    Ok(bounded(
        b.finish(name, choices, block(threads))?,
        threads,
        vectors,
    ))
}

fn any(dtype: Dtype, weight: Dtype, has_residual: bool, threads: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, _N => with_vector!(weight, W, _M => {
        let ty = b.type_of::<F>();
        let ty_w = b.type_of::<W>();
        let x = b.write("x", ty);
        let residual = b.write("residual", ty);
        let weight = b.read("weight", ty_w);
        let out = b.write("out", ty);
        let residual_out = b.write("residual_out", ty);
        let s = scalars(&mut b);
        rms_norm_any::expand::<F, W>(
            b.scope(),
            x.into(),
            residual.into(),
            weight.into(),
            out.into(),
            residual_out.into(),
            s.shape,
            s.weight_kind,
            s.weight_offset,
            s.epsilon,
            s.inverse_length,
            has_residual,
            threads,
        );
    }));
    let name = format!(
        "rms_norm_any_{}_{}{}_{threads}",
        dtype.name(),
        weight.name(),
        if has_residual { "_residual" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype.code()),
        ("weight", weight.code()),
        ("residual", u32::from(has_residual)),
        ("threads", threads),
        ("vectors", 0),
    ];
    b.finish(name, choices, block(threads))
}

/// Every form: dtype by residual by shape, and the general one by the dtype of gains as well.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for has_residual in [false, true] {
            for shape in SHAPES {
                kernels.push(in_vectors(dtype, has_residual, shape)?);
            }
            for weight in Dtype::ALL.iter().copied() {
                for threads in [32, 256] {
                    kernels.push(any(dtype, weight, has_residual, threads)?);
                }
            }
        }
    }
    Ok(kernels)
}
