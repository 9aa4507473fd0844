//! Many rows of x, of any dtypes, strides and alignment.

use contract::linear::TILE;
use cubecl::prelude::*;

use super::{Args, Outside, store};
use crate::emit::Builder;

/// Elements per step of `tiles_simt`.
const SIMT_STEP: u32 = 16;
/// Threads of `tiles_simt`: 16 × 16, each with 4 × 4 of the tile.
pub const SIMT_THREADS: u32 = 256;

/// Grid: rows / `TILE`, out features / `TILE`. Scalar accesses, so that any stride and alignment will do.
#[cube]
fn tiles_simt<E: Float, W: Float>(
    x: &Array<E>,
    w: &Array<W>,
    outside: &mut Outside<E>,
    args: &Args,
) {
    let row0 = CUBE_POS_X * TILE;
    let column0 = CUBE_POS_Y * TILE;
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
            store::<E>(outside, args, row, column, acc[i as usize]);
        }
    }
}

pub fn expand<E: Float, W: Float>(b: &mut Builder) {
    let (ty, ws) = (b.type_of::<E>(), b.type_of::<W>());
    let (x, w) = (b.read("x", ty), b.read("w", ws));
    let outside = Outside::<E>::declare(b);
    let args = Args::declare(b);
    tiles_simt::expand::<E, W>(b.scope(), x.into(), w.into(), outside, args);
}
