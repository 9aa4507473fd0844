//! A few rows of x, of any dtypes, bound by reading W.

use cubecl::prelude::*;

use super::{Addends, Args, store};
use crate::emit::Builder;

/// Planes of a cube.
pub const PLANES: u32 = 8;
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

pub fn expand<E: Float, W: Float, N: Size>(b: &mut Builder, some: u32, unroll: u32) {
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
