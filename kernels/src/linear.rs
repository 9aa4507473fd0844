//! `y = x Wᵀ + bias + residual`: rows of W against few or many rows of x.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`rows`] | at most 16 rows of 16-bit x on tensor cores, bound by reading W once |
//! | [`rows_simt`] | the same for any dtypes |
//! | [`tiles`] | many rows of 16-bit x where there is no cuBLASLt |
//! | [`tiles_simt`] | everything else |

use cubecl::prelude::*;

use crate::Error;
use crate::attention::arguments::scalars;
use crate::attention::fragments::{Line, Pair, load_matrices, mma, registers, zeros};
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};

scalars! { Args, ArgsExpand {
    /// Rows of x.
    rows: u32,
    in_features: u32,
    out_features: u32,
    /// A dtype of `emit::Dtype`, or 0 for none.
    bias_dtype: u32,
    has_residual: u32,
    /// Between rows, in the units of the kernel's x and w; of out and residual in elements.
    x_stride: u64,
    w_stride: u64,
    out_stride: u64,
    residual_stride: u64,
} }

/// Bias and residual.
#[derive(CubeType)]
struct Addends<E: Float> {
    bias_f32: Array<f32>,
    bias_f16: Array<half::f16>,
    bias_bf16: Array<half::bf16>,
    residual: Array<E>,
}

impl<E: Float> Addends<E> {
    fn declare(b: &mut Builder) -> AddendsExpand<E> {
        let (f32_, f16_, bf16_) = (
            b.type_of::<f32>(),
            b.type_of::<half::f16>(),
            b.type_of::<half::bf16>(),
        );
        let ty = b.type_of::<E>();
        AddendsExpand {
            bias_f32: b.read("bias_f32", f32_).into(),
            bias_f16: b.read("bias_f16", f16_).into(),
            bias_bf16: b.read("bias_bf16", bf16_).into(),
            // The output may be the residual.
            residual: b.write("residual", ty).into(),
        }
    }
}

/// Adds what is to be added, and stores one element.
#[cube]
fn store<E: Float>(
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    row: u32,
    column: u32,
    sum: f32,
) {
    let mut y = sum;
    if args.bias_dtype != 0u32 {
        let at = column as usize;
        if args.bias_dtype == 1u32 {
            y += addends.bias_f32[at];
        } else if args.bias_dtype == 2u32 {
            y += f32::cast_from(addends.bias_f16[at]);
        } else {
            y += f32::cast_from(addends.bias_bf16[at]);
        }
    }
    if args.has_residual != 0u32 {
        y += f32::cast_from(
            addends.residual
                [(u64::cast_from(row) * args.residual_stride + u64::cast_from(column)) as usize],
        );
    }
    out[(u64::cast_from(row) * args.out_stride + u64::cast_from(column)) as usize] =
        E::cast_from(y);
}

/// Planes of a cube of `rows`.
pub const PLANES: u32 = 8;
/// A cube has 16 rows of W, its planes share their elements. Lines go from memory to registers, in an order of elements that x
/// and W have in common. `eights` of x: rows / 8, rounded up.
///
/// Grid: out features / 16.
#[cube]
fn rows<E: Float>(
    x: &Array<Vector<E, Line>>,
    w: &Array<Vector<E, Line>>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    #[comptime] eights: u32,
) {
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let lines = args.in_features / 8u32;
    let column0 = CUBE_POS_X * 16u32;
    let in_flight = 4usize;

    let mut w_at = Array::<u64>::new(2usize);
    #[unroll]
    for h in 0..2usize {
        let column = min(
            column0 + lane / 4u32 + comptime!(h as u32 * 8),
            args.out_features - 1u32,
        );
        w_at[h] = u64::cast_from(column) * args.w_stride;
    }
    let mut x_at = Array::<u64>::new(eights as usize);
    #[unroll]
    for e in 0..eights as usize {
        let row = min(lane / 4u32 + comptime!(e as u32 * 8), args.rows - 1u32);
        x_at[e] = u64::cast_from(row) * args.x_stride;
    }
    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..eights {
        acc.push(zeros());
    }

    // Runs of `in_flight` blocks of four lines: whole ones without guards, so that their loads are in flight together.
    let mut first = plane * comptime!(in_flight as u32 * 4);
    while first < lines {
        let mut weights = Array::<Vector<E, Line>>::new(comptime!(2 * in_flight));
        let mut inputs = Array::<Vector<E, Line>>::new(comptime!(eights as usize * in_flight));
        if first + comptime!(in_flight as u32 * 4) <= lines {
            #[unroll]
            for u in 0..in_flight {
                let line = u64::cast_from(first + lane % 4u32 + comptime!(u as u32 * 4));
                #[unroll]
                for h in 0..2usize {
                    weights[u * 2 + h] = w[(w_at[h] + line) as usize];
                }
                #[unroll]
                for e in 0..eights as usize {
                    inputs[u * eights as usize + e] = x[(x_at[e] + line) as usize];
                }
            }
        } else {
            #[unroll]
            for u in 0..in_flight {
                let line = first + lane % 4u32 + comptime!(u as u32 * 4);
                #[unroll]
                for h in 0..2usize {
                    weights[u * 2 + h] = Vector::zeroed();
                    if line < lines {
                        weights[u * 2 + h] = w[(w_at[h] + u64::cast_from(line)) as usize];
                    }
                }
                #[unroll]
                for e in 0..eights as usize {
                    inputs[u * eights as usize + e] = Vector::zeroed();
                    if line < lines {
                        inputs[u * eights as usize + e] =
                            x[(x_at[e] + u64::cast_from(line)) as usize];
                    }
                }
            }
        }
        #[unroll]
        for u in 0..in_flight {
            #[unroll]
            for step in 0..2usize {
                let mut a = Array::<Vector<E, Pair>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    a[i] = pair::<E>(weights[u * 2 + i % 2], comptime!(step * 4 + i / 2 * 2));
                }
                #[unroll]
                for e in 0..eights as usize {
                    let mut b = Array::<Vector<E, Pair>>::new(2usize);
                    #[unroll]
                    for i in 0..2usize {
                        b[i] =
                            pair::<E>(inputs[u * eights as usize + e], comptime!(step * 4 + i * 2));
                    }
                    mma::<E>(&a, &b, acc.index_mut(e));
                }
            }
        }
        first += comptime!(PLANES * in_flight as u32 * 4);
    }

    // Accumulators have W's rows as rows and x's as columns.
    let mut sums = SharedMemory::<f32>::new(comptime!((PLANES * eights * 128) as usize));
    #[unroll]
    for e in 0..eights {
        #[unroll]
        for h in 0..2u32 {
            let value = acc.index(e as usize)[h as usize];
            #[unroll]
            for c in 0..2u32 {
                let row = lane % 4u32 * 2u32 + comptime!(e * 8 + c);
                let column = lane / 4u32 + comptime!(h * 8);
                sums[(plane * comptime!(eights * 128) + row * 16u32 + column) as usize] =
                    value[c as usize];
            }
        }
    }
    sync_cube();
    if UNIT_POS_X < comptime!(eights * 128) {
        let row = UNIT_POS_X / 16u32;
        let column = column0 + UNIT_POS_X % 16u32;
        if row < args.rows && column < args.out_features {
            let mut sum = 0.0f32;
            #[unroll]
            for p in 0..PLANES {
                sum += sums[(UNIT_POS_X + comptime!(p * eights * 128)) as usize];
            }
            store::<E>(out, addends, args, row, column, sum);
        }
    }
}

#[cube]
fn pair<E: Float>(line: Vector<E, Line>, #[comptime] first: usize) -> Vector<E, Pair> {
    let mut two = Vector::<E, Pair>::empty();
    two[0] = line[first];
    two[1] = line[comptime!(first + 1)];
    two
}

/// Rows of W of a plane of `rows_simt`.
const SIMT_COLUMNS: u32 = 2;

/// A plane has two rows of W, its lanes share their elements. `N` elements per access, `unroll` accesses in flight per row of
/// W; `some` rows of x at a time.
///
/// Grid: out features / (2 `PLANES`), rows / `some`.
#[cube]
fn rows_simt<E: Float, W: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    w: &Array<Vector<W, N>>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    #[comptime] some: u32,
    #[comptime] unroll: u32,
) {
    let width = N::value();
    let lane = UNIT_POS_X % 32u32;
    let column0 = (CUBE_POS_X * PLANES + UNIT_POS_X / 32u32) * SIMT_COLUMNS;
    let row0 = CUBE_POS_Y * some;
    let lines = args.in_features / comptime!(width as u32);
    let columns = comptime!(SIMT_COLUMNS as usize);
    let mut acc = Array::<f32>::new(comptime!(some as usize * columns));
    #[unroll]
    for i in 0..comptime!(some as usize * columns) {
        acc[i] = 0.0f32;
    }
    if column0 >= args.out_features {
        terminate!();
    }
    let mut w_at = Array::<u64>::new(columns);
    #[unroll]
    for c in 0..columns {
        w_at[c] = u64::cast_from(min(column0 + comptime!(c as u32), args.out_features - 1u32))
            * args.w_stride;
    }
    let mut line = lane;
    // Whole runs without guards, so that their loads are in flight together; then one at a time.
    while line + comptime!((unroll - 1) * 32) < lines {
        let mut weights = Array::<Vector<W, N>>::new(comptime!(columns * unroll as usize));
        #[unroll]
        for u in 0..unroll as usize {
            #[unroll]
            for c in 0..columns {
                weights[u * columns + c] =
                    w[(w_at[c] + u64::cast_from(line + comptime!(u as u32 * 32))) as usize];
            }
        }
        #[unroll]
        for u in 0..unroll as usize {
            #[unroll]
            for r in 0..some as usize {
                let row = min(row0 + comptime!(r as u32), args.rows - 1u32);
                let at = u64::cast_from(row) * args.x_stride
                    + u64::cast_from(line + comptime!(u as u32 * 32));
                let input = Vector::<f32, N>::cast_from(x[at as usize]);
                #[unroll]
                for c in 0..columns {
                    acc[r * columns + c] =
                        dot::<W, N>(input, weights[u * columns + c], acc[r * columns + c]);
                }
            }
        }
        line += comptime!(unroll * 32);
    }
    while line < lines {
        #[unroll]
        for r in 0..some as usize {
            let row = min(row0 + comptime!(r as u32), args.rows - 1u32);
            let at = u64::cast_from(row) * args.x_stride + u64::cast_from(line);
            let input = Vector::<f32, N>::cast_from(x[at as usize]);
            #[unroll]
            for c in 0..columns {
                let weights = w[(w_at[c] + u64::cast_from(line)) as usize];
                acc[r * columns + c] = dot::<W, N>(input, weights, acc[r * columns + c]);
            }
        }
        line += 32u32;
    }
    #[unroll]
    for i in 0..comptime!(some as usize * columns) {
        let sum = plane_sum(acc[i]);
        let row = row0 + comptime!(i as u32 / SIMT_COLUMNS);
        let column = column0 + comptime!(i as u32 % SIMT_COLUMNS);
        if lane == comptime!(i as u32 % 32) && row < args.rows && column < args.out_features {
            store::<E>(out, addends, args, row, column, sum);
        }
    }
}

#[cube]
fn dot<W: Float, N: Size>(a: Vector<f32, N>, b: Vector<W, N>, sum: f32) -> f32 {
    let b = Vector::<f32, N>::cast_from(b);
    let mut sum = sum;
    #[unroll]
    for j in 0..N::value() {
        sum = fma(a[j], b[j], sum);
    }
    sum
}

/// Rows and columns of a tile of `tiles`, and lines of 8 elements per step.
pub const TILE: u32 = 64;
const STEP_LINES: u32 = 4;
const TILE_PITCH: u32 = STEP_LINES + 1;
/// Threads of `tiles`: four planes, each with 32 × 32 of the tile.
pub const TILE_THREADS: u32 = 128;

#[cube]
fn load_lines<E: Float>(
    from: &Array<Vector<E, Line>>,
    stride: u64,
    row0: u32,
    rows: u32,
    first: u32,
    lines: u32,
    to: &mut Array<Vector<E, Line>>,
) {
    #[unroll]
    for i in 0..comptime!((TILE * STEP_LINES / TILE_THREADS) as usize) {
        let index = UNIT_POS_X + comptime!(i as u32 * TILE_THREADS);
        let row = row0 + index / STEP_LINES;
        let line = first + index % STEP_LINES;
        let mut value = Vector::<E, Line>::zeroed();
        if row < rows && line < lines {
            value = from[(u64::cast_from(row) * stride + u64::cast_from(line)) as usize];
        }
        to[i] = value;
    }
}

#[cube]
fn keep_lines<E: Float>(from: &Array<Vector<E, Line>>, to: &mut SharedMemory<Vector<E, Line>>) {
    #[unroll]
    for i in 0..comptime!((TILE * STEP_LINES / TILE_THREADS) as usize) {
        let index = UNIT_POS_X + comptime!(i as u32 * TILE_THREADS);
        to[(index / STEP_LINES * TILE_PITCH + index % STEP_LINES) as usize] = from[i];
    }
}

/// Grid: out features / `TILE`, rows / `TILE`.
#[cube]
fn tiles<E: Float>(
    x: &Array<Vector<E, Line>>,
    w: &Array<Vector<E, Line>>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
) {
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let row0 = CUBE_POS_Y * TILE;
    let column0 = CUBE_POS_X * TILE;
    let lines = args.in_features / 8u32;
    let per_thread = comptime!((TILE * STEP_LINES / TILE_THREADS) as usize);
    let mut x_tile = SharedMemory::<Vector<E, Line>>::new_aligned(
        comptime!((TILE * TILE_PITCH) as usize),
        128usize,
    );
    let mut w_tile = SharedMemory::<Vector<E, Line>>::new_aligned(
        comptime!((TILE * TILE_PITCH) as usize),
        128usize,
    );
    let mut x_next = Array::<Vector<E, Line>>::new(per_thread);
    let mut w_next = Array::<Vector<E, Line>>::new(per_thread);
    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..8 {
        acc.push(zeros());
    }
    let plane_row = plane / 2u32 * 32u32;
    let plane_column = plane % 2u32 * 32u32;
    let a_line = (plane_row + lane % 16u32) * TILE_PITCH + lane / 16u32;
    let b_line =
        (plane_column + lane % 8u32 + lane / 16u32 * 8u32) * TILE_PITCH + (lane / 8u32) % 2u32;

    load_lines::<E>(x, args.x_stride, row0, args.rows, 0u32, lines, &mut x_next);
    load_lines::<E>(
        w,
        args.w_stride,
        column0,
        args.out_features,
        0u32,
        lines,
        &mut w_next,
    );
    let mut first = 0u32;
    while first < lines {
        sync_cube();
        keep_lines::<E>(&x_next, &mut x_tile);
        keep_lines::<E>(&w_next, &mut w_tile);
        sync_cube();
        first += STEP_LINES;
        if first < lines {
            load_lines::<E>(x, args.x_stride, row0, args.rows, first, lines, &mut x_next);
            load_lines::<E>(
                w,
                args.w_stride,
                column0,
                args.out_features,
                first,
                lines,
                &mut w_next,
            );
        }
        #[unroll]
        for d in 0..2u32 {
            let mut a = Sequence::<Array<Vector<E, Pair>>>::new();
            #[unroll]
            for f in 0..2u32 {
                a.push(load_matrices::<E>(
                    &x_tile,
                    a_line + comptime!(f * 16 * TILE_PITCH + d * 2),
                    false,
                ));
            }
            #[unroll]
            for n in 0..2u32 {
                let b = load_matrices::<E>(
                    &w_tile,
                    b_line + comptime!(n * 16 * TILE_PITCH + d * 2),
                    false,
                );
                let b0 = registers::<E>(&b, 0usize);
                let b1 = registers::<E>(&b, 2usize);
                #[unroll]
                for f in 0..2u32 {
                    mma::<E>(
                        a.index(f as usize),
                        &b0,
                        acc.index_mut(comptime!((f * 4 + n * 2) as usize)),
                    );
                    mma::<E>(
                        a.index(f as usize),
                        &b1,
                        acc.index_mut(comptime!((f * 4 + n * 2 + 1) as usize)),
                    );
                }
            }
        }
    }
    #[unroll]
    for i in 0..8u32 {
        #[unroll]
        for h in 0..2u32 {
            let value = acc.index(i as usize)[h as usize];
            #[unroll]
            for c in 0..2u32 {
                let row = row0 + plane_row + lane / 4u32 + comptime!(i / 4 * 16 + h * 8);
                let column = column0 + plane_column + lane % 4u32 * 2u32 + comptime!(i % 4 * 8 + c);
                if row < args.rows && column < args.out_features {
                    store::<E>(out, addends, args, row, column, value[c as usize]);
                }
            }
        }
    }
}

/// Elements per step of `tiles_simt`.
const SIMT_STEP: u32 = 16;
/// Threads of `tiles_simt`: 16 × 16, each with 4 × 4 of the tile.
pub const SIMT_THREADS: u32 = 256;

/// Grid: out features / `TILE`, rows / `TILE`. Scalar accesses, so that any stride and alignment will do.
#[cube]
fn tiles_simt<E: Float, W: Float>(
    x: &Array<E>,
    w: &Array<W>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
) {
    let row0 = CUBE_POS_Y * TILE;
    let column0 = CUBE_POS_X * TILE;
    let pitch = comptime!(SIMT_STEP + 1);
    let mut x_tile = SharedMemory::<f32>::new(comptime!((TILE * pitch) as usize));
    let mut w_tile = SharedMemory::<f32>::new(comptime!((TILE * pitch) as usize));
    let mut acc = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        acc[i] = 0.0f32;
    }
    let my_row = UNIT_POS_X / 16u32;
    let my_column = UNIT_POS_X % 16u32;
    let mut first = 0u32;
    while first < args.in_features {
        #[unroll]
        for i in 0..comptime!(TILE * SIMT_STEP / SIMT_THREADS) {
            let index = UNIT_POS_X + comptime!(i * SIMT_THREADS);
            let at = index / SIMT_STEP;
            let element = first + index % SIMT_STEP;
            let mut input = 0.0f32;
            if row0 + at < args.rows && element < args.in_features {
                input = f32::cast_from(
                    x[(u64::cast_from(row0 + at) * args.x_stride + u64::cast_from(element))
                        as usize],
                );
            }
            let mut weight = 0.0f32;
            if column0 + at < args.out_features && element < args.in_features {
                weight = f32::cast_from(
                    w[(u64::cast_from(column0 + at) * args.w_stride + u64::cast_from(element))
                        as usize],
                );
            }
            x_tile[(at * pitch + index % SIMT_STEP) as usize] = input;
            w_tile[(at * pitch + index % SIMT_STEP) as usize] = weight;
        }
        sync_cube();
        #[unroll]
        for e in 0..SIMT_STEP {
            let mut a = Array::<f32>::new(4usize);
            let mut b = Array::<f32>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                a[i as usize] = x_tile[((my_row + comptime!(i * 16)) * pitch + e) as usize];
                b[i as usize] = w_tile[((my_column + comptime!(i * 16)) * pitch + e) as usize];
            }
            #[unroll]
            for i in 0..16usize {
                acc[i] = fma(a[comptime!(i / 4)], b[comptime!(i % 4)], acc[i]);
            }
        }
        sync_cube();
        first += SIMT_STEP;
    }
    #[unroll]
    for i in 0..16u32 {
        let row = row0 + my_row + comptime!(i / 4 * 16);
        let column = column0 + my_column + comptime!(i % 4 * 16);
        if row < args.rows && column < args.out_features {
            store::<E>(out, addends, args, row, column, acc[i as usize]);
        }
    }
}

fn declared(
    name: String,
    choices: Vec<(&'static str, u32)>,
    threads: u32,
    expand: impl FnOnce(&mut Builder),
) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    expand(&mut b);
    b.finish(name, choices, threads)
}

fn expand_rows<E: Float>(b: &mut Builder, eights: u32) {
    let (line, ty) = (b.type_of::<Vector<E, Line>>(), b.type_of::<E>());
    let (x, w, out) = (b.read("x", line), b.read("w", line), b.write("out", ty));
    let addends = Addends::<E>::declare(b);
    let args = Args::declare(b);
    rows::expand::<E>(
        b.scope(),
        x.into(),
        w.into(),
        out.into(),
        addends,
        args,
        eights,
    );
}

fn expand_rows_simt<E: Float, W: Float, N: Size>(b: &mut Builder, some: u32, unroll: u32) {
    let (xs, ws, ty) = (
        b.type_of::<Vector<E, N>>(),
        b.type_of::<Vector<W, N>>(),
        b.type_of::<E>(),
    );
    let (x, w, out) = (b.read("x", xs), b.read("w", ws), b.write("out", ty));
    let addends = Addends::<E>::declare(b);
    let args = Args::declare(b);
    rows_simt::expand::<E, W, N>(
        b.scope(),
        x.into(),
        w.into(),
        out.into(),
        addends,
        args,
        some,
        unroll,
    );
}

fn expand_tiles<E: Float>(b: &mut Builder) {
    let (line, ty) = (b.type_of::<Vector<E, Line>>(), b.type_of::<E>());
    let (x, w, out) = (b.read("x", line), b.read("w", line), b.write("out", ty));
    let addends = Addends::<E>::declare(b);
    let args = Args::declare(b);
    tiles::expand::<E>(b.scope(), x.into(), w.into(), out.into(), addends, args);
}

fn expand_tiles_simt<E: Float, W: Float>(b: &mut Builder) {
    let (ty, ws) = (b.type_of::<E>(), b.type_of::<W>());
    let (x, w, out) = (b.read("x", ty), b.read("w", ws), b.write("out", ty));
    let addends = Addends::<E>::declare(b);
    let args = Args::declare(b);
    tiles_simt::expand::<E, W>(b.scope(), x.into(), w.into(), out.into(), addends, args);
}

/// Which kernel a name means, as the choice `kind`.
pub mod kind {
    pub const ROWS: u32 = 0;
    pub const ROWS_SIMT: u32 = 1;
    pub const TILES: u32 = 2;
    pub const TILES_SIMT: u32 = 3;
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    let choices = |kind, dtype, weight, rows, width| {
        vec![
            ("kind", kind),
            ("dtype", dtype as u32),
            ("weight", weight as u32),
            ("rows", rows),
            ("width", width),
        ]
    };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let name = dtype.name();
        for eights in [1, 2] {
            let choices = choices(kind::ROWS, dtype, dtype, eights * 8, 8);
            kernels.push(declared(
                format!("linear_rows_{name}_{}", eights * 8),
                choices,
                PLANES * 32,
                |b| {
                    with_vector!(dtype, E, _N => expand_rows::<E>(b, eights));
                },
            )?);
        }
        let choices = choices(kind::TILES, dtype, dtype, TILE, 8);
        kernels.push(declared(
            format!("linear_tiles_{name}"),
            choices,
            TILE_THREADS,
            |b| {
                with_vector!(dtype, E, _N => expand_tiles::<E>(b));
            },
        )?);
    }
    for dtype in Dtype::ALL {
        for weight in Dtype::ALL {
            let name = format!("{}_{}", dtype.name(), weight.name());
            // f32 activations are what the tensor cores do not serve; other pairs of dtypes are rare.
            let fast: &[_] = if dtype == Dtype::F32 {
                &[(1, 4, 4), (4, 4, 3)]
            } else {
                &[]
            };
            for &(some, width, unroll) in fast.iter().chain(&[(4, 1, 2)]) {
                let choices = choices(kind::ROWS_SIMT, dtype, weight, some, width);
                kernels.push(declared(
                    format!("linear_rows_simt_{name}_{some}_w{width}"),
                    choices,
                    PLANES * 32,
                    |b| {
                        with_vector!(dtype, E, _N => with_vector!(weight, W, _M => if width == 4 {
                            expand_rows_simt::<E, W, Const<4>>(b, some, unroll);
                        } else {
                            expand_rows_simt::<E, W, Const<1>>(b, some, unroll);
                        }));
                    },
                )?);
            }
            let choices = choices(kind::TILES_SIMT, dtype, weight, TILE, 1);
            kernels.push(declared(format!("linear_tiles_simt_{name}"), choices, SIMT_THREADS, |b| {
                with_vector!(dtype, E, _N => with_vector!(weight, W, _M => expand_tiles_simt::<E, W>(b)));
            })?);
        }
    }
    Ok(kernels)
}
