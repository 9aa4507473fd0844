//! Products of tiles of 16-bit elements, a plane's 16 rows (or 32) at a time.

use cubecl::prelude::*;

use super::fragments::*;
use super::softmax::Parts;
use super::tiles::Config;

/// Adds the products of a plane's rows of one tile and all rows of another: scores of queries and keys.
/// Lines are where the lane's matrices begin.
#[cube]
pub fn score<E: Float>(
    rows: &SharedMemory<Vector<E, Line>>,
    columns: &SharedMemory<Vector<E, Line>>,
    s: &mut Parts,
    row_line: u32,
    column_line: u32,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let key_steps = comptime!(config.tile_keys as usize / 16);
    #[unroll]
    for d in 0..dim_steps {
        let mut a = Sequence::<Array<Vector<E, Pair>>>::new();
        #[unroll]
        for f in 0..fragments {
            let line = row_line + comptime!(f as u32 * 16 * pitch + d as u32 * 2);
            a.push(load_matrices::<E>(rows, line, false));
        }
        #[unroll]
        for n in 0..key_steps {
            let line = column_line + comptime!(n as u32 * 16 * pitch + d as u32 * 2);
            let b = load_matrices::<E>(columns, line, false);
            let b0 = registers::<E>(&b, 0usize);
            let b1 = registers::<E>(&b, 2usize);
            #[unroll]
            for f in 0..fragments {
                mma::<E>(a.index(f), &b0, s.index_mut((f * key_steps + n) * 2));
                mma::<E>(a.index(f), &b1, s.index_mut((f * key_steps + n) * 2 + 1));
            }
        }
    }
}

/// Adds the products of a plane's weights and the rows of a tile that these are of: sums of values.
#[cube]
pub fn accumulate<E: Float>(
    s: &Parts,
    tile: &SharedMemory<Vector<E, Line>>,
    acc: &mut Parts,
    first_line: u32,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let key_steps = comptime!(config.tile_keys as usize / 16);
    #[unroll]
    for n in 0..key_steps {
        let mut a = Sequence::<Array<Vector<E, Pair>>>::new();
        #[unroll]
        for f in 0..fragments {
            let mut p = Array::<Vector<E, Pair>>::new(4usize);
            let left = s.index((f * key_steps + n) * 2);
            let right = s.index((f * key_steps + n) * 2 + 1);
            p[0] = Vector::cast_from(left[0]);
            p[1] = Vector::cast_from(left[1]);
            p[2] = Vector::cast_from(right[0]);
            p[3] = Vector::cast_from(right[1]);
            a.push(p);
        }
        #[unroll]
        for d in 0..dim_steps {
            let line = first_line + comptime!(n as u32 * 16 * pitch + d as u32 * 2);
            let b = load_matrices::<E>(tile, line, true);
            let b0 = registers::<E>(&b, 0usize);
            let b1 = registers::<E>(&b, 2usize);
            #[unroll]
            for f in 0..fragments {
                mma::<E>(a.index(f), &b0, acc.index_mut((f * dim_steps + d) * 2));
                mma::<E>(a.index(f), &b1, acc.index_mut((f * dim_steps + d) * 2 + 1));
            }
        }
    }
}
