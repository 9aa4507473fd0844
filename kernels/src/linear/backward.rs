//! Gradients of linear layers: `dout W`, `doutᵀ x` and the sums of the columns of `dout`.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`product`] | both products, of any dtypes, strides and alignment: what cuBLASLt does not serve |
//! | [`column_sums`] | the bias; of many rows parts are summed first, then by the same kernel the parts |

use contract::linear_backward::{Kind, LANES, TILE};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, scalars, with_vector};
use crate::rows::{Dims, first_row as dout_row, second_row as other_row};

scalars! { Args, ArgsExpand {
    /// Of the result of a product; `columns` of dout in vectors where these are summed.
    rows: u32,
    columns: u32,
    /// How much is summed over.
    depth: u32,
    /// Rows that a block sums for the bias.
    chunk: u32,
    /// Whether what is there is added.
    accumulate: u32,
    /// Between rows of the weight.
    weight_stride: u64,
    /// Between rows of the weight's gradient, or of partial sums.
    out_stride: u64,
} }

/// What is summed over in a step of a product.
const STEP: u32 = 16;
/// Between rows of a tile in shared memory, whose columns then lie in different banks.
const PITCH: u32 = STEP + 1;
/// Threads of a product: 16 × 16, each with 4 × 4 of the tile.
const THREADS: u32 = 256;
/// Elements of a tile that a thread loads in a step.
const LOADS: u32 = TILE * STEP / THREADS;

/// Loads the part of dout that belongs to the rows of the result from `row0` and to a step.
/// Neighbouring threads read neighbours.
#[cube]
fn load_dout<E: Float>(
    dout: &Array<E>,
    tile: &mut SharedMemory<f32>,
    args: &Args,
    dims: &Dims,
    row0: u32,
    first: u32,
    #[comptime] kind: Kind,
) {
    #[unroll]
    for i in 0..LOADS {
        let index = UNIT_POS_X + comptime!(i * THREADS);
        let mut row = index / STEP;
        let mut step = index % STEP;
        if comptime!(kind == Kind::Weight) {
            row = index % TILE;
            step = index / TILE;
        }
        let mut value = 0.0f32;
        if row0 + row < args.rows && first + step < args.depth {
            let at = if comptime!(kind == Kind::Weight) {
                dout_row(first + step, dims) + u64::cast_from(row0 + row)
            } else {
                dout_row(row0 + row, dims) + u64::cast_from(first + step)
            };
            value = f32::cast_from(dout[at as usize]);
        }
        tile[(row * PITCH + step) as usize] = value;
    }
}

/// Loads the part of the other matrix, the weight or x, that belongs to the columns of the result
/// from `column0` and to a step.
#[cube]
fn load_by<B: Float>(
    by: &Array<B>,
    tile: &mut SharedMemory<f32>,
    args: &Args,
    dims: &Dims,
    column0: u32,
    first: u32,
    #[comptime] kind: Kind,
) {
    #[unroll]
    for i in 0..LOADS {
        let index = UNIT_POS_X + comptime!(i * THREADS);
        let column = index % TILE;
        let step = index / TILE;
        let mut value = 0.0f32;
        if column0 + column < args.columns && first + step < args.depth {
            let mut at = u64::cast_from(column0 + column);
            if comptime!(kind == Kind::Weight) {
                at += other_row(first + step, dims);
            } else {
                at += u64::cast_from(first + step) * args.weight_stride;
            }
            value = f32::cast_from(by[at as usize]);
        }
        tile[(column * PITCH + step) as usize] = value;
    }
}

/// Adds the products of a step.
#[cube]
fn multiply(
    dout_tile: &SharedMemory<f32>,
    by_tile: &SharedMemory<f32>,
    sums: &mut Array<f32>,
    my_row: u32,
    my_column: u32,
) {
    #[unroll]
    for step in 0..STEP {
        let mut a = Array::<f32>::new(4usize);
        let mut b = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4u32 {
            a[i as usize] = dout_tile[((my_row + comptime!(i * 16)) * PITCH + step) as usize];
            b[i as usize] = by_tile[((my_column + comptime!(i * 16)) * PITCH + step) as usize];
        }
        #[unroll]
        for i in 0..16usize {
            sums[i] = fma(a[comptime!(i / 4)], b[comptime!(i % 4)], sums[i]);
        }
    }
}

/// Stores one element, added to what is there if that is asked for.
#[cube]
fn store<O: Float>(out: &mut Array<O>, at: u64, sum: f32, args: &Args) {
    let at = at as usize;
    let mut y = sum;
    if args.accumulate != 0u32 {
        y += f32::cast_from(out[at]);
    }
    out[at] = O::cast_from(y);
}

/// Grid: rows / `TILE`, columns / `TILE` of the result. Scalar accesses, so that any stride and
/// alignment will do.
#[cube]
fn product<E: Float, B: Float, O: Float>(
    dout: &Array<E>,
    by: &Array<B>,
    out: &mut Array<O>,
    args: &Args,
    dims: &Dims,
    #[comptime] kind: Kind,
) {
    let row0 = CUBE_POS_X * TILE;
    let column0 = CUBE_POS_Y * TILE;
    let mut dout_tile = SharedMemory::<f32>::new(comptime!((TILE * PITCH) as usize));
    let mut by_tile = SharedMemory::<f32>::new(comptime!((TILE * PITCH) as usize));
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0f32;
    }
    let my_row = UNIT_POS_X / 16u32;
    let my_column = UNIT_POS_X % 16u32;
    let mut first = 0u32;
    while first < args.depth {
        load_dout::<E>(dout, &mut dout_tile, args, dims, row0, first, kind);
        load_by::<B>(by, &mut by_tile, args, dims, column0, first, kind);
        sync_cube();
        multiply(&dout_tile, &by_tile, &mut sums, my_row, my_column);
        sync_cube();
        first += STEP;
    }
    #[unroll]
    for i in 0..16u32 {
        let row = row0 + my_row + comptime!(i / 4 * 16);
        let column = column0 + my_column + comptime!(i % 4 * 16);
        if row < args.rows && column < args.columns {
            let mut at = u64::cast_from(column);
            if comptime!(kind == Kind::Weight) {
                at += u64::cast_from(row) * args.out_stride;
            } else {
                at += other_row(row, dims);
            }
            store::<O>(out, at, sums[i as usize], args);
        }
    }
}

/// Planes of a block that sums columns: each takes the next row.
const PLANES: u32 = 8;
/// Rows that a thread loads before it adds them.
const UNROLL: u32 = 4;

/// Grid: `columns` / `LANES`, rows / `chunk`. What a chunk sums to is a row of the output, which
/// is the gradient itself if there is one chunk. A column's rows are added in the same order
/// whatever the width of a vector.
#[cube]
fn column_sums<E: Float, O: Float, N: Size>(
    dout: &Array<Vector<E, N>>,
    out: &mut Array<O>,
    args: &Args,
    dims: &Dims,
) {
    let width = comptime!(N::value() as u32);
    let lane = UNIT_POS_X % LANES;
    let plane = UNIT_POS_X / LANES;
    let column = CUBE_POS_X * LANES + lane;
    let first = CUBE_POS_Y * args.chunk;
    let last = min(first + args.chunk, args.depth);
    let mut sums = Vector::<f32, N>::zeroed();
    if column < args.columns {
        let mut row = first + plane;
        while row < last {
            let mut vectors = Sequence::<Vector<E, N>>::new();
            #[unroll]
            for k in 0..UNROLL {
                let at = row + comptime!(k * PLANES);
                let mut vector = Vector::<E, N>::zeroed();
                if at < last {
                    vector = dout[(dout_row(at, dims) + u64::cast_from(column)) as usize];
                }
                vectors.push(vector);
            }
            #[unroll]
            for k in 0..UNROLL {
                sums += Vector::<f32, N>::cast_from(*vectors.index(k as usize));
            }
            row += comptime!(PLANES * UNROLL);
        }
    }
    let strip = comptime!(LANES * width);
    let mut of_planes = SharedMemory::<f32>::new(comptime!((PLANES * strip) as usize));
    #[unroll]
    for j in 0..N::value() {
        of_planes[(plane * strip + lane * width + comptime!(j as u32)) as usize] = sums[j];
    }
    sync_cube();
    let column = CUBE_POS_X * strip + UNIT_POS_X;
    if UNIT_POS_X < strip && column < args.columns * width {
        let mut sum = 0.0f32;
        #[unroll]
        for p in 0..PLANES {
            sum += of_planes[(UNIT_POS_X + comptime!(p * strip)) as usize];
        }
        let at = u64::cast_from(CUBE_POS_Y) * args.out_stride + u64::cast_from(column);
        store::<O>(out, at, sum, args);
    }
}

macro_rules! expand_product {
    ($b:ident, $e:ty, $by:ty, $o:ty, $kind:expr) => {{
        let (ty, by_ty, out_ty) = ($b.type_of::<$e>(), $b.type_of::<$by>(), $b.type_of::<$o>());
        let dout = $b.read("dout", ty);
        let by = $b.read("by", by_ty);
        let out = $b.write("out", out_ty);
        let args = Args::declare(&mut $b);
        let dims = Dims::declare(&mut $b);
        let (scope, kind) = ($b.scope(), $kind);
        product::expand::<$e, $by, $o>(scope, dout.into(), by.into(), out.into(), args, dims, kind);
    }};
}

macro_rules! expand_sums {
    ($b:ident, $e:ty, $o:ty, $n:ty) => {{
        let (ty, out_ty) = ($b.type_of::<Vector<$e, $n>>(), $b.type_of::<$o>());
        let dout = $b.read("dout", ty);
        // Nothing multiplies here.
        let _by = $b.read("by", ty);
        let out = $b.write("out", out_ty);
        let args = Args::declare(&mut $b);
        let dims = Dims::declare(&mut $b);
        column_sums::expand::<$e, $o, $n>($b.scope(), dout.into(), out.into(), args, dims);
    }};
}

/// What tells the kernels apart: the dtypes of dout, of what it is multiplied by and of the
/// gradient, and elements per access.
fn choices(
    kind: Kind,
    (dtype, by, out): (Dtype, Dtype, Dtype),
    width: u32,
) -> Vec<(&'static str, u32)> {
    vec![
        ("kind", kind.code()),
        ("dtype", dtype.code()),
        ("by", by.code()),
        ("out", out.code()),
        ("width", width),
    ]
}

/// `dout W` in the dtype of dout, for a weight of any; `doutᵀ x` in any dtype.
fn product_kernel(kind: Kind, dtype: Dtype, parameter: Dtype) -> Result<Kernel, Error> {
    let (name, by, out) = match kind {
        Kind::Weight => ("dweight", dtype, parameter),
        _ => ("dx", parameter, dtype),
    };
    let mut b = Builder::default();
    with_vector!(dtype, E, _N => with_vector!(parameter, P, _M => match kind {
        Kind::Weight => expand_product!(b, E, E, P, Kind::Weight),
        _ => expand_product!(b, E, P, E, Kind::Input),
    }));
    let symbol = format!(
        "linear_backward_{name}_{}_{}",
        dtype.name(),
        parameter.name()
    );
    b.finish(symbol, choices(kind, (dtype, by, out), 1), THREADS)
}

fn sums_kernel(dtype: Dtype, out: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, E, N => with_vector!(out, O, _M => match vectors {
        true => expand_sums!(b, E, O, N),
        false => expand_sums!(b, E, O, Const<1>),
    }));
    let width = if vectors { dtype.per_vector() } else { 1 };
    let symbol = format!(
        "linear_backward_dbias_{}_{}x{width}",
        dtype.name(),
        out.name()
    );
    let choices = choices(Kind::Bias, (dtype, dtype, out), width);
    b.finish(symbol, choices, PLANES * LANES)
}

/// Every form: by the dtypes of dout and of the parameter or its gradient; sums of columns in
/// vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for parameter in Dtype::ALL.iter().copied() {
            for kind in [Kind::Input, Kind::Weight] {
                kernels.push(product_kernel(kind, dtype, parameter)?);
            }
            for vectors in [true, false] {
                kernels.push(sums_kernel(dtype, parameter, vectors)?);
            }
        }
    }
    Ok(kernels)
}
