//! Many rows of 16-bit x on tensor cores, where there is no cuBLASLt.

use contract::linear::TILE;
use cubecl::prelude::*;

use super::{Args, Outside, store};
use crate::attention::fragments::{Line, Pair, load_matrices, mma, registers, zeros};
use crate::emit::Builder;

/// Lines of 8 elements per step.
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

/// Grid: rows / `TILE`, out features / `TILE`.
#[cube]
fn tiles<E: Float>(
    x: &Array<Vector<E, Line>>,
    w: &Array<Vector<E, Line>>,
    outside: &mut Outside<E>,
    args: &Args,
) {
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let row0 = CUBE_POS_X * TILE;
    let column0 = CUBE_POS_Y * TILE;
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
                    store::<E>(outside, args, row, column, value[c as usize]);
                }
            }
        }
    }
}

pub fn expand<E: Float>(b: &mut Builder) {
    let line = b.type_of::<Vector<E, Line>>();
    let (x, w) = (b.read("x", line), b.read("w", line));
    let outside = Outside::<E>::declare(b);
    let args = Args::declare(b);
    tiles::expand::<E>(b.scope(), x.into(), w.into(), outside, args);
}
