//! Tiles of f32 for gradients on tensor cores, and products of them as
//! [`tf32`](crate::attention::tf32) makes them: what [`tiles`](super::tiles) and
//! [`products`](crate::attention::products) are for 16-bit elements.
//!
//! A tile that goes by is read in two ways: rows of it as columns of a product, and neighbouring
//! columns of several rows. Quads of a row are exchanged so that either way lanes which read
//! together read from all banks.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::Place;
use crate::attention::arguments::Rows;
use crate::attention::copies::copy_line;
use crate::attention::fragments::*;
use crate::attention::softmax::Parts;
use crate::attention::tf32::*;
use crate::attention::tiles::Config;
use crate::attention::tiles_f32::{column, join};

/// Rows of quads in memory.
pub type Quads = Array<Vector<f32, Quad>>;

/// Sums that a plane has in work at once.
const CHAINS: usize = 2;

/// As [`super::tiles::Tiles`].
#[derive(CubeType)]
pub struct Tiles {
    pub kept: SharedMemory<Vector<f32, Quad>>,
    pub kept_v: SharedMemory<Vector<f32, Quad>>,
    pub passing: SharedMemory<Vector<f32, Quad>>,
    pub passing_v: SharedMemory<Vector<f32, Quad>>,
    pub ready: Shared<Barrier>,
}

#[cube]
pub fn tiles(#[comptime] config: Config) -> Tiles {
    let kept_quads = comptime!((config.rows() * config.head_dim / 4) as usize);
    let quads = comptime!((config.tile_keys * config.head_dim / 4) as usize);
    let kept = SharedMemory::<Vector<f32, Quad>>::new_aligned(kept_quads, 128usize);
    let kept_v = SharedMemory::<Vector<f32, Quad>>::new_aligned(kept_quads, 128usize);
    let passing = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let passing_v = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    Tiles {
        kept,
        kept_v,
        passing,
        passing_v,
        ready,
    }
}

/// What the quads of a row are exchanged by. Eight lanes read four quads of rows 2 h and 2 h + 1:
/// these differ in bit 2. Sixteen read two quads of rows 2 t, or of rows 2 t + 1: these differ in
/// bits 1 and 2.
#[cube]
fn exchange(row: u32) -> u32 {
    (row & 2u32) | ((row ^ (row << 2u32)) & 4u32)
}

/// Starts copying rows `first..`; rows from `end` on, and quads from `quads` on, become zero.
#[cube]
pub fn copy_quads(
    source: &Quads,
    tile: &mut SharedMemory<Vector<f32, Quad>>,
    rows: &Rows,
    first: u32,
    end: u32,
    quads: u32,
    #[comptime] count: u32,
    #[comptime] config: Config,
) {
    let per_row = comptime!(config.head_dim / 4);
    let step = comptime!(config.threads() / per_row);
    let quad = UNIT_POS_X % per_row;
    let row = UNIT_POS_X / per_row;
    let mut from = rows.base + u64::cast_from(first + row) * rows.token + u64::cast_from(quad);
    let advance = rows.token * comptime!(step as u64);
    #[unroll]
    for i in 0..comptime!(count / step) {
        let row = row + comptime!(i * step);
        let to = row * per_row + (quad ^ exchange(row));
        let valid = first + row < end && quad < quads;
        copy_line::<f32, Quad>(source, tile, from, to, valid);
        from += advance;
    }
}

/// Where a lane's quads begin in the tiles.
#[derive(CubeType, Clone)]
pub struct LaneQuads {
    /// Of the plane's rows of a tile that is kept, and of the rows of one that goes by.
    kept: u32,
    passing: u32,
    /// What they are exchanged by in multiples of four.
    swap: u32,
    /// In pairs: of the columns of rows 2 t, where these are in even and in odd quadruples of
    /// quads.
    even: u32,
    odd: u32,
}

#[cube]
pub fn lane_quads(lane: &Lane, #[comptime] config: Config) -> LaneQuads {
    let per_row = comptime!(config.head_dim / 4);
    let (g, t) = (lane.group_row, lane.pair);
    let swap = exchange(g);
    let quad = t ^ (swap & 2u32);
    // Rows 2 t are exchanged by 2 t.
    let of_columns = (g / 2u32) ^ (t * 2u32);
    let row = t * comptime!(config.head_dim);
    LaneQuads {
        kept: (lane.plane * 16u32 + g) * per_row + quad,
        passing: g * per_row + quad,
        swap: swap & 4u32,
        even: row + of_columns * 2u32 + g % 2u32,
        odd: row + (of_columns ^ 4u32) * 2u32 + g % 2u32,
    }
}

/// Adds the products of a plane's rows of one tile and all rows of another.
#[cube]
pub fn score(
    rows: &SharedMemory<Vector<f32, Quad>>,
    columns: &SharedMemory<Vector<f32, Quad>>,
    s: &mut Parts,
    at: &LaneQuads,
    dims: u32,
    #[comptime] config: Config,
) {
    let per_row = comptime!(config.head_dim / 4);
    let parts = comptime!(config.tile_keys as usize / 8);
    let mut dim = 0u32;
    while dim < dims {
        let step = (dim / 4u32) ^ at.swap;
        let upper = rows[(at.kept + step) as usize];
        let lower = rows[(at.kept + step + comptime!(8 * per_row)) as usize];
        let mut a = Sequence::<Cut16>::new();
        a.push(cut_left(upper, lower));
        #[unroll]
        for n in 0..comptime!(parts / CHAINS) {
            let mut b = Sequence::<Cut16>::new();
            #[unroll]
            for c in 0..CHAINS {
                let row = comptime!((n * CHAINS + c) as u32 * 8 * per_row);
                b.push(cut_right(columns[(at.passing + step + row) as usize]));
            }
            products(&a, &b, s, parts, comptime!(n * CHAINS), 1usize, CHAINS);
        }
        dim += 16u32;
    }
}

/// Adds the products of a plane's weights and the rows of a tile that these are of.
#[cube]
pub fn accumulate(
    s: &Parts,
    tile: &SharedMemory<Vector<f32, Quad>>,
    acc: &mut Parts,
    at: &LaneQuads,
    dims: u32,
    #[comptime] config: Config,
) {
    let pairs = tile.to_slice().with_vector_size::<Pair>();
    let parts = comptime!(config.head_dim as usize / 8);
    #[unroll]
    for n in 0..comptime!(config.tile_keys as usize / 16) {
        let left = s.index(comptime!(n * 2));
        let right = s.index(comptime!(n * 2 + 1));
        let mut a = Sequence::<Cut16>::new();
        a.push(cut_left(join(left[0], right[0]), join(left[1], right[1])));
        #[unroll]
        for d in 0..comptime!(parts / 2) {
            // Columns past the dimension hold nothing. The branch also keeps the compiler from
            // loading far ahead, which takes more registers than there are.
            if comptime!(d as u32 * 16) < dims {
                let mut held = Array::<Vector<f32, Pair>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    // Rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: odd ones are exchanged by four more.
                    let row = comptime!((n * 16 + i / 2 * 8 + i % 2) as u32);
                    let first = if comptime!((d + i) % 2 == 0) {
                        at.even
                    } else {
                        at.odd
                    };
                    let offset = comptime!(row * config.head_dim / 2 + d as u32 / 2 * 16);
                    held[i] = pairs[(first + offset) as usize];
                }
                let mut b = Sequence::<Cut16>::new();
                #[unroll]
                for c in 0..CHAINS {
                    b.push(cut_right(column(&held, 0usize, c)));
                }
                products(&a, &b, acc, parts, comptime!(d * CHAINS), 1usize, CHAINS);
            }
        }
    }
}

/// Stores a plane's 16 rows, times a factor.
#[cube]
pub fn store(
    acc: &Parts,
    to: &mut Quads,
    at: &Place,
    first: u32,
    end: u32,
    quads: u32,
    factor: f32,
    lane: &Lane,
    #[comptime] config: Config,
) {
    #[unroll]
    for i in 0..2usize {
        let row = first + lane.plane * 16u32 + lane.group_row + comptime!(i as u32 * 8);
        let to_row = at.base + u64::cast_from(row) * at.token;
        #[unroll]
        for d in 0..comptime!(config.head_dim as usize / 16) {
            let quad = lane.pair + comptime!(d as u32 * 4);
            if row < end && quad < quads {
                let left = acc.index(comptime!(d * 2))[i];
                let right = acc.index(comptime!(d * 2 + 1))[i];
                let mut four = Vector::<f32, Quad>::empty();
                #[unroll]
                for c in 0..2usize {
                    four[comptime!(c * 2)] = left[c] * factor;
                    four[comptime!(c * 2 + 1)] = right[c] * factor;
                }
                to[(to_row + u64::cast_from(quad)) as usize] = four;
            }
        }
    }
}
